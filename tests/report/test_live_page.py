"""The page of a run under way: what it shows, how it ends, and that it is never in the run's way."""

import errno
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job import Shelf, assert_same, composed, results, wait_for, whole_run
from pages import LOGS, under_way

from distill.distributed import single
from distill.report import live, report
from distill.report.live import Renewer, Status, cleaned, ending_of, evenly_spaced, tails, title_of
from distill.report.page import html
from distill.runs.callbacks import RunLog
from distill.runs.record import Record
from distill.runtime.errors import Diverged, Interrupted, SettingError
from distill.runtime.progress import log

OFTEN = "report.every=0.2"


def text_of(run: Status) -> tuple[str, str]:
    """The page as a file, and as the text that people read."""
    page = html(title_of(run), live.sections(run), run.every, watched=run.ending is None)
    return page, " ".join("".join(ElementTree.fromstring(page).find("body").itertext()).split())


def test_it_means_nothing_but_its_texts_and_loads_nothing() -> None:
    page, text = text_of(under_way())  # whose words are those of golden/live.md
    for part in ("step 100 of 123", "12.3%of the time in exchanges", "Soft targets", "Cores in use", "nothing yet"):
        assert part in text, part
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; more" in page and title_of(under_way()) == "81% of distilbert_gutenberg"
    assert "http" not in page.replace('http-equiv="refresh"', "").replace("http://www.w3.org/", "")
    _, text = text_of(Status(Path("runs/mine"), 15.0, Record(recipe="mine"), activities=["tokens 34% 3/9 MB"]))
    assert "Under way: tokens 34% 3/9 MB." in text and "runs/mine" in text and "None" not in text


def test_a_run_that_has_stopped_has_the_status_of_its_error() -> None:
    """Whose page is golden/stopped.md."""
    statuses = {Diverged("x"): 3, Interrupted("x", 15): 143, OSError(28, "full"): 74, OSError(24, "files"): 2}
    for error, status in (statuses | {KeyError(): 1}).items():
        assert ending_of(error).status == status
    page, _ = text_of(replace(under_way(), ending=ending_of(KeyError("a bug"))))
    assert "limit = 0" in page and "Under way" not in page


def test_of_a_long_log_some_lines_are_drawn_the_last_always(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert evenly_spaced(path) == []
    lines = [json.dumps({"step": step, "seconds": 1.0 * step}) for step in range(1, 5001)]
    path.write_text("\n".join([*lines[:4000], "damage", *lines[4000:], lines[0][:9]]))
    steps = [line["step"] for line in evenly_spaced(path)]
    assert steps[-1] == 5000 and 400 < len(steps) <= live.MAX_POINTS and steps == sorted(steps)


def test_the_last_lines_of_logs_are_fit_to_be_shown(tmp_path: Path) -> None:
    assert cleaned(["a\r\x1b[Kb\r", "", "\x1b[31mred\x1b[0m", "pass s3://me:hunter2@host on", "bell\x07"]) == [
        "b", "red", "pass s3://***@host on", "bell\\x07",
    ]  # fmt: skip
    assert cleaned(["x" * 2001]) == ["(a line of 2,001 characters)"]
    assert tails(tmp_path / "none") == {}
    for rank in range(2):
        lines = (f"line {number} of rank {rank} {'x ' * 100}\n" for number in range(1000))
        (tmp_path / f"rank{rank}.log").write_text("".join(lines))
    (tmp_path / "other.log").write_text("no rank")
    found = tails(tmp_path)
    assert {*found} == {0, 1} and len(found[1]) == live.LINES and found[1][-1].startswith("line 999 of rank 1 ")
    assert LOGS[0][0] in cleaned(LOGS[0])


def shown(page: Path) -> str:
    return page.read_text() if page.exists() else ""


def at_step(monkeypatch: Any, step: int, act: Any) -> None:
    """Let a run do something after it has logged that step."""
    write = RunLog.write

    def logged(self: RunLog, metrics: dict[str, float]) -> None:
        write(self, metrics)
        if metrics["step"] == step:
            act(self)

    monkeypatch.setattr(RunLog, "write", logged)


def test_the_page_is_there_while_the_run_goes_on_and_the_report_after_it(
    shelf: Shelf, done: Path, monkeypatch: Any
) -> None:
    folder, seen = shelf.root / "live", list[str]()

    def look(log: RunLog) -> None:
        wait_for(lambda: "step 6 of 8" in shown(folder / "report.html"))
        seen.append(shown(folder / "report.html"))

    at_step(monkeypatch, 6, look)
    assert shelf.run(folder, OFTEN) == 0
    assert_same(folder, done)
    for part in ("Under way: training", "Perplexity", "<script>", "epoch 1, step 4: loss"):
        assert part in seen[0], part
    page = shown(folder / "report.html")
    assert "<script" not in page and "Size, speed and quality" in page and not list(folder.glob(".report*"))
    scored = [results(run)["evaluation"] for run in (folder, done)]
    assert scored[0] == scored[1] and all(len(of_set["digest"]) == 64 for of_set in scored[0].values())


def test_a_bug_leaves_its_traceback_in_the_page(shelf: Shelf, monkeypatch: Any) -> None:
    def fail(_: RunLog) -> None:
        raise RuntimeError("an odd thing with https://me:abcdefgh@host")

    at_step(monkeypatch, 2, fail)
    with pytest.raises(RuntimeError):
        shelf.run(shelf.root / "bug")
    page = shown(shelf.root / "bug" / "report.html")
    assert "Stopped with status 1: RuntimeError: an odd thing" in page and "Traceback (most recent call last)" in page
    assert "abcdefgh" not in page


def test_a_page_that_cannot_be_written_is_said_once(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "report.html").mkdir()
    page = Renewer(tmp_path / "report.html", 60, lambda: page.write("a page", []))
    page.draw()
    page.draw()
    assert len(lines) == 1 and "cannot write" in lines[0] and "the run continues" in lines[0]


def test_a_report_that_fails_leaves_a_page_that_names_the_cure(shelf: Shelf, monkeypatch: Any) -> None:
    def full(folder: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    folder = shelf.root / "page_without_report"
    monkeypatch.setattr(report, "write", full)
    at_step(monkeypatch, 4, lambda _: wait_for((folder / "report.html").exists))
    assert shelf.run(folder, OFTEN) == 0
    page = shown(folder / "report.html")
    assert results(folder)["finished"] and f"distill report run={folder}" in page and "Under way" not in page


def page_of(path: Path, *settings: str, ranks: Any = None) -> Any:
    config = composed("+recipe=smoke", *settings)
    return whole_run.make_page(config, path, "smoke", "the command", ranks or single.Single(config.backend))


def test_a_report_stays_until_it_is_known_that_there_is_more_to_do(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with page_of(tmp_path, "report.every=null") as page:
        page.begin(0.0, 8)
    assert not page.on and [path.name for path in tmp_path.iterdir()] == ["results.json"]
    with page_of(tmp_path, OFTEN) as page:
        page._renewer.draw()
        assert not (tmp_path / "report.html").exists()
        page.begin(0.0, 8)
        wait_for((tmp_path / "report.html").exists)


@pytest.mark.parametrize("earlier", [None, "the page of an earlier start"])
def test_preparation_shows_and_a_refusal_leaves_the_folder_as_it_was(tmp_path: Path, earlier: str | None) -> None:
    """Before the folder belongs to the run the page is written where nothing can be lost, and goes with a refusal."""
    path = tmp_path / "report.html"
    if earlier:
        path.write_text(earlier)
        (tmp_path / ".lock").touch()
    with pytest.raises(SettingError), page_of(tmp_path, OFTEN):
        log("corpus of books")
        wait_for(lambda: "corpus of books" in shown(path) and "the command" in shown(path))
        raise SettingError("corpus.path=x holds no text")
    assert {path.name for path in tmp_path.iterdir()} == ({".lock", "report.html"} if earlier else set())
    assert not earlier or path.read_text() == earlier


def test_what_ends_a_run_after_its_report_leaves_the_report(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with pytest.raises(SettingError), page_of(tmp_path, "report.every=0.02") as page:
        page.begin(0.0, 8)
        wait_for(path.exists)
        page.stop()
        path.write_text("the report")
        page.publish()
        raise SettingError("another rank was lost at the very end")
    assert path.read_text() == "the report"


def test_exchanges_between_ranks_are_fractions_of_the_time(tmp_path: Path) -> None:
    ranks = single.Single(composed("+recipe=smoke").backend)
    ranks.size = 2
    ranks.traffic.exchange_seconds = 1.5
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").write_text("a warning of rank 1\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "seconds": 14.0, "data_wait": 0.0}\n')
    with page_of(tmp_path, OFTEN, ranks=ranks) as page:
        page.begin(8.0, 8)
        wait_for(lambda: "a warning of rank 1" in shown(tmp_path / "report.html"))
        assert "<b>25.0%</b><span>of the time in exchanges" in shown(tmp_path / "report.html")
