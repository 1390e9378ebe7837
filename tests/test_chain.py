"""A chain: stages run in order, each once, several seeds, references between them, one table; refused settings."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job import Shelf, distill, environment, results, wait_for
from test_fine_tuning import table

from distill.chain import STAGE, _inputs, _is_finished
from distill.config import ChainConfig, StageConfig

RECIPE = """# @package _global_
chain:
  given: {{steps: 6}}
  stages:
    teacher:
      recipe: bert_pretrain
      settings: [{corpus}, {size}, corpus.vocab_size=400, "train.steps=${{chain.given.steps}}"]
    student:
      recipe: distilbert_gutenberg
      settings: [{corpus}, teacher=pretrained, "teacher.path={{teacher}}", "student.layers=[0]", train.steps=3]
    teacher_task: {{recipe: table, settings: ["student.path={{teacher}}", {table}], seeds: [0, 1]}}
    student_task:
      recipe: table
      settings: [objective=distil_classes, teacher=pretrained, "teacher.path={{teacher_task}}", {pair}]
      seeds: [1]
  table:
    teacher: [teacher, teacher_task]
    student: [student, student_task]
  anchors: ["Published: 99."]
"""
SIZE = '"student.config={hidden_size:32,num_hidden_layers:2,num_attention_heads:2,intermediate_size:64}"'


@pytest.fixture(scope="module")
def configs(shelf: Shelf) -> Path:
    """A folder of recipes with a small chain."""
    data = table(shelf.root / "chain-table")
    labels = f"corpus.path={data}, corpus.text=review, corpus.label=stars, corpus.sequence_length=32, train.steps=2"
    corpus = ", ".join(json.dumps(each) for each in [*shelf.corpus, "train.batch_size=8", "train.accumulate=1"])
    folder = shelf.root / "configs"
    (folder / "recipe").mkdir(parents=True)
    pair = f'"student.path={{student}}", {labels}'
    text = RECIPE.format(corpus=corpus, size=SIZE, table=labels, pair=pair)
    (folder / "recipe" / "small.yaml").write_text(text)
    return folder


def run(configs: Path, folder: Path, *more: str) -> int:
    return distill("--config-dir", str(configs), "+recipe=small", f"hydra.run.dir={folder}", *more)


def test_a_chain_from_text_to_table(configs: Path, shelf: Shelf, capfd: pytest.CaptureFixture[str]) -> None:
    folder = shelf.root / "chain"
    assert run(configs, folder) == 0
    names = ["teacher", "student", "teacher_task/seed-0", "teacher_task/seed-1", "student_task/seed-1"]
    assert all(results(folder / name)["finished"] for name in names)
    assert results(folder / "student_task" / "seed-1")["teacher"]["name"] == str(folder / "teacher_task" / "seed-1")
    text = (folder / "chain.md").read_text()
    head, _, teacher, student = text.splitlines()[:4]
    assert "Perplexity, heldout" in head and "Accuracy, validation.csv" in head
    assert teacher.startswith("| teacher |") and " to " in teacher and "%" not in teacher and "%" in student
    assert "Published: 99." in text and text in capfd.readouterr().out
    scores = json.loads((folder / "chain.json").read_text())
    assert [len(scores[model]["Accuracy, validation.csv"]) for model in ("teacher", "student")] == [2, 1]

    times = {name: (folder / name / "results.json").stat().st_mtime_ns for name in names}
    (folder / "student" / "results.json").unlink()
    assert run(configs, folder) == 0
    again = {name: (folder / name / "results.json").stat().st_mtime_ns for name in names}
    assert [name for name in names if times[name] != again[name]] == ["student"], "the others were finished"


def test_a_stage_with_other_inputs_is_run_again(tmp_path: Path) -> None:
    stages = {"one": StageConfig("r"), "two": StageConfig("r", ["teacher.path={one}"])}
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "results.json").write_text("1")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "results.json").write_text("2")
    chain = ChainConfig(stages)
    known = {"arguments": ["x"], "inputs": _inputs(tmp_path, chain, stages["two"], None)}
    (tmp_path / "two" / STAGE).write_text(json.dumps(known))
    assert _is_finished(tmp_path / "two", known)
    (tmp_path / "one" / "results.json").write_text("3")
    assert not _is_finished(tmp_path / "two", known | {"inputs": _inputs(tmp_path, chain, stages["two"], None)})


def test_a_signal_reaches_the_stage_which_ends_in_its_own_time(tmp_path: Path) -> None:
    slow = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), open('done', 'w').close(), "
    slow += "sys.exit(143))); open('ready', 'w').close(); time.sleep(60)"
    parent = "import sys; from distill.chain import _run; sys.exit(_run([sys.executable, '-c', sys.argv[1]]))"
    process = subprocess.Popen([sys.executable, "-c", parent, slow], cwd=tmp_path, env=environment())
    wait_for(lambda: (tmp_path / "ready").exists(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143 and (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        (["optimizer.lr=1"], 2, ("optimizer.lr=1", "chain.given.NAME")),
        (["chain.stages.teacher.settings=['teacher.path={student}']"], 2, ("chain.stages.teacher", "student")),
        (["chain.table.teacher=[nothing]"], 2, ("chain.table.teacher", "nothing")),
        (["chain.stages.teacher.sedes=[1]"], 2, ("sedes",)),
        (["chain.given.steps=-1"], 2, ("stage teacher ended with status 2", "goes on")),
    ],
)
def test_what_stops_it(
    configs: Path, tmp_path: Path, more: list[str], status: int, words: tuple[str, ...],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(configs, tmp_path / "chain", *more) == status
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert all(word in line for word in words), line
    assert not (tmp_path / "chain" / "chain.md").exists()
