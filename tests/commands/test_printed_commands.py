"""What is printed as a command does what it is printed for, from whatever folder it is given in."""

import importlib
import json
import re
import shlex
import sys
from html import unescape
from pathlib import Path

import pytest
from job import Shelf, as_value, assert_same, composed_line, distill, results

from distill.commands.cli import main
from distill.runtime.users_code import find_modules_here

NAME = "my runs/it's $one"


@pytest.fixture(scope="module")
def run(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was started with relative paths, in a folder whose name a shell would cut."""
    home = tmp_path_factory.mktemp("home")
    (home / "books").symlink_to(shelf.books)
    (home / "conf" / "recipe").mkdir(parents=True)
    (home / "conf" / "recipe" / "mine.yaml").write_text("# @package _global_\ndefaults: [distilbert_gutenberg]\n")
    relative = {f"corpus.path={shelf.books}": "corpus.path=books"}
    arguments = [relative.get(text, text) for text in shelf.arguments(home)[1:-1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        folder = f"hydra.run.dir='{NAME}'".replace("it's", "it\\'s")
        arguments = [*arguments, "evaluate.by_set={}", folder]
        assert distill("--config-dir", "conf", "+recipe=mine", *arguments, "student.layers=[0,1]") == 0
    return home / NAME


def as_printed(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a command that begins in the folder that it names, as a shell runs it."""
    change, folder, then, *words = shlex.split(command)
    assert (change, then) == ("cd", "&&")
    monkeypatch.chdir(folder)
    return distill(*words[words.index("distill") + 1 :])


def command_in(report: str) -> str:
    return unescape(str(re.search(r"(cd [^\n<]* -m distill [^\n<]*)", report)[1]))  # type: ignore[index]


def test_the_command_of_a_report_is_that_of_its_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.loads((run / "results.json").read_text())
    for name in ("report.md", "report.html"):
        monkeypatch.chdir(tmp_path)
        assert as_printed(command_in((run / name).read_text()), monkeypatch) == 0
        assert "This run is finished and nothing was changed" in capsys.readouterr().err
    assert results(run) == before and not list(tmp_path.iterdir())
    (run / "results.json").rename(tmp_path / "results.json")
    (run / "student").rename(tmp_path / "student")
    assert as_printed(command_in((run / "report.md").read_text()), monkeypatch) == 0
    assert_same(tmp_path, run)


def test_a_run_is_evaluated_from_another_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", f"model={run}", "output=scored"]) == 0, capsys.readouterr().err
    scores = json.loads((tmp_path / "scored" / "scores.json").read_text())
    monkeypatch.chdir("/")
    assert as_printed(scores["command"], monkeypatch) == 0
    assert (tmp_path / "scored" / "earlier-scores.json").is_file()


def test_the_console_script_finds_modules_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_a_user.py").write_text("")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    before = list(sys.path)
    monkeypatch.setattr(sys, "argv", ["distill", "--version"])
    assert main() == 0 and sys.path == before, "not where no setting names one: the folder may be a stranger's"
    find_modules_here("distill.objective.terms.soft.Soft")
    assert sys.path == before
    find_modules_here("module_of_a_user.Loss")
    assert importlib.import_module("module_of_a_user") and sys.path == [*before, str(tmp_path)]
    find_modules_here("module_of_a_user.Loss")
    assert sys.path == [*before, str(tmp_path)]


@pytest.mark.parametrize("name", ["seed=0", "\u00e9t\u00e9", "a b", "plain"])
def test_the_folder_of_a_run_is_one_that_a_command_takes(name: str) -> None:
    folder = Path("runs") / name
    word = f"hydra.run.dir={as_value(str(folder))}"
    assert composed_line("+recipe=smoke", word).folder == folder
    assert ("'" in word) == (name != "plain")
