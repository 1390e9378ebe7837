"""The main job as a user meets it: its folder, kills and signals, what changes nothing, runs that follow from one."""

import itertools
import json
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from job import (
    CommandLine,
    Shelf,
    assert_alike,
    assert_same,
    book,
    command,
    composed,
    composed_line,
    composition_of,
    distill,
    environment,
    is_handled,
    lines_of,
    metrics,
    program,
    results,
    run_dir,
    run_of,
    wait_for,
    weights,
)

from distill.commands.cli import start_ranks
from distill.config.settings import StudentConfig, TeacherConfig
from distill.distributed.ranks import Ranks
from distill.models.load import load_pretrained, load_tokenizer
from distill.models.teacher import load_teacher
from distill.runs.check import check
from distill.runtime.errors import SettingError
from distill.runtime.signals import in_force

STEPS = 8  # of the distillation below: 2 epochs of 4 steps
MAIN = "distilbert_gutenberg"


def test_the_run_folder_keeps_its_contract(done: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "results.json", "report.html", "report.md", "student/README.md"):
        assert (done / name).stat().st_size > 0, name
    assert list((done / "plots").glob("*.png"))
    assert sorted(p.name for p in (done / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]
    lines, found = metrics(done), results(done)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {"tokens", "seconds", "lr", "grad_norm", "tokens_per_second", "data_wait"} <= lines[0].keys()
    for line in lines:
        parts = 5 * line["loss/soft"] + 2 * line["loss/mlm"] + line["loss/cosine"]
        assert line["loss/total"] == pytest.approx(parts, rel=1e-5)
    for key in ("corpus", "teacher", "student", "agreement", "backend", "environment", "history"):
        assert found[key], key
    assert found["recipe"] == MAIN and found["training"]["steps"] == STEPS
    assert found["training"]["ended_by"] == "epochs" and 0 <= found["training"]["data_wait"] < 1
    assert [line["epoch"] for line in found["history"]] == [1.0, 2.0]
    for model in ("teacher", "student"):
        assert found[model]["perplexity"]["heldout"] > 1 and found[model]["pseudo_perplexity"]["heldout"] > 1
    assert found["student"]["parameters"] < found["teacher"]["parameters"] and "samples" not in found


def test_a_finished_run_says_so_and_changes_nothing(
    shelf: Shelf, done: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Rank 0 reads its results and gives them to the others, between which only JSON goes."""
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*") if path.is_file() and path.name != ".lock"}
    monkeypatch.setattr(Ranks, "broadcast", lambda self, value: json.loads(json.dumps(value)))
    assert shelf.run(done) == 0
    assert "finished" in capfd.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert shelf.run(done, "resume=never") == 2
    assert "resume=never" in capfd.readouterr().err


def test_what_is_incidental_leaves_the_student_the_same(shelf: Shelf, done: Path) -> None:
    folder = shelf.root / "incidental"
    assert shelf.run(folder, "tracker=tensorboard", "train.log_every=3", "train.save_every=5", "train.keep=1") == 0
    assert_same(folder, done)
    assert list((folder / "tensorboard").iterdir())


def test_another_split_of_the_same_step_gives_the_same_student(shelf: Shelf, done: Path) -> None:
    assert shelf.run(shelf.root / "split", "train.batch_size=4", "train.accumulate=4") == 0
    assert_alike(shelf.root / "split", done)


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


@pytest.mark.parametrize("ranks", [[], pytest.param(["backend=fsdp", "backend.processes=2"], marks=pytest.mark.slow)])
def test_asked_to_stop_it_saves_and_resumes(shelf: Shelf, done: Path, ranks: list[str]) -> None:
    folder, more = shelf.root / f"asked-to-stop-{len(ranks)}", ("train.save_every=100", *ranks)
    more = (*more, "train.accumulate=1") if ranks else more
    stopped = Forked(shelf.arguments(folder, *more), environment(), change=None if ranks else hold_a_step)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and metrics(folder), stopped)
    stopped.send_signal(signal.SIGTERM)
    _, errors = stopped.communicate(timeout=500)
    assert stopped.returncode == 143 and "the same command resumes" in errors, errors
    assert len(metrics(folder)) < STEPS
    shelf.run_alone(folder, *more)
    (assert_alike if ranks else assert_same)(folder, done)


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


def test_the_baseline_stands_beside_the_student(
    shelf: Shelf, done: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """A run that had a teacher is none."""
    baseline, student = shelf.root / "baseline", shelf.root / "with-baseline"
    assert distill(f"+recipe={MAIN}_baseline", *shelf.arguments(baseline, "objective=mlm")[1:]) == 0
    assert results(baseline)["training"]["final_loss"].keys() == {"total", "mlm"}
    assert shelf.run(student, f"evaluate.baseline={baseline}") == 0
    found = results(student)["baseline"]
    assert found["perplexity"] == pytest.approx(results(baseline)["student"]["perplexity"])
    assert len(found["history"]) == 2 and "baseline" in (student / "report.md").read_text().lower()
    capfd.readouterr()
    assert shelf.run(tmp_path / "run", f"evaluate.baseline={done}") == 2
    assert f"evaluate.baseline={done} is no baseline of this run" in lines_of(capfd)[-1]
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.slow
def test_compiled_models_train_as_the_others_do(shelf: Shelf, done: Path) -> None:
    assert shelf.run(shelf.root / "compiled", "precision.compile=true") == 0
    losses = [[line["loss/total"] for line in metrics(path)] for path in (shelf.root / "compiled", done)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# --- the start of ranks --------------------------------------------------------------------------------------------

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


# --- without a recipe ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [[], ["corpus.path=x"], ["objective=distilbert", "seed=3"], ["teacher.path=runs/a"]]
)
def test_without_a_recipe_it_is_the_main_job(arguments: list[str]) -> None:
    run, same = composed_line(*arguments), composed_line(f"+recipe={MAIN}", *arguments)
    assert run.config == same.config and run.folder == same.folder == Path("runs") / MAIN
    assert run.recipe == MAIN and run.resolved == same.resolved


def test_options_and_overrides_may_stand_in_any_order() -> None:
    line = CommandLine.of(["seed=1", "-cd", ".", "+recipe=smoke", "-m"])
    assert line.overrides == ["seed=1", "recipe=smoke"] and line.options == {"--config-dir": ".", "--multirun": ""}
    with pytest.raises(SettingError, match="did you mean --multirun"):
        CommandLine.of(["--multrun"])


def test_it_runs_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """Books, two steps, one process; a connection to anywhere would end it."""
    (tmp_path / "books").mkdir()
    for number in range(4):
        (tmp_path / "books" / f"{number}.txt").write_text(book(number, 15))

    def refuse(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"a connection was tried: {arguments}")

    for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    corpus = f"corpus.path={tmp_path / 'books'}"
    check(composed_line(corpus).config)  # its defaults fit each other
    small = ["train.steps=2", "corpus.heldout=0.2", "data.cache=cache", "data.workers=1", "evaluate.max_sequences=40"]
    assert distill(corpus, *small, "corpus.sequence_length=32", "precision=fp32") == 0
    found = results(tmp_path / "runs" / MAIN)
    assert found["recipe"] == MAIN and list(found["evaluation"]) == ["heldout"]
    assert found["command"].startswith("python -m distill corpus.path=")
    start = {"init": "layers", "from": "the deep bundled teacher", "layers": [0, 1, 2]}
    start["published"] = {"license": "apache-2.0"}
    assert found["student"]["start"] == start  # the best are known, so that nothing is searched for
    assert sum("is left out: it lies neither" in note for note in found["notes"]) == 2
    assert any("teacher  the deep bundled teacher" in line for line in lines)


# --- chaining by hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", "student"])  # of snapshots: runs/test_going_on.py
def test_a_run_and_its_student_are_teachers(done: Path, part: str) -> None:
    model, tokenizer, _ = load_teacher(TeacherConfig(path=str(done / part)))
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights(done).items())
    assert tokenizer is not None and len(tokenizer) <= model.get_input_embeddings().weight.shape[0]


def test_its_path_alone_makes_it_the_teacher(shelf: Shelf, done: Path, tmp_path: Path) -> None:
    arguments = [each for each in shelf.arguments(tmp_path / "run") if not each.startswith("teacher")]
    assert distill(*arguments, f"teacher.path={done}", "student.layers=[0]", "train.steps=2") == 0
    found = results(tmp_path / "run")
    assert found["teacher"]["name"] == str(done)
    assert found["teacher"]["perplexity"] == pytest.approx(results(done)["student"]["perplexity"])
    assert found["student"]["start"] == {"init": "layers", "from": str(done), "layers": [0]}


def test_what_the_path_stands_for_is_the_command_lines_to_say(tmp_path: Path) -> None:
    for option in ([], ["teacher=pretrained"], ["teacher=bundled_small"], ["teacher=none"]):
        assert composed(f"+recipe={MAIN}", *option, f"teacher.path={tmp_path}").teacher.path == str(tmp_path)
    assert composed(f"+recipe={MAIN}", "teacher.path=null").teacher.is_none
    assert composed(f"+recipe={MAIN}", "teacher.path=bundled_small").teacher.bundled
    with pytest.raises(SettingError, match=r"choose student=pretrained"):  # layers may be meant as well
        composed(f"+recipe={MAIN}", f"student.path={tmp_path}")


@pytest.mark.parametrize("recipe", [MAIN, "smoke", "distilgpt2_gutenberg", "mixture"])
def test_layers_of_a_recipe_are_none_of_a_student_that_is_there(recipe: str, tmp_path: Path) -> None:
    """With each recipe that chooses layers, which are those of the option that another one replaces."""
    corpus = ["corpus.sources={a: {kind: text, path: x, weight: 1}, b: {kind: bundled, weight: 1}}"]
    arguments = [f"+recipe={recipe}", *corpus * (recipe == "mixture")]
    saved = composed(*arguments, "student=pretrained", f"student.path={tmp_path}").student
    assert saved == StudentConfig(init="pretrained", path=str(tmp_path), dropout=composed(*arguments).student.dropout)


def test_a_run_that_has_not_finished_is_no_model_yet(done: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "run"
    (unfinished / "checkpoints").mkdir(parents=True)
    shutil.copy(done / "config.yaml", unfinished)
    with pytest.raises(SettingError, match=r"to finish it$"):
        load_pretrained("student.path", str(unfinished))
    for step in (50, 100):
        (unfinished / "snapshots" / f"step-{step}").mkdir(parents=True)
    for load in (load_pretrained, load_tokenizer):
        with pytest.raises(
            SettingError, match=rf"^teacher.path={unfinished} is a run .*{unfinished}/snapshots/step-100$"
        ):
            load("teacher.path", str(unfinished))


def test_a_run_that_cannot_be_continued_is_begun_from(
    shelf: Shelf, done: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """What the refusal advises."""
    assert shelf.run(done, "train.epochs=3") == 2
    line = lines_of(capfd)[-1]
    assert "train.epochs was 2 and is now 3" in line and "student=pretrained student.path=RUN" in line
    advised = ["student=pretrained", f"student.path={done}", "student.layers=null", "train.epochs=1"]
    assert shelf.run(tmp_path / "run", *advised, "optimizer.lr=1e-12") == 0  # the student stays where it begins
    before, after = weights(done), weights(tmp_path / "run")
    assert all(torch.allclose(before[name], after[name], atol=1e-8) for name in before)
    assert results(tmp_path / "run")["student"]["start"] == {"init": "pretrained", "from": str(done)}
