"""Where the relative paths of an earlier run lead: never to another text than that run had."""

import json
import os
from pathlib import Path

import pytest

from distill.runs.located import settings_of_run
from distill.runs.record import Record
from distill.runs.results_file import write_results

SETTINGS = {"corpus": {"source": {"path": "books"}}, "data": {"cache": "cache"}, "evaluate": {"baseline": "runs/b"}}


@pytest.mark.parametrize("recorded", [True, False])
def test_a_text_of_the_same_name_in_a_parent_folder_is_another_one(tmp_path: Path, recorded: bool) -> None:
    run = tmp_path / "work" / "runs" / "mine"
    for folder in (run, tmp_path / "books", tmp_path / "work" / "runs" / "cache"):
        folder.mkdir(parents=True)
    (run / "config.yaml").write_text(json.dumps(SETTINGS))
    if recorded:
        write_results(run / "results.json", Record(started_in=str(tmp_path / "work")))
    expected = str(tmp_path / "work" / "books") if recorded else "books"  # which is not there: the command refuses it
    assert settings_of_run(run)["corpus"]["source"]["path"] == expected
    assert settings_of_run(run)["data"]["cache"] == "cache", "it is made anew"
    os.makedirs(tmp_path / "work" / "cache")
    assert settings_of_run(run)["data"]["cache"] == (str(tmp_path / "work" / "cache") if recorded else "cache")
