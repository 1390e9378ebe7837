"""The main job end to end: books in, student and report out; resumed, refused, repeated."""

import itertools
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from job import (
    Shelf,
    assert_alike,
    assert_same,
    command,
    composed_line,
    composition_of,
    distill,
    environment,
    is_handled,
    metrics,
    program,
    results,
    run_dir,
    run_of,
    wait_for,
)

from distill.commands.cli import start_ranks
from distill.distributed.ranks import Ranks
from distill.runtime.errors import SettingError
from distill.runtime.signals import in_force

STEPS = 8  # of the distillation below: 2 epochs of 4 steps


def test_the_run_folder_keeps_its_contract(done: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "results.json", "report.html", "report.md", "student/README.md"):
        assert (done / name).stat().st_size > 0, name
    assert list((done / "plots").glob("*.png"))
    assert sorted(p.name for p in (done / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]
    lines = metrics(done)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    wanted = {"tokens", "seconds", "loss/total", "loss/soft", "loss/mlm", "loss/cosine", "lr", "grad_norm"}
    assert wanted | {"tokens_per_second", "data_wait"} <= lines[0].keys()
    content = results(done)
    for key in ("recipe", "corpus", "teacher", "student", "agreement", "training", "backend", "environment", "history"):
        assert content[key], key
    assert content["recipe"] == "distilbert_gutenberg" and content["training"]["steps"] == STEPS
    assert content["training"]["ended_by"] == "epochs"
    assert 0 <= content["training"]["data_wait"] < 1 and "Waiting for data" in (done / "report.md").read_text()
    assert [line["epoch"] for line in content["history"]] == [1.0, 2.0]
    for model in ("teacher", "student"):
        assert content[model]["perplexity"]["heldout"] > 1 and content[model]["pseudo_perplexity"]["heldout"] > 1
    assert content["student"]["parameters"] < content["teacher"]["parameters"]
    assert "samples" not in content and "Samples of text" not in (done / "report.md").read_text()


def test_losses_add_up_and_fall(done: Path) -> None:
    lines = metrics(done)
    for line in lines:
        parts = 5 * line["loss/soft"] + 2 * line["loss/mlm"] + line["loss/cosine"]
        assert line["loss/total"] == pytest.approx(parts, rel=1e-5)
    assert lines[-1]["loss/total"] < lines[0]["loss/total"]


def test_transformers_loads_the_student(done: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(done / "student") for kind in (AutoModelForMaskedLM, AutoTokenizer))
    assert model.config.model_type == "distilbert" and model.config.n_layers == 2
    inputs = tokenizer("The quiet river found the [MASK] by the sea.", return_tensors="pt")
    assert model(**inputs).logits.shape[-1] == len(tokenizer)


def test_a_finished_run_says_so_and_changes_nothing(shelf: Shelf, done: Path, capfd: pytest.CaptureFixture) -> None:
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*") if path.is_file() and path.name != ".lock"}
    assert shelf.run(done) == 0
    assert "finished" in capfd.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_ranks_hand_on_a_finished_run(
    shelf: Shelf, done: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Rank 0 reads its results and gives them to the others, between which only JSON goes."""
    monkeypatch.setattr(Ranks, "broadcast", lambda self, value: json.loads(json.dumps(value)))
    assert shelf.run(done) == 0
    assert "finished" in capfd.readouterr().err


def test_the_incidental_groups_leave_the_student_the_same(shelf: Shelf, done: Path) -> None:
    folder = shelf.root / "incidental"
    assert shelf.run(folder, "tracker=tensorboard", "train.log_every=3", "train.save_every=5", "train.keep=1") == 0
    assert_same(folder, done)
    assert list((folder / "tensorboard").iterdir())


def test_another_split_of_the_same_step_gives_the_same_student(shelf: Shelf, done: Path) -> None:
    folder = shelf.root / "split"
    assert shelf.run(folder, "train.batch_size=4", "train.accumulate=4") == 0
    assert_alike(folder, done)


def test_killed_and_started_again_it_ends_the_same_bitwise(shelf: Shelf, done: Path) -> None:
    folder = shelf.root / "killed"
    killed = Forked(shelf.arguments(folder), environment(), change=hold_a_step)
    wait_for(lambda: (folder / "checkpoints" / "step-00000002").exists(), killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (folder / "results.json").exists()
    assert shelf.run(folder) == 0
    assert_same(folder, done)
    for key in ("loss/total", "grad_norm", "lr"):
        assert [line[key] for line in metrics(folder)] == [line[key] for line in metrics(done)]
    assert [line["loss"] for line in results(folder)["history"]] == [line["loss"] for line in results(done)["history"]]


def hold_a_step() -> None:
    """Let the fourth step wait for a signal, which so comes in time on any machine."""
    from tiny import loop

    set_rate, steps = loop.set_learning_rate, itertools.count(1)

    def held(*arguments: Any) -> None:
        is_held = next(steps) == 4
        while is_held and in_force().stopping is None:
            time.sleep(0.01)
        set_rate(*arguments)

    loop.set_learning_rate = held


def test_asked_to_stop_it_saves_and_goes_on(shelf: Shelf, done: Path) -> None:
    folder = shelf.root / "asked-to-stop"
    stopped = Forked(shelf.arguments(folder, "train.save_every=100"), environment(), change=hold_a_step)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and metrics(folder), stopped)
    stopped.send_signal(signal.SIGTERM)
    _, errors = stopped.communicate(timeout=500)
    assert stopped.returncode == 143 and "the same command resumes" in errors, errors
    assert len(metrics(folder)) < STEPS
    assert shelf.run(folder, "train.save_every=100") == 0
    assert_same(folder, done)


@pytest.mark.parametrize("part", ["imports", "text"])
def test_before_the_first_step_a_signal_ends_a_run_in_one_line(shelf: Shelf, part: str) -> None:
    folder = shelf.root / f"early-{part}"
    early = (program if part == "imports" else command)(*shelf.arguments(folder))
    wait_for(lambda: folder.exists() if part == "text" else is_handled(signal.SIGHUP, early.pid), early)
    early.send_signal(signal.SIGHUP)
    _, errors = early.communicate(timeout=500)
    assert early.returncode == 129, errors
    said = [line for line in errors.splitlines() if line.startswith("distill: ")]
    assert len(said) == 1 and "SIGHUP" in said[0] and "Traceback" not in errors


def test_the_baseline_stands_beside_the_student(shelf: Shelf) -> None:
    baseline, student = shelf.root / "baseline", shelf.root / "with-baseline"
    assert distill("+recipe=distilbert_gutenberg_baseline", *shelf.arguments(baseline, "objective=mlm")[1:]) == 0
    assert results(baseline)["training"]["final_loss"].keys() == {"total", "mlm"}
    assert shelf.run(student, f"evaluate.baseline={baseline}") == 0
    content = results(student)
    assert content["baseline"]["perplexity"] == pytest.approx(results(baseline)["student"]["perplexity"])
    assert len(content["baseline"]["history"]) == 2
    assert "baseline" in (student / "report.md").read_text().lower()


@pytest.mark.slow
def test_compiled_models_train_as_the_others_do(shelf: Shelf, done: Path) -> None:
    folder = shelf.root / "compiled"
    assert shelf.run(folder, "precision.compile=true") == 0
    losses = [[line["loss/total"] for line in metrics(path)] for path in (folder, done)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_users_own_recipe_sweep_and_student(shelf: Shelf, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\ndefaults:\n  - distilbert_gutenberg\n  - _self_\ntrain: {steps: 1}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    arguments = [a for a in shelf.arguments(tmp_path)[1:] if not a.startswith("hydra.run.dir")]
    sweep = [f"hydra.sweep.dir={tmp_path / 'sweep'}", "hydra.sweep.subdir=${hydra:job.num}"]
    status = distill("--config-dir", str(tmp_path), "+recipe=mine", *arguments, *sweep, "seed=0,1", "--multirun")
    assert status == 0
    first, second = (results(tmp_path / "sweep" / str(job)) for job in (0, 1))
    assert first["training"]["steps"] == second["training"]["steps"] == 1 and first["recipe"] == "mine"
    assert first["training"]["final_loss"] != second["training"]["final_loss"]


@pytest.mark.slow
def test_a_run_ends_by_the_clock(shelf: Shelf) -> None:
    folder = shelf.root / "clock"
    assert shelf.run(folder, "train.epochs=null", "train.minutes=0.002") == 0
    content = results(folder)
    assert content["training"]["ended_by"] == "minutes" and content["student"]["perplexity"]["heldout"] > 1


def test_a_run_that_had_a_teacher_is_no_baseline(
    shelf: Shelf, done: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """It is refused before anything is trained."""
    assert results(done)["teacher"] is not None
    assert shelf.run(tmp_path / "run", f"evaluate.baseline={done}") == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(f"distill: evaluate.baseline={done} is no baseline of this run: it learned from a teacher (")
    assert not (tmp_path / "run" / "config.yaml").exists()


RANKS = ["+recipe=smoke", "backend=ddp", "backend.processes=2", "backend.device=cpu"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would be started as ranks."""
    commands: list[list[str]] = []
    monkeypatch.setattr("distill.distributed.launch.launch", lambda settings, command: commands.append(command) or 0)
    return commands


def test_a_clock_in_the_name_of_the_folder_gives_all_ranks_one(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("runs/x", "runs/${now:%H-%M-%S-%f}"):
        given = [*RANKS, f"hydra.run.dir={name}"]
        monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "distill", *given])
        composition = composition_of(*given)
        job = run_of(composition)
        assert start_ranks(job, composition.folder_has_time) == 0 and "$" not in str(job.folder)
        folder = [] if name == "runs/x" else [run_dir(job.folder)]
        assert started.pop() == [sys.executable, "-m", "distill", *given, *folder]


def test_ranks_go_on_where_the_checkpoint_that_they_began_from_was_pruned(
    started: list[list[str]], tmp_path: Path
) -> None:
    named = tmp_path / "other" / "step-00000001"
    job = composed_line(*RANKS, f"hydra.run.dir={tmp_path / 'run'}", f"resume={named}")
    with pytest.raises(SettingError, match=r"^resume=.*no such file or folder"):
        start_ranks(job)
    (tmp_path / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)
    assert start_ranks(job) == 0 and len(started) == 1
