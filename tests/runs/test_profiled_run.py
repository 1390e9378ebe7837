"""A run with a profile: the same student bitwise, every phase timed, a trace, a page; and a slow rank is found."""

import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks
from job import CommandLine, Shelf, assert_same, check_one_run, composition_of, metrics, results

from distill.commands import cli
from distill.commands.cli import main
from distill.runs.profile.phases import PHASES, RankProfile


@pytest.fixture(scope="module")
def profiled(shelf: Shelf) -> Path:
    """The run of `done`, profiled."""
    folder = shelf.root / "profiled"
    assert shelf.run(folder, "profile=on", "profile.trace_steps=1") == 0
    return folder


@pytest.mark.slow
def test_the_student_is_the_same_bitwise(done: Path, profiled: Path) -> None:
    assert_same(done, profiled)
    assert [line["loss/total"] for line in metrics(done)] == [line["loss/total"] for line in metrics(profiled)]
    assert results(done)["profile"] is None


def test_a_profile_is_no_other_run(done: Path, shelf: Shelf, capfd: pytest.CaptureFixture) -> None:
    """The finished run without one is the same run with one."""
    assert shelf.run(done, "profile=on") == 0
    assert "finished and nothing was changed" in capfd.readouterr().err and not (done / "profile").exists()


def test_the_folder_has_times_and_a_trace_and_the_report_a_page(profiled: Path, done: Path) -> None:
    content = json.loads((profiled / "profile" / "profile.json").read_text())
    record = results(profiled)
    (rank,) = (RankProfile(**each) for each in content["ranks"])
    steps = record["training"]["steps"]
    assert rank.num_steps == steps == content["summary"]["steps"] and len(rank.steps) == steps - 5
    assert all(rank.totals[phase] > 0 for phase in PHASES)
    # The phases add up to what the loop says of its own time, which ends a little before the step does.
    training = [place for place, phase in enumerate(PHASES) if phase not in ("checkpoint", "evaluation")]
    own = metrics(profiled)[-1]["seconds"] - metrics(profiled)[4]["seconds"]
    assert sum(step[phase] for step in rank.steps for phase in training) >= own - 0.001 * steps
    with gzip.open(profiled / "profile" / "trace-rank-0.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert {"teacher", "forward", "backward", "optimizer", "data"} <= set(names)
    assert names.count("forward") == 2 and any("aten::" in str(name) for name in names)  # one step of two micro-batches
    table = (profiled / "profile" / "trace-rank-0.txt").read_text()
    assert "aten::" in table and "backward" in table
    page = (profiled / "report.md").read_text().split("## Where the time goes")[1].split("\n## ")[0]
    assert re.sub(r"\W", "", record["profile"]["conclusion"]) in re.sub(r"\W", "", page)
    assert "waiting for data" in page and (profiled / "plots" / "utilisation.png").stat().st_size > 5000
    assert "Where the time goes" not in (done / "report.md").read_text()


@pytest.mark.parametrize(("length", "profiled_steps"), [([], 6), (["train.epochs=null", "train.steps=4"], 4)])
def test_the_command_ends_after_its_steps_and_leaves_no_student(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture, length: list[str], profiled_steps: int
) -> None:
    """As often as it is given, also of a run that is shorter."""
    run, settings = tmp_path / "run", (*length, "train.save_every=2")
    for _ in range(2):
        assert main(["profile", *shelf.arguments(run, *settings), "steps=6"]) == 0
        assert "waiting for data" in capfd.readouterr().err
        assert not {path.name for path in run.iterdir()} & {"results.json", "student"}
        assert not list(run.glob("checkpoints/step-*"))
    content = json.loads((run / "profile" / "profile.json").read_text())
    assert RankProfile(**content["ranks"][0]).num_steps == profiled_steps
    assert content["summary"]["conclusion"] in (run / "profile" / "profile.txt").read_text()


def slow_second_rank(folder: Path, arguments: list[str]) -> dict[str, Any] | None:
    """One of two ranks of a profiled run, of which rank 1 takes five times as long for each of its steps, as it is."""
    import os

    from job import distill
    from tiny import loop

    quick = loop.step

    def slow(*values: Any) -> Any:
        began = time.perf_counter()
        sums = quick(*values)
        if os.environ["RANK"] == "1":
            time.sleep(0.05 + 4 * (time.perf_counter() - began))
        return sums

    loop.step = slow
    from distill.commands import ending

    ending.end_rank = lambda status, error=None: None  # it would end the process before it gives anything back
    assert distill(*arguments, f"hydra.run.dir={folder}") == 0
    return (
        json.loads((folder / "profile" / "profile.json").read_text())["summary"] if os.environ["RANK"] == "0" else None
    )


@pytest.mark.slow
def test_a_slow_rank_is_found(shelf: Shelf, tmp_path: Path) -> None:
    given = ["backend=ddp", "backend.device=cpu", "backend.threads=1", "train.batch_size=4", "train.epochs=4"]
    given += ["profile=on", "profile.trace_steps=0", "profile.stop_after=14", "train.save_every=100"]
    block, _ = run_ranks(2, tmp_path / "ranks", slow_second_rank, tmp_path / "run", shelf.arguments(tmp_path, *given))
    assert block["bottleneck"] == "slow rank" and "rank 1" in block["conclusion"]
    content = json.loads((tmp_path / "run" / "profile" / "profile.json").read_text())
    assert [len(rank["steps"]) for rank in content["ranks"]] == [11, 11]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("steps=many", "steps=many: should be a valid integer"),
        ("steps=0", "steps=0: should be greater than or equal to 1; give a number from 1 up to"),
        ("profile.stop_after=3", "profile.stop_after is set by `distill profile`: give steps=N"),
        ("profile=off", "profile is set by `distill profile`: leave it out"),
    ],
)
def test_what_the_command_refuses(argument: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", argument]) == 2
    assert capsys.readouterr().err.startswith(f"distill: {words}")


def test_a_profile_is_of_one_run(capfd: pytest.CaptureFixture) -> None:
    assert main(["profile", "+recipe=smoke", "seed=0,1", "--multirun"]) == 2
    assert "--multirun makes several runs, and `distill profile` profiles one" in capfd.readouterr().err


def test_a_recipe_that_searches_is_profiled_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one run, without what it sweeps."""
    (tmp_path / "recipe").mkdir()
    sweep = "hydra: {mode: MULTIRUN, sweeper: {params: {seed: '0,1'}}}"
    text = f"# @package _global_\ndefaults: [smoke, _self_]\n{sweep}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    lines: list[list[str]] = []
    monkeypatch.setattr(cli, "main_job", lambda arguments: lines.append(arguments) or 0)
    assert main(["profile", "--config-dir", str(tmp_path), "+recipe=mine"]) == 0
    (line,) = lines
    assert not composition_of(*line).sweeps
    check_one_run(CommandLine.of(line))
