"""Runs and scores from a program: those of the command, results that show themselves, handlers put back, errors."""

import io
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from job import Shelf, assert_same, composed_line, results, run_dir
from transformers import AutoModelForMaskedLM

import distill
from distill.commands.api.run import RunResults, output_for_programs
from distill.runtime.errors import SettingError
from distill.runtime.progress import configure_logging

ONE_STRING = r"is one string: give a list"


def state() -> list[Any]:
    """What a run could leave changed in its process."""
    package = logging.getLogger("distill")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    hydra = [GlobalHydra.instance().hydra, HydraConfig.instance().cfg]
    return [package.propagate, list(package.handlers), handlers, hydra]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def ran(shelf: Shelf, elsewhere: Path) -> RunResults:
    """A run in another working directory, in a program that uses Hydra itself; nothing but its folder is left."""
    before, here = state(), os.getcwd()
    (elsewhere / "conf").mkdir()
    os.chdir(elsewhere)
    try:
        with initialize_config_dir(str(elsewhere / "conf"), version_base="1.3"):
            own = GlobalHydra.instance().hydra
            found = distill.run(shelf.arguments(Path("out")))
            limited = ["evaluate.max_sequences=2", "evaluate.pseudo_perplexity.fraction=0"]
            scores = distill.evaluate([found.folder], limited)
            assert GlobalHydra.instance().hydra is own
        assert state() == before
    finally:
        os.chdir(here)
    assert scores[str(found.folder)].scores["perplexity"]["heldout"] > 1 and "Perplexity, heldout" in repr(scores)
    return RunResults(elsewhere / found.folder, found.record)


def test_the_student_is_that_of_the_command(ran: RunResults, done: Path, elsewhere: Path) -> None:
    assert_same(ran.folder, done)
    assert ran.folder == elsewhere / "out" and {path.name for path in elsewhere.iterdir()} == {"conf", "out"}
    assert results(ran.folder)["command"].startswith("python -m distill +recipe=distilbert_gutenberg")


def test_what_the_results_hold_and_show(ran: RunResults, shelf: Shelf) -> None:
    content = results(ran.folder)
    assert ran.scores["student"]["perplexity"] == content["student"]["perplexity"]
    assert set(ran.scores) == {"teacher", "student"}
    assert set(ran.scores["teacher"]) == {"perplexity", "pseudo_perplexity"}
    assert ran.teacher == str(shelf.teacher) and ran.settings["train"]["batch_size"] == 8
    assert [line["step"] for line in ran.metrics] == list(range(1, content["training"]["steps"] + 1))
    assert ran.history == content["history"] and ran.report.is_file()
    AutoModelForMaskedLM.from_pretrained(ran.student)
    assert distill.predict(str(ran.student), "The [MASK].")["masks"]
    first, head, *lines, last = repr(ran).splitlines()
    assert first.startswith(f"distilbert_gutenberg in {ran.folder} after ") and str(ran.report) in last
    assert head.split()[:2] == ["Teacher", "Student"] and any(line.startswith("Perplexity") for line in lines)
    page = ran._repr_html_()
    assert page.count("<tr>") == page.count("</tr>") > 4 and "<th>Student</th>" in page and "<b>" in page
    shown = ran.plot()
    assert shown._repr_png_().startswith(b"\x89PNG")
    losses, scores = shown.axes
    assert losses.lines[0].get_label() == "Total" and len(losses.lines) == 4
    (student, teacher) = scores.lines
    assert list(student.get_ydata()) == [line["perplexity"]["heldout"] for line in ran.history]
    assert set(teacher.get_ydata()) == {ran.scores["teacher"]["perplexity"]["heldout"]}


def test_a_finished_run_is_given_again_and_opened(ran: RunResults, shelf: Shelf) -> None:
    written = (ran.folder / "results.json").stat().st_mtime_ns
    again = distill.run(shelf.arguments(ran.folder))
    assert again.scores == ran.scores and (ran.folder / "results.json").stat().st_mtime_ns == written
    opened = distill.open_run(ran.folder)
    assert opened.content == ran.content and opened.teacher == ran.teacher
    with pytest.raises(SettingError, match=r"^folder=.*nothing is no finished run"):
        distill.open_run(ran.folder / "nothing")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("+recipe=smoke", rf"^overrides=\+recipe=smoke {ONE_STRING}"),
        (["+recipe=smok"], "smok"),
        (["+recipe=smoke", "optimizer.lr=fast"], r"^optimizer\.lr"),
        (["+recipe=smoke", "seed=1,2"], r"^seed=1,2: several values; give one value, or write a list"),
        (["--multirun", "+recipe=smoke"], r"^this command is about one run; leave --multirun"),
        (["+recipe=smoke", "hydra.job.chdir=true"], r"^hydra\.job\.chdir: of Hydra's own settings one run reads"),
        (["+recipe=albert_chain"], "chain"),
        (["--config-dir", "no/such/folder", "+recipe=mine"], r"no such folder"),
        (["+recipe=smoke", "backend=ddp", "backend.processes=2"], r"^backend\.processes=2: .*nproc-per-node 2 PROGRAM"),
        (["+recipe=smoke", "backend=horovod", "backend.processes=3"], r"^backend\.processes=3: .*`horovodrun -np 3 P"),
    ],
)
def test_errors_are_raised(overrides: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = state()
    with pytest.raises(SettingError, match=line):
        distill.run(overrides)
    assert state() == before and not list(tmp_path.iterdir())


def test_errors_of_scores_are_one_line(done: Path) -> None:
    before = state()
    for models, settings, line in (
        ([done], ["evaluate.max_sequences=many"], r"^evaluate\.max_sequences"),
        ([done], ["evaluate.rowz=1"], "rowz"),
        (str(done), [], r"^models=.* is no list of strings; give a list"),
        ({"mine": done}, [], r"^models=.*; give a list"),
        ([done, Path], [], r"^models=.*; give a list"),
        ([done], "evaluate.max_sequences=1", r"^settings=evaluate\.max_sequences=1.*; give a list"),
    ):
        with pytest.raises(SettingError, match=line) as error:
            distill.evaluate(models, settings)
        assert "\n" not in str(error.value)
    assert state() == before


def test_a_recipe_of_ones_own(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    recipe = "# @package _global_\ndefaults:\n  - distilbert_gutenberg\n  - _self_\ntrain: {steps: 1, epochs: null}\n"
    (tmp_path / "mine" / "recipe" / "own.yaml").write_text(recipe)
    arguments = [each for each in shelf.arguments(tmp_path / "x") if not each.startswith(("+recipe", "hydra.run.dir"))]
    found = distill.run(["--config-dir=mine", "+recipe=own", *arguments, "train.epochs=null"])
    assert found.folder == Path("runs/own") and found.content["training"]["steps"] == 1


@pytest.mark.parametrize("name", ["a b", "it's, a=b", "(1) {b} [c]", "end\\", "${seed}", "a:b%"])
def test_the_folder_of_a_command_is_quoted(name: str) -> None:
    assert composed_line("+recipe=smoke", run_dir(Path("runs") / name)).folder == Path("runs") / name


def test_messages_appear_once_and_in_a_notebook_as_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell's standard error is a red block."""
    of_program, package = logging.StreamHandler(io.StringIO()), logging.getLogger("distill")
    logging.getLogger().addHandler(of_program)
    of_notebook, cell = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"}), io.StringIO()
    monkeypatch.setattr("sys.stderr", of_notebook())
    monkeypatch.setattr("sys.stdout", cell)
    try:
        with output_for_programs():
            configure_logging(0)
            package.info("a message")
    finally:
        logging.getLogger().removeHandler(of_program)
    assert cell.getvalue().count("a message") == 1 and not of_program.stream.getvalue()
    assert package.propagate


def test_each_module_of_a_model_in_memory_keeps_its_mode(shelf: Shelf) -> None:
    held = distill.load_model(shelf.teacher, "cpu")
    model = held.model.train()
    model.base_model.embeddings.eval()
    before = [module.training for module in model.modules()]
    distill.predict((model, held.tokenizer), "A dark [MASK].")
    distill.score(["A dark night."], (model, held.tokenizer))
    assert [module.training for module in model.modules()] == before and len(set(before)) == 2
