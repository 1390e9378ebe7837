"""Runs side by side, on run folders made by hand: what becomes one line, and what is marked, ordered and said."""

import csv
import fcntl
import os
import re
from collections import namedtuple
from enum import Enum
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made_runs import make_run, results_of, settings_of

from distill.commands.cli import main
from distill.report.comparison.columns import Goal, numbers_of
from distill.report.comparison.compare import ComparedRuns, best_lines, runs_table, scores_table
from distill.report.comparison.compare import compare as compare_runs
from distill.report.comparison.runs import find_runs, is_at_work
from distill.runs.facts import Profile
from distill.runs.record import Record
from distill.runtime.errors import SettingError


def laid_out(folder: Path, *runs: tuple[dict[str, Any], dict[str, Any]]) -> ComparedRuns:
    """Runs of these settings and results."""
    for number, (settings, results) in enumerate(runs):
        make_run(folder / f"run{number}", settings, results)
    return ComparedRuns(find_runs([str(folder)]))


def test_a_run_that_is_not_finished_is_listed(tmp_path: Path, monkeypatch: Any) -> None:
    for seed in (0, 4):
        make_run(tmp_path / f"seed={seed}", settings_of(seed), results_of({"heldout": 3.0}))
    make_run(tmp_path / "seed=1", settings_of(1), steps=7)
    (tmp_path / "seed=4" / "results.json").write_text("{")
    (tmp_path / "seed=3").mkdir()  # of a run that was refused
    compared = laid_out(tmp_path)
    found = {name: status for name, _, status in runs_table(compared).rows}
    assert found.pop("seed=4").startswith("damaged: ")
    assert found == {"seed=0": "finished", "seed=1": "not finished: it stopped after step 7"}
    assert scores_table(compared).rows[0][:2] == ["seed=0", "seed 0, 2 not finished"]
    with (tmp_path / ".lock").open("w") as lock:
        assert not is_at_work(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_at_work(tmp_path)
        monkeypatch.setattr(os, "minor", lambda device: 255)  # the same inode elsewhere
        assert not is_at_work(tmp_path)


def test_files_of_the_command(tmp_path: Path, capsys: Any) -> None:
    """They lie in compare/, in `output`, or where they were before in the folder of a sweep."""
    for number, kind in enumerate(("<adamw>", "lamb|b")):
        given = settings_of(number, optimizer={"kind": kind})
        make_run(tmp_path / f"run{number}", given, results_of({"heldout": 4.0 + number}))
    make_run(tmp_path / "run9", settings_of(9, optimizer={"kind": "lamb|b"}))
    assert main(["compare", "run=run*", "output=out"]) == 0
    printed = capsys.readouterr().out
    assert "run9: not finished" in printed and printed.splitlines()[-1] == "Comparison: out/compare.html"
    html = (tmp_path / "out" / "compare.html").read_text()
    assert ElementTree.fromstring(html.partition("\n")[2]).tag == "html"
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", html), "loads nothing"
    assert "&lt;adamw&gt;" in html and "prefers-color-scheme:dark" in html and "<svg" in html
    markdown = (tmp_path / "out" / "compare.md").read_text()
    assert "lamb\\|b" in markdown and "](plots/compare.png)" in markdown
    with (tmp_path / "out" / "compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["seed"] for line in lines] == ["0", "1", "9"] and lines[2]["heldout.perplexity"] == ""
    assert float(lines[1]["heldout.perplexity"]) == 5.0 and lines[1]["optimizer.kind"] == "lamb|b"
    assert main(["compare", f"run={tmp_path}", f"output={tmp_path}"]) == 0
    (tmp_path / "compare.csv").unlink()
    assert main(["compare", f"run={tmp_path}"]) == 0 and (tmp_path / "compare.csv").is_file()


def test_from_python(tmp_path: Path) -> None:
    laid_out(
        tmp_path,
        *((settings_of(0, objective={"pairs": [[1, 2 + n]]}), results_of({"heldout": 3.0 + n})) for n in range(2)),
    )
    compared = compare_runs(tmp_path / "run0", f"{tmp_path}/run1", by="perplexity")
    first, second = compared.records
    assert first["objective.pairs"] == [[1, 2]] and first["heldout.perplexity"] == 3.0
    assert second["run"] == "run1" and second["status"] == "finished" and second["seed"] == 0
    assert "objective.pairs" in str(compared) and "4.000" in compared._repr_html_() and repr(compared) == str(compared)
    assert compared.write(tmp_path / "out").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(SettingError, match=r"^by=perplexty is not a number .*did you mean perplexity"):
        compare_runs(tmp_path / "run0", by="perplexty")


AGREEMENT = {"heldout": {"top1": 0.5, "kl": 0.1}}
NUMBERS = {"perplexity": 3.0, "imdb.perplexity": 4.0, "heldout.top1": 0.5, "training.seconds": 10.0, "loss.total": 1.5}


def test_a_name_is_a_number_of_the_results() -> None:
    found = Record.from_json(results_of({"heldout": 3.0, "imdb": 4.0}, agreement=AGREEMENT))
    assert {name: Goal(name).value(found) for name in NUMBERS} == NUMBERS and Goal("parameters").value(found) == 1000
    names = ["heldout.perplexity", "imdb.perplexity", "heldout.top1", "heldout.kl", "parameters", "tokens_per_second"]
    names += ["training.tokens_per_second", "training.seconds", "loss.total"]
    assert {each.name for each in numbers_of(found)} == {*names}
    assert Goal("perplexity").value(Record(profile=Profile())) is None, "a run that ended with its profile"
    results = results_of({"heldout": 1.0}, training={"final_loss": {"total": None}})
    assert Goal("loss.total").value(Record.from_json(results)) is None


Measure = namedtuple("Measure", "name title lower_is_better")
MEASURES = [Measure("perplexity", "Perplexity", True), Measure("accuracy", "Accuracy", False)]
Direction = Enum("Direction", "minimize maximize")


@pytest.mark.parametrize(
    ("name", "direction", "compares", "has_gap", "words"),
    [
        *((name, None, True, True, "") for name in ("perplexity", "heldout.accuracy", "heldout.kl", "imdb.gap_closed")),
        *((name, None, True, True, "") for name in ("loss.soft", "training.seconds")),
        ("accuracy", "maximize", True, True, ""),
        ("heldout.acuracy", None, True, True, "did you mean heldout.accuracy"),
        ("wikitext2.perplexity", None, True, True, "choose one of perplexity, accuracy"),
        ("heldout.kl", None, False, True, "optimize=heldout.kl"),
        ("gap_closed", None, True, False, "optimize=gap_closed"),
        ("accuracy", "minimize", True, True, "hydra.sweeper.direction=maximize"),
        ("accuracy", Direction.minimize, True, True, "hydra.sweeper.direction=maximize"),
        ("gap_closed", "minimize", True, True, "hydra.sweeper.direction=maximize"),
        *((name, None, True, True, "optimize") for name in (3, "", ["a"])),
        ("perplexity", ["minimize"], True, True, "direction"),
    ],
)
def test_a_goal_is_checked_before_the_training(
    name: Any, direction: Any, compares: bool, has_gap: bool, words: str
) -> None:
    try:
        Goal.of(name, direction).check(MEASURES, ["heldout", "imdb"], ["soft"], compares, has_gap)
    except SettingError as error:
        assert words and words in str(error)
    else:
        assert not words


def test_snapshots_and_samples_make_no_other_settings(tmp_path: Path) -> None:
    runs = [(settings_of(seed), results_of({"heldout": 40.0 + seed})) for seed in (0, 1)]
    runs[0][0]["train"] = runs[0][0].get("train", {}) | {"snapshots": [100], "snapshot_every": 5}
    runs[0][0]["observers"] = {"journal": {"_target_": "mine.Journal"}}
    runs[1][0]["evaluate"] = runs[1][0].get("evaluate", {}) | {"samples": 0}
    assert len(laid_out(tmp_path, *runs).groups) == 1


def test_of_two_settings_that_differ_alike_in_each_seed_other_seeds_are_unknown(tmp_path: Path) -> None:
    """Scores of few examples do; they have no spread, and no interval to conclude from."""
    for spread, word in ((0.0, "is unclear"), (0.001, "helped")):
        runs = [
            (settings_of(seed, optimizer={"kind": kind}), results_of({"heldout": mean + seed * of_kind * spread}))
            for kind, mean, of_kind in (("adamw", 40.0, 0), ("lamb", 41.0, 1))
            for seed in (0, 1)
        ]
        assert f"what differs {word} (" in best_lines(laid_out(tmp_path / word, *runs))[0]
