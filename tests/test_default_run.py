"""A command line without a recipe is the main job: offline, on any books, in the same folder as with the recipe."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from job import CommandLine, book, composed_line, distill, results

from distill.runs.check import check
from distill.runtime.errors import SettingError

MAIN_RECIPE = "distilbert_gutenberg"


@pytest.mark.parametrize(
    "arguments", [[], ["corpus.path=x"], ["objective=distilbert", "seed=3"], ["teacher.path=runs/a"]]
)
def test_it_is_the_main_recipe(arguments: list[str]) -> None:
    run, same = composed_line(*arguments), composed_line(f"+recipe={MAIN_RECIPE}", *arguments)
    assert run.config == same.config and run.folder == same.folder == Path("runs") / MAIN_RECIPE
    assert run.recipe == MAIN_RECIPE and run.resolved == same.resolved


def test_its_defaults_fit_each_other(tmp_path: Path) -> None:
    config = composed_line(f"corpus.path={tmp_path}").config
    check(config)
    assert config.teacher.path == "bundled_deep"
    assert config.evaluate.missing.value == "skip"
    assert all(getattr(source, "hub", None) is None for source in config.evaluate.sources.values())


def test_options_and_overrides_may_stand_in_any_order() -> None:
    line = CommandLine.of(["seed=1", "-cd", ".", "+recipe=smoke", "-m"])
    assert line.overrides == ["seed=1", "recipe=smoke"] and line.options == {"--config-dir": ".", "--multirun": ""}
    with pytest.raises(SettingError, match=r"^--multrun: no option \(did you mean --multirun"):
        CommandLine.of(["--multrun"])


def test_it_runs_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """Books, two steps, one process; a connection to anywhere would end it."""
    books = tmp_path / "books"
    books.mkdir()
    for number in range(4):
        (books / f"{number}.txt").write_text(book(number, 15))

    def refuse(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"a connection was tried: {arguments}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    small = [
        "train.steps=2",
        "corpus.heldout=0.2",
        "data.cache=cache",
        "data.workers=1",
        "evaluate.max_sequences=40",
    ]
    before = sys.argv
    assert distill(f"corpus.path={books}", *small, "corpus.sequence_length=32", "precision=fp32") == 0
    assert sys.argv is before
    content = results(tmp_path / "runs" / MAIN_RECIPE)
    assert content["recipe"] == MAIN_RECIPE and list(content["evaluation"]) == ["heldout"]
    assert content["command"].startswith("python -m distill corpus.path=")
    start = {"init": "layers", "from": "the deep bundled teacher", "layers": [0, 1, 2]}
    start["published"] = {"license": "apache-2.0"}
    assert content["student"]["start"] == start  # the best are known, so that nothing is searched for
    assert sum("is left out: it lies neither" in note for note in content["notes"]) == 2
    card = (tmp_path / "runs" / MAIN_RECIPE / "student" / "README.md").read_text()
    assert "\n# DistilBert distilled from the deep bundled teacher\n" in card
    assert any("teacher  the deep bundled teacher" in line for line in lines)
