"""The pages in a real browser, where one is installed: widths, the dark scheme, renewal, and silence of a lost run."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, look
from pages import under_way

from distill.report import page
from distill.report.live import Status, sections, title_of
from distill.report.page import html

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")


def write(path: Path, run: Status, watched: bool = True) -> None:
    text = html(title_of(run), sections(run), run.every, watched=watched and run.ending is None)
    path.write_text(text, encoding="utf-8")


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
def test_a_run_that_is_silent_for_long_is_said_to_be(watched: bool, tmp_path: Path, monkeypatch: Any) -> None:
    run, now = under_way(), time.time()
    with monkeypatch.context() as patch:
        patch.setattr(page.time, "time", lambda: now - 3600)
        write(tmp_path / "live.html", run, watched)
    assert ("No news since" in look(tmp_path / "live.html", 900, seconds=3)["text"]) == watched
