"""The page of a chain: the state of each run by what its folder holds, and what ended them."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from job import wait_for
from made_runs import make_run, results_of, settings_of
from sample import sample_results

from distill.report.chain_report import ChainPage, state_of, write
from distill.report.live import PAGE
from distill.report.words import NONE
from distill.runs.record import Record
from distill.runtime.errors import StageFailed

FINISHED = "perplexity heldout test 39.05, perplexity wikitext2 test 140.5, pseudo-perplexity heldout test 35.51, "


def test_the_state_of_a_run_follows_from_its_folder(tmp_path: Path) -> None:
    for made, content in (("finished", sample_results()), ("stopped", None), ("damaged", sample_results())):
        make_run(tmp_path / made, settings_of(0), content)
    (tmp_path / "damaged" / "results.json").write_text("{")
    for name, is_current, state, scores in (
        ("none", False, "waiting", NONE),
        ("none", True, "under way", NONE),
        ("finished", False, "finished: 123 steps in 3:34 min", FINISHED),
        ("stopped", True, "under way, after step 4", NONE),
        ("stopped", False, "not finished: it stopped after step 4", NONE),
        ("damaged", False, "damaged: ", NONE),
    ):
        cells = state_of(tmp_path / name, tmp_path, is_current)
        assert cells[0] == name and cells[1].startswith(state) and cells[2].startswith(scores)


def test_runs_are_listed_linked_and_renewed(tmp_path: Path) -> None:
    (make_run(tmp_path / "a b", settings_of(0), sample_results()) / PAGE).write_text("page")
    make_run(tmp_path / "second", settings_of(0))
    page = tmp_path / PAGE
    with ChainPage(tmp_path, [tmp_path / name for name in ("a b", "second", "third")], every=0.05) as overview:
        overview.start(tmp_path / "second")
        wait_for(lambda: "under way, after step 4" in page.read_text())
        text = page.read_text()
        overview.end_with(["The table of all."])
    assert '<a href="a%20b/report.html">a b</a>' in text and "1 of 3 jobs are finished" in text and "<script>" in text
    assert "waiting" in text and "The table of all" not in text
    ended = page.read_text()
    ElementTree.fromstring(ended)
    assert "The table of all." in ended and "All jobs are finished" in ended and "<script" not in ended


def test_a_run_that_failed_ends_the_page(tmp_path: Path) -> None:
    with pytest.raises(StageFailed), ChainPage(tmp_path, [], every=60):
        raise StageFailed("student", 3)
    text = (tmp_path / PAGE).read_text()
    assert "Stopped: stage student ended with status 3" in text and "limit = 0" in text


def test_scores_are_relative_to_those_of_the_first_model(tmp_path: Path) -> None:
    scores = {"teacher": [4.0], "student": [5.0, 6.0, 7.0]}
    runs = {name: [[Record.from_json(results_of({"heldout": of})) for of in each]] for name, each in scores.items()}
    text, _ = write(tmp_path, runs, [])
    assert "| 4.000 |" in text and "| 6.000 (5.000 to 7.000), 150% |" in text
