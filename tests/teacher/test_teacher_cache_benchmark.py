"""The teacher-cache benchmarks: gradients tell bias from noise, tables compare with the live teacher, runs are made."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from job import ROOT, Shelf, environment


@pytest.mark.slow
def test_gradients_of_draws_are_without_bias_and_of_the_largest_entries_are_not(
    shelf: Shelf, capsys: pytest.CaptureFixture
) -> None:
    noise = import_module("benchmarks.teacher_cache.noise")
    corpus = [*shelf.corpus, "corpus.max_sequences=60", "train.batch_size=10", "train.accumulate=1"]
    lines = noise.compare("masked", None, ["live", "top 16", "63 draws", "12 draws"], 6, 2, corpus)
    found = {line["teacher"]: line for line in lines}
    assert list(found) == ["top 16", "63 draws", "12 draws"] and "| top 16 | 66 |" in capsys.readouterr().out
    assert found["top 16"]["difference"] > 3 * found["top 16"]["chance"]
    for name in ("63 draws", "12 draws"):
        assert 0.5 < found[name]["difference"] / found[name]["chance"] < 1.6
    assert 3 < found["12 draws"]["noise"] / found["63 draws"]["noise"] < 8, "63 / 12, but for what is systematic"


def test_the_table_compares_runs_of_one_seed() -> None:
    runs, main = import_module("benchmarks.teacher_cache.runs"), import_module("benchmarks.teacher_cache.teacher_cache")

    def line(name: str, seed: int, score: float, num_bytes: float | None) -> object:
        own = {"books": score}
        return runs.Line(
            "masked", name, seed, num_bytes, None, None, 9.0, 1.0, own, {"books": {"kl": 0.1}}, {"books": 40.0}
        )

    scores = [
        ("live", 0, 50.0, None),
        ("live", 1, 60.0, None),
        ("63 draws", 0, 51.0, 128.2),
        ("63 draws", 1, 63.0, 128.2),
    ]
    printed = main.table_of([line(*each) for each in scores])
    assert "the teacher itself: 40.00" in printed
    assert "| live |  |  |  | 9 | 55.00 | 50.00 to 60.00 | 1.000 | 0.100 |" in printed
    assert "| 63 draws | 128.2 |  |  | 9 | 57.00 | 51.00 to 63.00 | 1.035 | 0.100 |" in printed  # 1.02 and 1.05


def test_draws_take_half_of_the_bytes_of_top_64() -> None:
    runs = import_module("benchmarks.teacher_cache.runs")
    sizes = {name: kept.layout(6144).position_bytes for name, kept in runs.CACHES.items() if kept.wanted}
    assert sizes["top 64"] == 258
    halves = {name for name, size in sizes.items() if size <= 129}
    assert halves == set(sizes) - {"top 32", "top 64", "16 exact, 94 draws"}


def test_runs_of_other_settings_have_other_folders() -> None:
    runs = import_module("benchmarks.teacher_cache.runs")
    names = {
        runs.folder_name("63 draws", 0, arguments) for arguments in (["seed=0"], ["seed=0", "corpus.max_sequences=9"])
    }
    assert len(names) == 2 and all(name.startswith("63-draws-seed0-") for name in names)
    assert runs.folder_name("63 draws", 0, ["seed=0"]) in names


@pytest.mark.slow
def test_runs_of_both_pairs(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "teacher_cache" / "teacher_cache.py"),
        "--quick",
        "--work",
        str(tmp_path / "work"),
    ]
    more = ["--seeds", "1", "--only", "live", "63 draws", "--noise", "2", "--json", str(tmp_path / "results.json")]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [(run["pair"], run["teacher"]) for run in content["runs"]] == [
        (pair, teacher) for pair in ("masked", "causal") for teacher in ("live", "63 draws")
    ]
    assert len((tmp_path / "work" / "lines.jsonl").read_text().splitlines()) == 4
    assert done.stdout.count("ratio to live") == 2 and done.stdout.count("beside those of the live teacher") == 2
