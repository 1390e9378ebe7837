"""Scores from a program: those of the command, handlers put back, and errors of one line."""

from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from job import Shelf
from test_run import state

import distill
from distill.runtime.errors import SettingError


def test_what_is_of_the_program_stays(done: Path, shelf: Shelf, tmp_path: Path) -> None:
    """Also of a program that uses Hydra itself, and scores there."""
    before = state()
    rows = ["evaluate.max_sequences=2", "evaluate.pseudo_perplexity.fraction=0"]
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        own = GlobalHydra.instance().hydra
        scores = distill.evaluate([done], rows)
        assert GlobalHydra.instance().hydra is own
    assert state() == before
    assert scores[str(done)].scores["perplexity"]["heldout"] > 1
    assert repr(scores) == str(scores) and "Perplexity, heldout" in repr(scores)


def test_errors_are_one_line(done: Path) -> None:
    before = state()
    for models, settings, line in (
        ([done], ["evaluate.max_sequences=many"], r"^evaluate\.max_sequences"),
        ([done], ["evaluate.rowz=1"], "rowz"),
        (str(done), [], r"^models=.* is one string: give a list"),
        ({"mine": done}, [], r"^models is a dict, or holds .*: give a list"),
        ([done, Path], [], r"^models is a list, or holds .*: give a list"),
        ([done], "evaluate.max_sequences=1", r"^settings=evaluate\.max_sequences=1 is one string: give a list"),
    ):
        with pytest.raises(SettingError, match=line) as error:
            distill.evaluate(models, settings)
        assert "\n" not in str(error.value)
    assert state() == before
