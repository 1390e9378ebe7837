"""The headline table: its arithmetic, its rows, and one of them from training to table, resumed."""

import json
import math
import os
from pathlib import Path

import pytest
from forked import Forked
from job import ROOT, composed

from benchmarks.headline import ROWS, Line
from distill.runs.check import check

SCRIPT = ROOT / "benchmarks" / "headline.py"


def test_the_fraction_of_the_gap() -> None:
    """From 40 to 10, 20 is half of the way by the logarithm; by accuracy the mean of three seeds has its interval."""
    line = Line("layers", "heldout", "perplexity", 0.5, 2.0, [10.0], [40.0], [20.0], [1.5])
    assert line.closed() == pytest.approx([0.5])
    assert line.cells()[3:8] == ["10.0", "40.0", "20.0", "50%", "1.5"] and "50% of the parameters" in line.cells()[1]
    scores = [[90.0] * 3, [80.0] * 3, [84.0, 85.0, 86.0]]
    line = Line("task", "dev", "accuracy", 0.5, 0.0, *scores, [1.0, 2.0, 3.0])
    assert line.closed() == pytest.approx([0.4, 0.5, 0.6]) and "fast" not in line.cells()[1]
    assert line.cells()[5:8] == ["85.0 (84.0 to 86.0)", f"50% ± {100 * 4.303 * 0.1 / math.sqrt(3):.0f}", "2.0"]


def test_no_gap_where_the_baseline_is_as_good_as_the_teacher() -> None:
    line = Line("layers", "heldout", "perplexity", 0.5, 2.0, [40.0], [39.0], [40.7], [1.0])
    assert line.closed() == [] and line.cells()[6] == "no gap"


@pytest.mark.parametrize("name", ROWS)
def test_rows_have_settings_that_hold(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    for settings in (row.student, row.baseline):
        both = row.both.replace("TEACHER", str(tmp_path))
        check(composed(f"+recipe={row.recipe}", "seed=1", *both.split(), *settings.split()))
    assert not row.teacher or "TEACHER" in row.both


def test_an_unknown_row_is_refused() -> None:
    done = Forked(["layer"], dict(os.environ), script=SCRIPT)
    assert "there is no row layer; choose among layers" in done.communicate(timeout=500)[1] and done.returncode == 2


@pytest.mark.slow
def test_a_row_from_training_to_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the bundled books; the second command repeats no run, the third begins none."""
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    settings = ["corpus.max_sequences=32", "corpus.sequence_length=32", "evaluate.max_sequences=8", "backend.threads=1"]
    command = ["small", "--seeds", "1", "--work", str(tmp_path), "--json", str(tmp_path / "table.json"), *settings]
    printed, results = [], []
    for more in ([], [], ["--seeds", "2", "--minutes", "0"], ["--rates", "1e-3,2e-3"]):
        done = Forked([*command, *more], dict(os.environ), script=SCRIPT)
        printed.append(done.communicate(timeout=600))
        assert done.returncode == 0, printed[-1][1][-2000:]
        results.append(json.loads((tmp_path / "table.json").read_text())["results"])
    (line,) = results[0]
    assert line["row"] == "small" and line["data"] == "heldout" and len(line["closed"]) == 1
    assert line["teacher"][0] < line["student"][0] < line["baseline"][0] and line["minutes"][0] > 0
    assert "| small | 2 of 4 layers of a smaller BERT: 71% of the parameters" in printed[0][0]
    assert printed[0][0] == printed[1][0] and "..." in printed[0][1] and "..." not in printed[1][1]
    assert "small: 1 of 2 seeds; the same command resumes" in printed[2][1]
    assert "| small, 1e-3 | 2 of 4" in printed[3][0] and "| small, 2e-3 | 2 of 4" in printed[3][0]
    assert [line["rate"] for line in results[3]] == ["1e-3", "2e-3"]
    assert results[3][0]["baseline"] != results[3][1]["baseline"]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 6
