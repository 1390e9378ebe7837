"""The page of several jobs: the state of each by what its folder holds, and what ended them."""

import json
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from sample import sample_results

from distill.report import live
from distill.report.jobs import Job, JobsPage, row_of
from distill.report.page import Link
from distill.report.words import NONE
from distill.runs.record import Record
from distill.runs.results_file import write_results
from distill.runtime.errors import StageFailed


def folder_of(path: Path, **files: Any) -> Path:
    """A run's folder with these files, each of one JSON object or of text."""
    path.mkdir(parents=True)
    for name, content in files.items():
        file = (
            path / {"results": "results.json", "state": live.STATE, "metrics": "metrics.jsonl", "page": live.PAGE}[name]
        )
        if name == "results" and not isinstance(content, str):
            write_results(file, Record.from_json(content))
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def state(**of: Any) -> dict[str, Any]:
    known = {"state": "under way", "written": time.time(), "every": 15, "step": 30, "steps": 120, "share": 0.25}
    return known | {"seconds_left": 90.0, "doing": "training", "status": None, "message": ""} | of


def row(path: Path, runs: bool = False, **files: Any) -> list[str]:
    folder = folder_of(path / "job", **files)
    return row_of(Job("job", folder), path, runs)


FINISHED = "perplexity heldout test 39.05, perplexity wikitext2 test 140.5, pseudo-perplexity heldout test 35.51, "


@pytest.mark.parametrize(
    ("runs", "files", "expected"),
    [
        (False, {}, ["waiting", NONE, NONE]),
        (False, {"results": sample_results()}, ["finished", "123 steps in 3:34 min", FINISHED]),
        (True, {"state": state()}, ["under way", "25%, step 30 of 120, 1:30 min left", NONE]),
        (False, {"state": state(written=0.0)}, ["no news", "since 1970-01-01 00:00:00 UTC; 25%, step", NONE]),
        (
            False,
            {"state": state(state="stopped", status=3, message="diverged", seconds_left=None)},
            ["stopped", "25%, step 30 of 120: diverged", NONE],
        ),
        (True, {"metrics": '{"step": 4, "seconds": 1.0, "data_wait": 0.0}\n{"st'}, ["under way", "step 4", NONE]),
        (False, {"metrics": '{"step": 4, "seconds": 1.0, "data_wait": 0.0}\n'}, ["stopped", "step 4", NONE]),
        (True, {"metrics": "no JSON\n", "state": "[", "results": "{"}, ["under way", NONE, NONE]),
        (False, {"state": {"state": "under way"}}, ["waiting", NONE, NONE]),
    ],
)
def test_the_state_of_a_job_follows_from_its_folder(
    runs: bool, files: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    name, *cells = row(tmp_path, runs, **files)
    assert name == "job" and not isinstance(name, Link) and cells[0] == expected[0]
    assert cells[1].startswith(expected[1]) and cells[2].startswith(expected[2])


def test_jobs_are_listed_linked_and_renewed(tmp_path: Path) -> None:
    first = folder_of(tmp_path / "a b", results=sample_results(), page="page")
    second = folder_of(tmp_path / "second", state=state())
    jobs = [Job("a b", first), Job("second", second), Job("third", tmp_path / "third")]
    page = tmp_path / live.PAGE
    with JobsPage(tmp_path, "two <jobs>", jobs, every=0.05) as overview:
        overview.start(second)
        until = time.monotonic() + 20
        while not page.exists() or "under way" not in page.read_text():
            assert time.monotonic() < until
            time.sleep(0.01)
        text = page.read_text()
        overview.end_with(["The table of all."])
    assert '<a href="a%20b/report.html">a b</a>' in text and "1 of 3 jobs are finished" in text and "<script>" in text
    assert "waiting" in text and "The table of all" not in text
    ended = page.read_text()
    ElementTree.fromstring(ended)
    assert "The table of all." in ended and "All jobs are finished" in ended and "<script" not in ended


def test_a_job_that_failed_ends_the_page(tmp_path: Path) -> None:
    with pytest.raises(StageFailed), JobsPage(tmp_path, "jobs", [], every=60):
        raise StageFailed("student", 3)
    text = (tmp_path / live.PAGE).read_text()
    assert "Stopped: stage student ended with status 3" in text and "limit = 0" in text


def test_a_page_that_cannot_be_written_is_said_once(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / live.PAGE).mkdir()
    with JobsPage(tmp_path, "jobs", [], every=0.02):
        time.sleep(0.2)
    assert len(lines) == 1 and "cannot write" in lines[0]
