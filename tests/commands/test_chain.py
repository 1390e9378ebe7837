"""A chain: stages run in order, each once, several seeds and snapshots, references between them; refused settings."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job import Shelf, composed_chain, distill, environment, results, wait_for
from PIL import Image
from test_fine_tuning import table

from distill.commands import chain as chain_module
from distill.commands.chain import STAGE, Run, _inputs, _is_finished, check_chain, run_chain, runs_of
from distill.config.settings import ChainConfig, StageConfig
from distill.report.words import NONE, number
from distill.runs.record import Record
from distill.runs.results_file import write_results
from distill.runtime.errors import SettingError

RECIPE = """# @package _global_
chain:
  given: {{steps: 6}}
  stages:
    teacher:
      recipe: albert_pretrain
      settings: [{corpus}, {size}, corpus.vocab_size=400, "train.steps=${{chain.given.steps}}", train.snapshot_every=2,
                 evaluate.every_steps=4]
    student:
      recipe: distilalbert_gutenberg
      settings: [{corpus}, "teacher.path={{teacher}}", "student.layers=[0]", train.steps=3]
    teacher_task: {{recipe: table, settings: ["student.path={{teacher}}", {table}], seeds: [0, 1]}}
    student_task:
      recipe: table
      settings: [objective=distil_classes, teacher=pretrained, "teacher.path={{teacher_task}}", {pair}]
      seeds: [1]
    along: {{recipe: table, snapshots_of: teacher, settings: ["student.path={{teacher}}", {table}], seeds: [1]}}
  table:
    teacher: [teacher, teacher_task]
    student: [student, student_task]
  anchors: ["Published: 99."]
"""
SIZE = (
    '"student.config={embedding_size:16,hidden_size:32,num_hidden_layers:2,num_attention_heads:2,intermediate_size:64}"'
)
ACCURACY = "Accuracy, validation.csv"


def finish(folder: Path, record: dict[str, Any]) -> None:
    """Leave the record of a finished run."""
    write_results(folder / "results.json", Record.from_json(record))


@pytest.fixture(scope="module")
def configs(shelf: Shelf) -> Path:
    """A folder of recipes with a small chain."""
    data = table(shelf.root / "chain-table")
    labels = f"corpus.path={data}, corpus.text=review, corpus.label=stars, corpus.sequence_length=32, train.steps=2"
    corpus = ", ".join(json.dumps(each) for each in [*shelf.corpus, "train.batch_size=8", "precision=fp32"])
    folder = shelf.root / "configs"
    (folder / "recipe").mkdir(parents=True)
    pair = f'"student.path={{student}}", {labels}'
    text = RECIPE.format(corpus=corpus, size=SIZE, table=labels, pair=pair)
    (folder / "recipe" / "small.yaml").write_text(text)
    return folder


def run(configs: Path, folder: Path, *more: str) -> int:
    return distill("--config-dir", str(configs), "+recipe=small", f"hydra.run.dir={folder}", *more)


def run_here(configs: Path, folder: Path, own_process: Callable[[list[str]], bool]) -> tuple[str, list[str]]:
    """The chain with its stages in this process, which spares each the seconds that a new one needs to import torch.

    Args:
        own_process: says of a command whether it is run as chains run it nevertheless.

    Returns:
        The text of chain.md, and the folders of the stages that were started.
    """
    started = []
    alone = chain_module._run

    def run_stage(command: list[str]) -> int:
        started.append(command[-1].removeprefix(f"hydra.run.dir={folder}/"))
        return alone(command) if own_process(command) else distill(*command[3:])

    chain = composed_chain("+recipe=small", "chain.given.steps=4", search=configs)
    assert chain is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_module, "_run", run_stage)
        return run_chain(chain, folder, ["--config-dir", str(configs)]), started


JOBS = ["teacher", "student", "teacher_task/seed-0", "teacher_task/seed-1", "student_task/seed-1"]
JOBS += ["along/step-2/seed-1", "along/step-4/seed-1"]


@pytest.fixture(scope="module")
def finished(configs: Path, shelf: Shelf) -> Path:
    """The folder of the chain; the first stage ran in a process of its own, as all of them do."""
    folder = shelf.root / "chain"
    _, started = run_here(configs, folder, lambda command: "+recipe=albert_pretrain" in command)
    assert started == JOBS
    return folder


def test_a_chain_from_text_to_table(finished: Path) -> None:
    assert all(results(finished / name)["finished"] for name in JOBS)
    assert results(finished / "teacher")["training"]["steps"] == 4
    task = results(finished / "student_task" / "seed-1")
    assert task["teacher"]["name"] == str(finished / "teacher_task" / "seed-1")
    head, _, teacher, student = (finished / "chain.md").read_text().splitlines()[:4]
    assert "Perplexity, heldout" in head and ACCURACY in head
    assert teacher.startswith("| teacher |") and " to " in teacher and "%" not in teacher and "%" in student
    scores = json.loads((finished / "chain.json").read_text())["models"]
    assert [len(scores[model][ACCURACY]) for model in ("teacher", "student")] == [2, 1]


def test_scores_by_snapshot(finished: Path) -> None:
    """Of the pre-training where it was evaluated, and of the runs from its snapshots."""
    found = json.loads((finished / "chain.json").read_text())["snapshots"]["teacher"]
    (line,) = results(finished / "teacher")["history"]
    assert line["step"] == 4
    assert found["teacher: Perplexity, heldout"] == {"4": [line["perplexity"]["heldout"]]}
    assert found["teacher: Order accuracy, heldout"] == {"4": [line["order_accuracy"]["heldout"]]}
    runs = {step: finished / "along" / f"step-{step}" / "seed-1" for step in ("2", "4")}
    accuracies = {step: [results(each)["student"]["accuracy"]["dev"]] for step, each in runs.items()}
    assert found[f"along: {ACCURACY}"] == accuracies
    for step, each in runs.items():
        start = finished / "teacher" / "snapshots" / f"step-{step}"
        assert f"student.path={start}" in json.loads((each / STAGE).read_text())["arguments"]
    text = (finished / "chain.md").read_text()
    rows = [text.splitlines()[number].split(" | ") for number in (7, 9, 10)]
    assert rows[0][0] == "| step" and [row[0] for row in rows[1:]] == ["| 2", "| 4"]
    column = rows[0].index("teacher: Perplexity, heldout")
    assert rows[1][column] == NONE and rows[2][column] == number(line["perplexity"]["heldout"])
    assert "teacher was not evaluated after step 2: see evaluate.every_steps" in text
    assert "](plots/snapshots_teacher.png)" in text
    with Image.open(finished / "plots" / "snapshots_teacher.png") as picture:
        assert picture.width > 500


def test_what_is_finished_is_not_run_again(configs: Path, finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    times = {name: (finished / name / "results.json").stat().st_mtime_ns for name in JOBS}
    for name in ("student", "along/step-4/seed-1"):
        (finished / name / "results.json").unlink()
    _, started = run_here(configs, finished, lambda _: False)
    assert started == ["student", "student_task/seed-1", "along/step-4/seed-1"], "these, and what refers to them"
    again = {name: (finished / name / "results.json").stat().st_mtime_ns for name in JOBS}
    assert [name for name in JOBS if times[name] != again[name]] == ["student", "along/step-4/seed-1"]
    capfd.readouterr()
    assert run(configs, finished, "chain.given.steps=4") == 0
    text = (finished / "chain.md").read_text()
    assert "Published: 99." in text and text in capfd.readouterr().out
    assert {name: (finished / name / "results.json").stat().st_mtime_ns for name in JOBS} == again


def test_a_stage_with_other_inputs_is_run_again(tmp_path: Path) -> None:
    stages = {"one": StageConfig(recipe="r"), "two": StageConfig(recipe="r", settings=["teacher.path={one}"])}
    stages["three"] = StageConfig(recipe="r", settings=["student.path={one}"], snapshots_of="one")
    chain = ChainConfig(stages=stages)
    (one,), (two,) = runs_of(tmp_path, chain, "one"), runs_of(tmp_path, chain, "two")
    one.folder.mkdir()
    finish(one.folder, {"snapshots": [5]})
    (three,) = runs_of(tmp_path, chain, "three")
    weights = one.folder / "snapshots" / "step-5" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_text("1")

    def known(job: Run) -> dict[str, object]:
        return {
            "arguments": ["x"],
            "inputs": _inputs(tmp_path, chain, stages[job.folder.relative_to(tmp_path).parts[0]], job),
        }

    for job in (two, three):
        job.folder.mkdir(parents=True)
        finish(job.folder, {"snapshots": []})
        (job.folder / STAGE).write_text(json.dumps(known(job)))
        assert _is_finished(job.folder, known(job))
    for damaged in (STAGE, "results.json"):
        whole = (two.folder / damaged).read_text()
        (two.folder / damaged).write_text(whole[:-2])
        assert not _is_finished(two.folder, known(two))
        (two.folder / damaged).write_text(whole)
    finish(one.folder, {"snapshots": [5], "recipe": "r"})
    assert not _is_finished(two.folder, known(two)) and _is_finished(three.folder, known(three))
    weights.write_text("3")
    assert not _is_finished(three.folder, known(three))


def test_a_run_from_a_snapshot_refers_to_those_from_the_same_one(tmp_path: Path) -> None:
    given = {"snapshots_of": "one", "seeds": [0, 1]}
    stages = {
        "one": StageConfig(recipe="r", settings=["train.snapshots=[3,9]"]),
        "two": StageConfig(recipe="r", settings=["student.path={one}"], **given),
    }
    stages["three"] = StageConfig(
        recipe="r", settings=["student.path={one}", "teacher.path={two}"], snapshots_of="one", seeds=[1, 2]
    )
    chain = ChainConfig(stages=stages)
    check_chain(chain)
    (tmp_path / "one").mkdir()
    finish(tmp_path / "one", {"snapshots": [3, 9]})
    for stage, path in (("two", "two/step-{}/seed-{}"), ("three", "three/step-{}/seed-{}")):
        found = [each.folder for each in runs_of(tmp_path, chain, stage)]
        assert found == [tmp_path / path.format(step, seed) for step in (3, 9) for seed in stages[stage].seeds]
    for job in runs_of(tmp_path, chain, "three"):
        seed = 1 if job.seed == 1 else 0  # the first, where none is the same
        folder = chain_module._folder_of(tmp_path, chain, stages["three"], job, "two")
        assert folder == tmp_path / "two" / f"step-{job.step}" / f"seed-{seed}"
    finish(tmp_path / "one", {"snapshots": []})
    with pytest.raises(SettingError, match=r"chain.stages.two.snapshots_of=one finished without snapshots"):
        runs_of(tmp_path, chain, "two")


def test_a_signal_reaches_the_stage_which_ends_in_its_own_time(tmp_path: Path) -> None:
    slow = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), open('done', 'w').close(), "
    slow += "sys.exit(143))); open('ready', 'w').close(); time.sleep(60)"
    parent = "import sys; from distill.commands.chain import _run; sys.exit(_run([sys.executable, '-c', sys.argv[1]]))"
    process = subprocess.Popen([sys.executable, "-c", parent, slow], cwd=tmp_path, env=environment())
    wait_for(lambda: (tmp_path / "ready").exists(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143 and (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["optimizer.lr=1"], ("optimizer.lr=1", "chain.given.NAME")),
        (["chain.stages.teacher.settings=['teacher.path={student}']"], ("chain.stages.teacher", "student")),
        (["chain.table.teacher=[nothing]"], ("chain.table.teacher", "nothing")),
        (["chain.table.teacher=[]"], ("chain.table.teacher=[] names no stage",)),
        (["+chain.stages.my-stage={recipe: table}"], ("chain.stages.my-stage", "letters, digits and underscores")),
        (["chain.stages.teacher.sedes=[1]"], ("sedes",)),
        (["chain.stages.teacher.recipe=nothing"], ("stage teacher ended with status 2", "resumes there")),
        (["chain.stages.along.snapshots_of=nothing"], ("along.snapshots_of=nothing", "teacher, student")),
        (["chain.stages.along.snapshots_of=teacher_task"], ("along.snapshots_of=teacher_task", "runs once")),
        (["chain.stages.along.snapshots_of=student"], ("along.snapshots_of=student", "train.snapshot_every=STEPS")),
        (["chain.stages.along.settings=['student.path=x']"], ("along.snapshots_of=teacher", "student.path={teacher}")),
        (["chain.table.teacher=[teacher,along]"], ("chain.table.teacher", "along", "leave it out")),
        (
            ["+chain.stages.last={recipe: table, settings: ['student.path={along}']}"],
            ("chain.stages.last.settings", "along", "snapshots_of=teacher"),
        ),
    ],
)
def test_what_stops_it(
    configs: Path, tmp_path: Path, more: list[str], words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(configs, tmp_path / "chain", *more) == 2
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert all(word in line for word in words), line
    assert not (tmp_path / "chain" / "chain.md").exists()


def test_the_page_of_a_chain_lists_its_jobs_and_ends_with_its_table(finished: Path) -> None:
    text = (finished / "report.html").read_text()
    assert f"{len(JOBS)} of {len(JOBS)} jobs are finished" in text and "<script" not in text
    for name in JOBS:
        assert f'<a href="{name}/report.html">{name}</a>' in text
    assert "Published: 99." in text and f'<th scope="col">{ACCURACY}</th>' in text.replace("<wbr/>", "")


def test_a_template_of_conversations_names_no_stage() -> None:
    stages = {"one": StageConfig(recipe="r", settings=['corpus.template="{role}: {content}"'])}
    check_chain(ChainConfig(stages=stages))
    assert chain_module._references(stages["one"].settings[0]) == []
    assert chain_module._references("student.path={one}") == ["one"]
