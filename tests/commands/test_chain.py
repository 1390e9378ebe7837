"""A chain: stages run in order, each once, several seeds, references between them; refused settings."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job import CommandLine, Shelf, composed_chain, distill, environment, parse_override, results, wait_for
from labelled import table

from distill.commands import chain as chain_module
from distill.commands.chain import STAGE, _finish, _is_finished, run_chain, runs_of
from distill.config.settings import StageConfig
from distill.runs.record import Record
from distill.runs.results_file import write_results
from distill.runtime.errors import StageFailed

RECIPE = """# @package _global_
chain:
  given: {{steps: 6}}
  stages:
    teacher:
      recipe: albert_pretrain
      settings: [{corpus}, {size}, corpus.vocab_size=400, "train.steps=${{chain.given.steps}}"]
    student:
      recipe: distilalbert_gutenberg
      settings: [{corpus}, "teacher.path={{teacher}}", "student.layers=[0]", train.steps=3]
    task:
      recipe: table
      settings: ["student.path={{student}}", {table}]
      seeds: [0, 1]
  table: {{teacher: [teacher], student: [student, task]}}
  anchors: ["Published: 99."]
"""
SIZE = {
    "embedding_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
ACCURACY = "Accuracy, validation.csv"
JOBS = ["teacher", "student", "task/seed-0", "task/seed-1"]


@pytest.fixture(scope="module")
def configs(shelf: Shelf) -> Path:
    """A folder of recipes with a small chain."""
    data = table(shelf.root / "chain-table")
    labels = f"corpus.path={data}, corpus.text=review, corpus.label=stars, corpus.sequence_length=32, train.steps=2"
    corpus = ", ".join(json.dumps(each) for each in [*shelf.corpus, "train.batch_size=8", "precision=fp32"])
    size = json.dumps(f"student.config={json.dumps(SIZE)}".replace('"', ""))
    folder = shelf.root / "configs"
    (folder / "recipe").mkdir(parents=True)
    (folder / "recipe" / "small.yaml").write_text(RECIPE.format(corpus=corpus, size=size, table=labels))
    return folder


def run(configs: Path, folder: Path, *more: str) -> int:
    return distill("--config-dir", str(configs), "+recipe=small", f"hydra.run.dir={folder}", *more)


def run_here(configs: Path, folder: Path, own_process: Callable[[list[str]], bool]) -> list[str]:
    """The chain with its stages in this process, which spares each the seconds that a new one needs to import torch.

    Args:
        own_process: whether a command is run as chains run it nevertheless.

    Returns:
        The folders of the stages that were started.
    """
    started = []
    alone = chain_module._run

    def run_stage(command: list[str]) -> int:
        started.append(command[-1].removeprefix(f"hydra.run.dir='{folder}/").rstrip("'"))
        return alone(command) if own_process(command) else distill(*command[3:])

    chain = composed_chain("+recipe=small", "chain.given.steps=4", search=configs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_module, "_run", run_stage)
        run_chain(chain, folder, ["--config-dir", str(configs)])
    return started


@pytest.fixture(scope="module")
def finished(configs: Path, shelf: Shelf) -> Path:
    """The folder of the chain; the first stage ran in a process of its own, as all of them do."""
    folder = shelf.root / "chain"
    assert run_here(configs, folder, lambda command: "+recipe=albert_pretrain" in command) == JOBS
    return folder


def test_a_chain_from_text_to_table(finished: Path) -> None:
    assert all(results(finished / name)["finished"] for name in JOBS)
    assert results(finished / "teacher")["training"]["steps"] == 4
    assert results(finished / "student")["teacher"]["name"] == str(finished / "teacher")
    head, _, teacher, student = (finished / "chain.md").read_text().splitlines()[:4]
    assert "Perplexity, heldout" in head and ACCURACY in head
    assert teacher.startswith("| teacher |") and "%" not in teacher and " to " in student and "%" in student
    scores = json.loads((finished / "chain.json").read_text())["models"]
    assert len(scores["student"][ACCURACY]) == 2 and ACCURACY not in scores["teacher"]
    page = (finished / "report.html").read_text()
    assert f"{len(JOBS)} of {len(JOBS)} jobs are finished" in page and "<script" not in page
    assert all(f'<a href="{name}/report.html">{name}</a>' in page for name in JOBS)
    assert "Published: 99." in page and f'<th scope="col">{ACCURACY}</th>' in page.replace("<wbr/>", "")


def test_what_is_finished_is_not_run_again(configs: Path, finished: Path, capfd: Any) -> None:
    def times() -> dict[str, int]:
        return {name: (finished / name / "results.json").stat().st_mtime_ns for name in JOBS}

    before = times()
    (finished / "student" / "results.json").unlink()
    assert run_here(configs, finished, lambda _: False) == JOBS[1:], "this, and what refers to it"
    after = times()
    assert [name for name in JOBS if before[name] != after[name]] == ["student"]
    capfd.readouterr()
    assert run(configs, finished, "chain.given.steps=4") == 0
    assert (finished / "chain.md").read_text() in capfd.readouterr().out and times() == after


def test_a_run_is_finished_by_these_arguments_after_its_inputs(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        write_results(folder / "results.json", Record())
    assert not _is_finished(two, ["x"], [one])
    (two / STAGE).write_text('["x"]')
    assert _is_finished(two, ["x"], [one]) and not _is_finished(two, ["y"], [one])
    for damaged in (STAGE, "results.json"):
        whole = (two / damaged).read_text()
        (two / damaged).write_text(whole[:-2])
        assert not _is_finished(two, ["x"], [one])
        (two / damaged).write_text(whole)
    later = (two / STAGE).stat().st_mtime_ns + 10**9
    os.utime(one / "results.json", ns=(later, later))
    assert not _is_finished(two, ["x"], [one]) and _is_finished(two, ["x"], [])


def test_a_name_is_the_folder_of_the_run_with_the_same_seed(tmp_path: Path, monkeypatch: Any) -> None:
    """Or of the first one, whatever signs are in it."""
    settings = {"one": [], "two": ["student.path={one}/x"]}
    stages = {name: StageConfig(recipe="r", settings=given, seeds=[0, 1]) for name, given in settings.items()}
    commands: list[list[str]] = []
    monkeypatch.setattr(chain_module, "_run", lambda command: commands.append(command) or 1)
    folder = tmp_path / "a b, c=d"
    runs = {"one": runs_of(folder / "one", stages["one"]), "two": {seed: folder / "two" for seed in (1, 2)}}
    for seed in runs["two"]:
        with pytest.raises(StageFailed):
            _finish("two", stages["two"], seed, runs, [])
    for command, seed in zip(commands, (1, 0), strict=True):
        path = parse_override(CommandLine.of(command[3:]).overrides[1]).value()
        assert path == f"{folder}/one/seed-{seed}/x"


def test_a_signal_reaches_the_stage_which_ends_in_its_own_time(tmp_path: Path) -> None:
    slow = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), open('done', 'w').close(), "
    slow += "sys.exit(143))); open('ready', 'w').close(); time.sleep(60)"
    parent = "import sys; from distill.commands.chain import _run; sys.exit(_run([sys.executable, '-c', sys.argv[1]]))"
    process = subprocess.Popen([sys.executable, "-c", parent, slow], cwd=tmp_path, env=environment())
    wait_for(lambda: (tmp_path / "ready").exists(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=500) == 143 and (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer.lr=1", "chain.given.NAME"),
        ("chain.stages.teacher.settings=['teacher.path={student}']", "{student} is not among the earlier stages"),
        ("chain.table.teacher=[nothing]", "chain.table.teacher"),
        ("chain.table.teacher=[]", "chain.table.teacher=[]: names no stage"),
        ("+chain.stages.my-stage={recipe: table}", "chain.stages.my-stage"),
        ("chain.stages.teacher.sedes=[1]", "sedes"),
        ("chain.stages.teacher.recipe=nothing", "stage teacher ended with status 2"),
    ],
)
def test_what_stops_it(configs: Path, tmp_path: Path, setting: str, words: str, capfd: Any) -> None:
    assert run(configs, tmp_path / "chain", setting) == 2
    assert words in capfd.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "chain" / "chain.md").exists()
