"""Runs side by side, on run folders made by hand: what becomes one line, and what is marked, ordered and said."""

import csv
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from made_runs import make_run, results_of, settings_of

from distill.commands.cli import main as distill_command
from distill.report.comparison.columns import numbers_of
from distill.report.comparison.compare import (
    ComparedRuns,
    best_lines,
    costs_table,
    differing,
    runs_table,
    scores_table,
    settings_table,
)
from distill.report.comparison.compare import compare as compare_runs
from distill.report.comparison.runs import find_runs, is_at_work
from distill.report.page import table_text
from distill.runs.record import Record
from distill.runtime.errors import SettingError


def main(arguments: list[str]) -> int:
    """`distill compare` in this process; gives the exit status."""
    return distill_command(["compare", *arguments])


def laid_out(folder: Path, first: str | None = None) -> ComparedRuns:
    return ComparedRuns(find_runs([str(folder)]), first)


def test_seeds_become_one_line_with_mean_and_range(tmp_path: Path) -> None:
    for temperature, seed, score in [(1.0, 0, 10.0), (1.0, 1, 12.0), (10.0, 0, 9.0), (2.0, 0, 8.0)]:
        make_run(tmp_path / f"{temperature}-{seed}", settings_of(seed, temperature), results_of({"heldout": score}))
    compared = laid_out(tmp_path)
    table = scores_table(compared)
    assert table.head == ["objective.temperature", "Runs", "heldout"] and table.groups == [("", 2), ("Perplexity", 1)]
    assert table.rows == [
        ["1", "seeds 0, 1", "11.00 (10.00 to 12.00)"],
        ["2", "seed 0", "8.000"],
        ["10", "seed 0", "9.000"],
        ["teacher", "", "9.000"],
    ]
    assert "mean" in table.note and "Lower is better: Perplexity" in table.note
    assert best_lines(compared) == [
        "Perplexity, heldout: best is 8.000 with objective.temperature=2; next 9.000 with objective.temperature=10."
    ]
    lines = table_text(table).splitlines()
    assert lines[0].strip() == "Perplexity" and len({len(line) for line in lines}) == 1
    assert lines[3].split() == ["2", "seed", "0", "8.000"]


def test_who_is_best_is_open_where_the_ranges_overlap(tmp_path: Path) -> None:
    for temperature, scores in {1.0: (10.0, 12.0), 2.0: (9.0, 11.5)}.items():
        for seed, score in enumerate(scores):
            make_run(tmp_path / f"{temperature}-{seed}", settings_of(seed, temperature), results_of({"heldout": score}))
    (line,) = best_lines(laid_out(tmp_path))
    assert "best is 10.25 with objective.temperature=2 (mean of 2 seeds)" in line and "overlap" in line
    # Differences of 1.0 and 0.5: their mean, and 12.706 standard errors of 0.25 to both sides.
    assert line.endswith("; over 2 seeds of both the difference is 0.750 (95 % interval -2.426 to 3.926).")


def test_which_settings_tell_runs_apart(tmp_path: Path) -> None:
    """Those with a part in the student, and another text at the same path."""
    for seed, tracker in enumerate(("none", "wandb")):
        given = settings_of(seed, tracker={"kind": tracker}, data={"cache": f"c{seed}"}, resume=f"r{seed}")
        make_run(tmp_path / "same" / str(seed), given, results_of({"heldout": 3.0}))
        results = results_of({"heldout": 3.0}, identity={"corpus.digest": 9 * str(seed)})
        make_run(tmp_path / "texts" / str(seed), settings_of(0), results)
    (group,) = laid_out(tmp_path / "same").groups
    assert group.values == {} and [*group.rows.seed] == [0, 1]
    texts = [group.values for group in laid_out(tmp_path / "texts").groups]
    assert texts == [{"corpus.digest": "00000000"}, {"corpus.digest": "11111111"}]


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ((1, 1, 1), (2, 2, 1), ["objective.temperature"]),
        ((1, 1, 1), (2, 1, 1), ["objective.temperature"]),
        ((1, 1, 1), (2, 3, 1), ["objective.temperature", "objective.soft.temperature"]),
        ((1, 1, 1), (1, 2, 1), ["objective.soft.temperature"]),
        ((1, 1, 2), (2, 2, 3), ["objective.temperature", "objective.mlm.weight"]),
    ],
)
def test_a_setting_that_follows_another_of_its_name_is_left_out(one: Any, other: Any, names: list[str]) -> None:
    keys = ("objective.temperature", "objective.soft.temperature", "objective.mlm.weight")
    runs: list[Any] = [SimpleNamespace(settings=dict(zip(keys, of, strict=True)), record=None) for of in (one, other)]
    assert differing(runs) == names


def test_a_run_that_is_not_finished_is_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "seed=0", settings_of(0), results_of({"heldout": 3.0}))
    make_run(tmp_path / "seed=1", settings_of(1), steps=7)
    make_run(tmp_path / "seed=4", settings_of(4), results_of({"heldout": 3.0}))
    (tmp_path / "seed=4" / "results.json").write_text("{")
    (tmp_path / "seed=3").mkdir()
    compared = laid_out(tmp_path)
    found = {name: status for name, _, status in runs_table(compared).rows}
    assert found.pop("seed=4").startswith("damaged: ")
    assert found == {"seed=0": "finished", "seed=1": "not finished: it stopped after step 7"}, "seed=3 was refused"
    assert scores_table(compared).rows[0][:2] == ["seed=0", "seed 0, 2 not finished"]


def test_a_run_is_at_work_by_the_lock_of_its_own_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        assert not is_at_work(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_at_work(tmp_path)
        monkeypatch.setattr(os, "minor", lambda device: 255)  # the same inode elsewhere
        assert not is_at_work(tmp_path)


def test_one_run_has_the_interval_of_its_gap(tmp_path: Path) -> None:
    closed = {"fraction": 0.34, "low": 0.29, "high": 0.4}
    baseline = {"perplexity": {"heldout": 11.0}, "gap_closed": {"perplexity": {"heldout": closed}}}
    make_run(tmp_path / "0", settings_of(0), results_of({"heldout": 10.0}, baseline=baseline))
    assert scores_table(laid_out(tmp_path)).rows[0][-1] == "34% (29% to 40%)"


def test_speeds_of_one_model_that_differ_are_marked(tmp_path: Path) -> None:
    """As on a machine with other work: a larger student may well be slower."""
    sizes = {"a": (1000, 9_405.0), "b": (1000, 18_554.0), "larger": (4000, 2_000.0)}
    for number, (name, (parameters, speed)) in enumerate(sizes.items()):
        results = results_of({"heldout": 3.0}, environment={"device": "cpu", "cpu_count": 2 + 62 * (name == "larger")})
        results["student"] |= {"name": "Small", "parameters": parameters, "tokens_per_second": speed}
        make_run(tmp_path / name, settings_of(0, number), results)
    table = costs_table(laid_out(tmp_path))
    assert [row[-3] for row in table.rows] == ["9,405 *", "18,554 *", "2,000"] and "* Speeds" in table.note
    assert "cpu, 2 cores; cpu, 64 cores" in table.note


def test_many_settings_have_a_table_of_their_own(tmp_path: Path) -> None:
    for number in range(2):
        given = settings_of(0, student={f"field{each}": number for each in range(6)})
        make_run(tmp_path / f"run{number}", given, results_of({"heldout": 3.0 + number}))
    compared = laid_out(tmp_path)
    assert [row[0] for row in scores_table(compared).rows][:2] == ["run0", "run1"]
    table = settings_table(compared)
    assert table.head == ["", "run0", "run1"] and table.rows[0] == ["student.field0", "0", "1"] and len(table.rows) == 6


def test_ordered_by_a_number(tmp_path: Path) -> None:
    for temperature, score in ((1.0, 5.0), (2.0, 3.0), (3.0, 4.0)):
        scores = {"wikitext2": score + 1, "heldout": score}
        make_run(tmp_path / str(temperature), settings_of(0, temperature), results_of(scores))
    compared = laid_out(tmp_path, first="heldout.perplexity")
    assert [row[0] for row in scores_table(compared).rows] == ["2", "3", "1", "teacher"]
    assert [column.data for column in compared.columns] == ["heldout", "wikitext2"]


def test_files_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in compare/, in `output`, or where they were before in the folder of a sweep."""
    for number, kind in enumerate(("<adamw>", "lamb|b")):
        given = settings_of(number, optimizer={"kind": kind})
        make_run(tmp_path / f"run{number}", given, results_of({"heldout": 4.0 + number}))
    make_run(tmp_path / "run9", settings_of(9, optimizer={"kind": "lamb|b"}))
    monkeypatch.chdir(tmp_path)
    assert main(["run=run*", "output=out"]) == 0
    printed = capsys.readouterr().out
    assert "optimizer.kind" in printed and "run9: not finished: it stopped after step 4" in printed
    assert printed.splitlines()[-1] == "Comparison: out/compare.html"
    html = (tmp_path / "out" / "compare.html").read_text()
    tree = ElementTree.fromstring(html.partition("\n")[2])
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", html), "loads nothing"
    assert "&lt;adamw&gt;" in html and "prefers-color-scheme:dark" in html and "<svg" in html and tree.tag == "html"
    markdown = (tmp_path / "out" / "compare.md").read_text()
    assert "lamb\\|b" in markdown and "](plots/compare.png)" in markdown
    with (tmp_path / "out" / "compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["seed"] for line in lines] == ["0", "1", "9"] and lines[2]["heldout.perplexity"] == ""
    assert float(lines[1]["heldout.perplexity"]) == 5.0 and lines[1]["optimizer.kind"] == "lamb|b"
    assert main([f"run={tmp_path}", f"output={tmp_path}"]) == 0
    (tmp_path / "compare.csv").unlink()
    assert main([f"run={tmp_path}"]) == 0 and (tmp_path / "compare.csv").is_file()


def test_from_python(tmp_path: Path) -> None:
    for seed in range(2):
        given = settings_of(0, objective={"pairs": [[1, 2 + seed]]})
        make_run(tmp_path / f"run{seed}", given, results_of({"heldout": 3.0 + seed}))
    compared = compare_runs(tmp_path / "run0", f"{tmp_path}/run1", by="perplexity")
    first, second = compared.records
    assert first["objective.pairs"] == [[1, 2]] and first["heldout.perplexity"] == 3.0
    assert second["run"] == "run1" and second["status"] == "finished" and second["seed"] == 0
    assert "objective.pairs" in str(compared) and "4.000" in compared._repr_html_() and repr(compared) == str(compared)
    assert compared.write(tmp_path / "out").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(SettingError, match=r"^by=perplexty is not a number .*did you mean perplexity"):
        compare_runs(tmp_path / "run0", by="perplexty")


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["run=nowhere"], "run=nowhere is not a folder"),
        (["run=empty"], "run=empty holds no run"),
        (["run=no*"], "matches none"),
        (["run=run", "by=perplexty"], "by=perplexty is not a number"),
    ],
)
def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "run", settings_of(0), results_of({"heldout": 3.0}))
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and line.startswith("distill: ") and not (tmp_path / "compare").exists()


def test_the_command_starts_without_torch() -> None:
    code = "import distill.commands.small, sys; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_names_of_numbers(tmp_path: Path) -> None:
    found = results_of({"heldout": 3.0}, agreement={"heldout": {"top1": 0.5, "kl": None}})
    names = ["heldout.perplexity", "heldout.top1", "parameters", "tokens_per_second"]
    names += ["training.tokens_per_second", "training.seconds", "loss.total"]
    assert [each.name for each in numbers_of(Record.from_json(found))] == names
