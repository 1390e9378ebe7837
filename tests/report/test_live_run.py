"""The page in a run: there while it goes on, gone when the report comes, and never in the run's way."""

import errno
import fcntl
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from job import Shelf, assert_same, composed, results, whole_run

from distill.distributed import single
from distill.report import live, report
from distill.report.live_run import is_free
from distill.runs.check import check
from distill.runs.metrics import RunLog
from distill.runtime.errors import SettingError
from distill.runtime.progress import log

OFTEN = "report.every=0.2"


def wait_until(condition: Any, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Any) -> None:
    """Let a run do something after it has logged that step."""
    log_metrics = RunLog.log_metrics

    def logged(self: RunLog, metrics: dict[str, float]) -> None:
        log_metrics(self, metrics)
        if metrics["step"] == step:
            act(self)

    monkeypatch.setattr(RunLog, "log_metrics", logged)


def test_the_page_is_there_while_the_run_goes_on_and_the_report_after_it(
    shelf: Shelf, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = shelf.root / "live", dict[str, Any]()

    def look(log: RunLog) -> None:
        state = folder / "progress.json"  # comes after the page
        wait_until(lambda: state.exists() and json.loads(state.read_text())["step"] == 6)
        seen["page"], seen["state"] = (folder / "report.html").read_text(), json.loads(state.read_text())

    at_step(monkeypatch, 6, look)
    assert shelf.run(folder, OFTEN) == 0
    assert_same(folder, done)
    assert seen["state"]["state"] == "under way" and seen["state"]["steps"] == 8 and seen["state"]["step"] == 6
    for part in ("Under way: training", "Loss: Masked tokens (MLM)", "Perplexity", "<script>", "epoch 1, step 4: loss"):
        assert part in seen["page"], part
    report_page = (folder / "report.html").read_text()
    assert "<script" not in report_page and "Size, speed and quality" in report_page
    assert not (folder / "progress.json").exists() and not list(folder.glob(".report*"))


@pytest.mark.slow
def test_a_stopped_run_says_so_and_lives_again_with_the_same_command(
    shelf: Shelf, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shelf.root / "stopped-page"
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda _: os.kill(os.getpid(), signal.SIGTERM))
        assert shelf.run(folder) == 143  # sooner than the first page
    page = (folder / "report.html").read_text()
    assert "Stopped with status 143: stopped by SIGTERM at step 4" in page and "its checkpoint is written" in page
    assert "limit = 0" in page and json.loads((folder / "progress.json").read_text())["status"] == 143
    seen: list[str] = []
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda _: wait_until(lambda: ">step 5 of 8" in (folder / "report.html").read_text()))
        at_step(patch, 5, lambda monitor: seen.append((folder / "report.html").read_text()))
        assert shelf.run(folder, OFTEN) == 0
    # The curve goes on from the steps of the first start: five points.
    points = re.search(r'aria-label="Learning rate">.*?points="([^"]*)"', seen[0], re.DOTALL)
    assert points is not None and len(points[1].split()) == 5
    assert_same(folder, done)
    assert not (folder / "progress.json").exists() and "<script" not in (folder / "report.html").read_text()


def test_a_bug_leaves_its_traceback_in_the_page(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: RunLog) -> None:
        raise RuntimeError("an odd thing with s3://me:abcdefgh@host")

    at_step(monkeypatch, 2, fail)
    with pytest.raises(RuntimeError):
        shelf.run(shelf.root / "bug")
    page = (shelf.root / "bug" / "report.html").read_text()
    assert "Stopped with status 1: RuntimeError: an odd thing" in page and "Traceback (most recent call last)" in page
    assert "abcdefgh" not in page


@pytest.mark.slow
def test_a_page_that_cannot_be_written_is_said_once_and_ends_nothing(
    shelf: Shelf, done: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    tried: list[Path] = []

    def full(path: Path, *_: Any, **__: Any) -> None:
        tried.append(path)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    folder = shelf.root / "no_page"
    with monkeypatch.context() as patch:
        patch.setattr(live, "write", full)
        at_step(patch, 4, lambda _: wait_until(lambda: len(tried) > 2))
        assert shelf.run(folder, OFTEN) == 0
    assert_same(folder, done)
    said = capfd.readouterr().err
    assert said.count("cannot write report.html") == 1 and "No space left on device" in said
    assert "Size, speed and quality" in (folder / "report.html").read_text()


def test_a_report_that_fails_leaves_a_page_that_names_the_cure(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    folder = shelf.root / "page_without_report"
    monkeypatch.setattr(report, "write", full)
    at_step(monkeypatch, 4, lambda _: wait_until((folder / "report.html").exists))
    assert shelf.run(folder, OFTEN) == 0
    page = (folder / "report.html").read_text()
    assert results(folder)["finished"] and f"distill report run={folder}" in page and "Under way" not in page


@pytest.mark.parametrize("every", ["null", "0"])
def test_it_can_be_turned_off(every: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = composed("+recipe=smoke", f"report.every={every}")
    check(config)
    ranks = single.Single(config.backend)
    with whole_run.make_page(config, tmp_path, "smoke", "", ranks) as page:
        page.begin(0, 0.0, 8)
        page.add({"step": 1, "seconds": 0.1})
        assert not page.on and not page._thread.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_a_negative_number_of_seconds_is_refused() -> None:
    with pytest.raises(SettingError, match=r"report\.every=-1.* give a number from 0 up to 86,400"):
        check(composed("+recipe=smoke", "report.every=-1"))


def test_nothing_is_written_where_work_may_be_lost(tmp_path: Path) -> None:
    assert is_free(tmp_path) and not is_free(tmp_path / "none")
    with (tmp_path / ".lock").open("w") as lock:
        assert is_free(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not is_free(tmp_path)  # another run is at work
    assert is_free(tmp_path)
    (tmp_path / "report.html").mkdir()
    assert not is_free(tmp_path)  # somebody's folder, which the run would set aside
    (tmp_path / "report.html").rmdir()
    (tmp_path / "results.json").write_text("{}")
    assert not is_free(tmp_path)  # a finished run, whose report stays until it is known that there is more to do


@pytest.mark.parametrize("earlier", [None, "the page of an earlier start"])
def test_preparation_shows_and_a_refusal_leaves_the_folder_as_it_was(tmp_path: Path, earlier: str | None) -> None:
    """Before the folder belongs to the run the page is written where nothing can be lost, and goes with a refusal."""
    config, page = composed("+recipe=smoke", OFTEN), tmp_path / "report.html"
    if earlier:
        page.write_text(earlier)
        (tmp_path / ".lock").touch()
    with (
        pytest.raises(SettingError),
        whole_run.make_page(config, tmp_path, "smoke", "the command", single.Single(config.backend)),
    ):
        log("corpus of books")
        wait_until(
            lambda: page.exists() and "corpus of books" in page.read_text() and "the command" in page.read_text()
        )
        raise SettingError("corpus.path=x holds no text")
    assert {path.name for path in tmp_path.iterdir()} == ({".lock", "report.html"} if earlier else set())
    assert not earlier or page.read_text() == earlier


def test_what_ends_a_run_after_its_report_leaves_the_report(tmp_path: Path) -> None:
    config = composed("+recipe=smoke", "report.every=0.02")
    with (
        pytest.raises(SettingError),
        whole_run.make_page(config, tmp_path, "smoke", "", single.Single(config.backend)) as page,
    ):
        page.begin(0, 0.0, 8)
        wait_until((tmp_path / "progress.json").exists)
        page.stop()
        (tmp_path / "report.html").write_text("the report")
        page.publish()
        raise SettingError("another rank was lost at the very end")
    assert (tmp_path / "report.html").read_text() == "the report" and not (tmp_path / "progress.json").exists()


def test_exchanges_between_ranks_are_shares_of_the_time(tmp_path: Path) -> None:
    config = composed("+recipe=smoke", OFTEN)
    ranks = single.Single(config.backend)
    ranks.size = 2
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").write_text("a warning of rank 1\n")
    with whole_run.make_page(config, tmp_path, "smoke", "", ranks) as page:
        page.begin(0, 10.0, 8)
        ranks.traffic.exchange_seconds = 0.5
        page.add({"step": 1, "seconds": 12.0})
        ranks.traffic.exchange_seconds = 1.5
        page.add({"step": 2, "seconds": 14.0})
        wait_until(lambda: (tmp_path / "report.html").exists() and "rank 1" in (tmp_path / "report.html").read_text())
    assert [point["exchange_wait"] for point in page._series.points()] == [0.25, 0.5]
    assert "a warning of rank 1" in (tmp_path / "report.html").read_text()
