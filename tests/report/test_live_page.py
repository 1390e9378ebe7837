"""The page of a run that is under way: what it shows, how it is bounded, and what it keeps to itself."""

import math
import os
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pages import LOGS, under_way

from distill.report import live
from distill.report.figures import INK, Line, Panel, svg_panel, ticks
from distill.report.live_logs import LINES, MAX_POINTS, Series, cleaned, earlier_lines, tails, thinned
from distill.report.live_run import ending_of
from distill.report.live_sections import Ending, RunView, sections, title_of
from distill.report.page import Renewal, html
from distill.runs.record import Record
from distill.runtime.errors import Diverged, Interrupted


def written(run: RunView, folder: Path, **of_page: bool) -> tuple[str, str]:
    """The page as a file, and as the text that people read."""
    live.write(folder / "report.html", title_of(run), sections(run), run.every, **of_page)
    page = (folder / "report.html").read_text(encoding="utf-8")
    return page, " ".join("".join(ElementTree.fromstring(page).find("body").itertext()).split())


def test_it_shows_progress_losses_scores_waits_machine_and_every_rank(tmp_path: Path) -> None:
    page, text = written(under_way(), tmp_path)
    for part in (
        "Under way: training 81% 100/123 steps", "student on heldout 40%", "12:34 min", "step 100 of 123", "3.0%of the",
        "12.3%of the time in exchanges", "1,732", "Loss: Soft targets", "Learning rate", "Gradient norm", "71.19",
        "Waiting, % of the time", "Cores in use", "epoch 1, step 41: loss total 8.1", "rank 1", "nothing yet",
        "Written 2026-01-02 03:04:05 UTC; reloads every 15 s", "Project Gutenberg", "runs/distilbert_gutenberg",
    ):  # fmt: skip
        assert part in text, part
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; more" in page and title_of(under_way()) == "81% of distilbert_gutenberg"
    assert "http" not in page.replace('http-equiv="refresh"', "") and "src=" not in page
    assert len(page) < 200_000


def test_a_run_that_has_just_begun_has_a_page_too(tmp_path: Path) -> None:
    record = Record(recipe="mine", command="python -m distill")
    bare = RunView("runs/mine", "now", 15.0, record, activities=["tokens 34% 3/9 MB"])
    _, text = written(bare, tmp_path)
    assert "Under way: tokens 34% 3/9 MB." in text and "runs/mine" in text
    for absent in ("Curves", "None", "nan", "step"):
        assert absent not in text.replace("python -m distill", ""), absent
    _, text = written(replace(bare, activities=[]), tmp_path)
    assert "Under way: preparing models and text." in text
    _, text = written(replace(bare, points=[{"step": 1.0, "loss/total": 3.0}]), tmp_path)
    assert "Curves so far" in text


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (Diverged("loss was not finite"), 3, "newest good checkpoint"),
        (Interrupted("stopped by SIGTERM at step 7", 15), 143, "resumes from the newest checkpoint"),
        (OSError(28, "No space left on device", "/disk/x"), 74, "Make room"),
        (KeyError("a bug"), 1, "This is a bug"),
    ],
)
def test_a_run_that_has_stopped_says_so_and_how_to_go_on(
    error: BaseException, status: int, says: str, tmp_path: Path
) -> None:
    ending = ending_of(error)
    assert ending.status == status and ("KeyError" in ending.traceback) == (status == 1)
    run = replace(under_way(), ending=ending, left=None, activities=[])
    page, text = written(run, tmp_path, watched=False)
    assert (
        f"Stopped with status {status}" in text and says in text and str(run.record.command) in text and "71.19" in text
    )
    assert "limit = 0" in page and "Under way" not in text and "at this rate" not in text
    assert title_of(run).endswith(": stopped")


def test_a_finished_run_without_its_report_names_the_command_for_it(tmp_path: Path) -> None:
    _, text = written(replace(under_way(), ending=Ending(0, "")), tmp_path)
    assert "distill report run=/home/someone/runs/distilbert_gutenberg" in text and "status" not in text


@pytest.mark.parametrize("count", [1, MAX_POINTS - 1, MAX_POINTS, 10_000])
def test_a_series_is_bounded_and_holds_the_means_of_neighbours(count: int) -> None:
    series, values = Series(), np.random.default_rng(0).normal(size=count)
    for step, value in enumerate(values, 1):
        series.add({"step": step, "loss": float(value), "odd": None if step % 2 else math.nan})
    points, span = series.points(), series.merged
    assert len(points) <= MAX_POINTS and (count < MAX_POINTS or len(points) >= MAX_POINTS // 2)
    assert "odd" not in points[0]
    whole = count // span
    expected = values[: whole * span].reshape(whole, span).mean(1)
    np.testing.assert_allclose([point["loss"] for point in points[:whole]], expected, rtol=0, atol=1e-12)
    if count % span:
        assert points[-1]["loss"] == pytest.approx(values[whole * span :].mean(), abs=1e-12)
    assert len(thinned(points + points)) <= MAX_POINTS


def test_lines_of_an_earlier_start_end_with_the_step_that_the_run_goes_on_from(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    assert earlier_lines(log, 5) == []
    log.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 5001)) + '{"step": 50')
    assert earlier_lines(log, 0) == []
    steps = [line["step"] for line in earlier_lines(log, 4000)]
    assert steps[0] == 1 and 3900 < steps[-1] <= 4000 and len(steps) <= MAX_POINTS and steps == sorted(steps)


def test_curves_lie_where_their_numbers_say() -> None:
    """The axes go from 0 to 10 and from 0 to 4; positions are those of the panel's box."""
    svg = svg_panel(Panel("A <title>", "step", [Line([0, 5, 10], [4.0, 1.0, 2.0], INK)], from_zero=True, marks=[5, 11]))
    assert 'points="48.0,36.0 199.0,132.0 350.0,100.0"' in svg and "A &lt;title&gt;" in svg
    assert svg.count('class="mark"') == 1 and "M199.0 36V164" in svg
    assert ">10</text>" in svg and ">4</text>" in svg
    assert "<circle" in svg_panel(Panel("one", "step", [Line([3], [0.0], INK)]))
    assert "no values yet" in svg_panel(Panel("none", "step", [Line([], [], INK)]))
    log = svg_panel(Panel("steep", "step", [Line([0, 1, 2, 3, 4], [10_000.0, 10.0, 10.0, 10.0, 1.0], INK)]))
    assert ">100</text>" in log and ">1</text>" in log
    assert ticks(0, 10) == [0, 5, 10] and ticks(0.13, 0.31) == pytest.approx([0.15, 0.2, 0.25, 0.3])


def test_the_last_lines_of_logs_are_fit_to_be_shown(tmp_path: Path) -> None:
    assert cleaned(["a\r\x1b[Kb\r", "", "\x1b[31mred\x1b[0m", "pass s3://me:hunter2@host on", "bell\x07"]) == [
        "b", "red", "pass s3://***@host on", "bell\\x07",
    ]  # fmt: skip
    assert cleaned(["x" * 2001]) == ["(a line of 2,001 characters)"]
    assert tails(tmp_path / "none") == ({}, 0)
    for rank in range(40):
        log = tmp_path / f"rank{rank}.log"
        log.write_text("".join(f"line {number} of rank {rank} {'x ' * 100}\n" for number in range(1000)))
        os.utime(log, (1000 + rank, 1000 + rank))
    (tmp_path / "other.log").write_text("no rank")
    found, count = tails(tmp_path)
    assert count == 40 and list(found) == list(range(8, 40))
    assert len(found[9]) == LINES and found[9][-1].startswith("line 999 of rank 9 ")
    assert LOGS[0][0] in cleaned(LOGS[0])


def test_the_head_names_its_seconds_and_survives_without_scripts() -> None:
    page = html("a page", [], Renewal(20))
    assert '<meta http-equiv="refresh" content="20"/>' in page and "every = 20000," in page and "limit = 90000," in page
    assert "limit = 0," in html("a page", [], Renewal(20, watched=False)) and "<script" not in html("a page", [])
    ElementTree.fromstring(page)
