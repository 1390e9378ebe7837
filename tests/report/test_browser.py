"""The pages in a real browser, where one is installed: widths, the dark scheme, renewal, and silence of a lost run."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from browser import BROWSER, look
from made_runs import MEASURES, make_run, results_of, settings_of
from pages import under_way

from distill.report import page
from distill.report.comparison.compare import compare as compare_runs
from distill.report.live import Status, ending_of, sections, title_of
from distill.report.page import html

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
SAYS = {"live": "Under way: training", "stopped": "Stopped with status 1", "report": "Size, speed and quality"}


def write(path: Path, run: Status, watched: bool = True) -> None:
    text = html(title_of(run), sections(run), run.every, watched=watched and run.ending is None)
    path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def pages(written: Path) -> Path:
    """A folder with the finished report, the page of a run that is under way and that of one that has stopped."""
    run = under_way()
    write(written / "live.html", run)
    stopped = replace(run, ending=ending_of(RuntimeError("an odd thing" + 60 * "!")), left=None)
    write(written / "stopped.html", stopped)
    return written


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(380, False), (1280, True)])
@pytest.mark.parametrize("name", [*SAYS])
def test_nothing_is_wider_than_the_window(name: str, width: int, dark: bool, pages: Path) -> None:
    # The tables of the report fit, too: at 380 pixels only curves and long lines may be scrolled.
    on_load = """
        found.cut = [].filter.call(page.document.querySelectorAll(".wide"), function (box) {
          return box.scrollWidth > box.clientWidth + 1; }).map(function (box) { return box.innerText.slice(0, 200); });
    """
    found = look(pages / f"{name}.html", width, on_load, dark=dark)
    assert found["inner"] == width and found["scroll"] <= width and SAYS[name] in found["text"]
    assert (found["dark"], found["paper"]) == (dark, "rgb(20, 25, 31)" if dark else "rgb(255, 255, 255)")
    assert name != "report" or not any("Parameters" in table for table in found["cut"]), found["cut"]


def compared(folder: Path, num_settings: int = 0) -> Path:
    """A page of twelve runs in six groups, with two measures, one of a long title, on three sets each.

    So many settings more differ between the groups.
    """
    long = "Pseudo-perplexity, one masked position at a time"
    for number in range(12):
        seed, temperature, init = number % 2, float(1 + number // 4), ("layers", "random")[number // 2 % 2]
        score = 40 + 3 * temperature + 5 * (init == "random") + 0.3 * seed
        results = results_of({"heldout": score, "wikitext2": 1.7 * score, "imdb reviews": 2.1 * score})
        results["measures"] = {**MEASURES, "pseudo_perplexity": {"title": long, "lower_is_better": True}}
        results["student"]["pseudo_perplexity"] = results["student"]["perplexity"]
        student = {"init": init, **{f"another_setting_{of}": init for of in range(num_settings)}}
        make_run(folder / "runs" / str(number), settings_of(seed, temperature, student=student), results)
    compare_runs(folder / "runs").write(folder)
    return folder / "compare.html"


CUT = """
    found.cut = [].filter.call(page.document.querySelectorAll(".wide"), function (box) {
      return box.scrollWidth > box.clientWidth + 1; }).length;
    function visible(text) {
      var walker = page.document.createTreeWalker(page.document.body, 4), node;
      while ((node = walker.nextNode())) if (node.data.indexOf(text) >= 0) {
        var range = page.document.createRange(), box;
        range.selectNodeContents(node);
        box = range.getBoundingClientRect();
        if (box.bottom < page.innerHeight) if (box.right < page.innerWidth) return true;
      }
      return false;
    }
    found.score = visible("43.15");
    var boxes = [].map.call(page.document.querySelectorAll("figure svg text"), function (text) {
      return text.getBoundingClientRect(); });
    var sheet = page.document.querySelector("figure svg").getBoundingClientRect();
    found.beyond = boxes.filter(function (box) {
      return box.right > sheet.right + 1 || sheet.left - 1 > box.left || sheet.top - 1 > box.top; }).length;
    found.meeting = boxes.filter(function (one) { return boxes.some(function (other) {
      return one !== other && Math.min(one.right, other.right) > Math.max(one.left, other.left) + 1 &&
        Math.min(one.bottom, other.bottom) > Math.max(one.top, other.top) + 2; }); }).length;
"""


@needs_browser
@pytest.mark.parametrize(("width", "settings"), [(400, 0), (400, 20), (1100, 0), (1200, 0)])
def test_a_comparison_shows_its_scores(width: int, settings: int, tmp_path: Path) -> None:
    """On the first screen, in a table that takes the margins where it needs them, below titles that are not cut."""
    found = look(compared(tmp_path, settings), width, CUT)
    assert found["inner"] == width and found["scroll"] <= width and found["score"]
    if not settings:
        assert found["beyond"] == found["meeting"] == 0 and (width == 400 or found["cut"] == 0)


@needs_browser
def test_a_page_renews_itself_where_the_reader_is_and_waits_while_text_is_selected(tmp_path: Path) -> None:
    run = replace(under_way(), every=1.0)
    write(tmp_path / "live.html", run)
    scroll = "if (loads === 1) { page.scrollTo(0, 300); page.document.querySelector('details').open = true; }"
    opened = "found.open = page.document.querySelector('details').open;"
    found = look(tmp_path / "live.html", 900, scroll + opened, seconds=5)
    assert found["loads"] > 2 and found["top"] == 300 and found["open"]
    select = "page.getSelection().selectAllChildren(page.document.querySelector('h1'));"
    assert look(tmp_path / "live.html", 900, select, seconds=5)["loads"] == 1
    assert "No news since" not in found["text"]


@needs_browser
@pytest.mark.parametrize("watched", [True, False])
def test_a_run_that_is_silent_for_long_is_said_to_be(
    watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = under_way(), time.time()
    with monkeypatch.context() as patch:
        patch.setattr(page.time, "time", lambda: now - 3600)
        write(tmp_path / "live.html", run, watched)
    assert ("No news since" in look(tmp_path / "live.html", 900, seconds=3)["text"]) == watched
