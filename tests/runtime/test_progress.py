"""Progress: plain lines in a log, a bar on a terminal, nothing on ranks other than 0."""

import io
import logging
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass

import pytest

from distill.runtime import progress
from distill.runtime.progress import Progress, configure_logging, duration, log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass
class Clock:
    """Time that passes when a test says so."""

    now: float = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    monkeypatch.setattr(progress, "_open", [])  # a test that ended early elsewhere is none of these tests' business
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    yield clock
    assert progress._open == []


@pytest.mark.parametrize(("total", "left"), [(1000, 10), (0, 10), (110, 5)])
def test_a_limit_in_seconds(total: int, left: float, clock: Clock) -> None:
    """Evaluations are none of the minutes of a training, so it can move."""
    with Progress("train", total, "steps", limit=60) as work:
        clock.now += 50
        work.update(100)
        assert work.seconds_left == left
        work.end_in(2)
        assert work.seconds_left == 2


def test_the_rate_is_that_of_typical_work(clock: Clock) -> None:
    """Without what an earlier process did, and a first step that compiles."""
    with Progress("train", 1000, "steps", start=900) as work:
        assert work.rate == 0 and work.seconds_left is None
        clock.now += 10
        work.update(950)
        assert (work.rate, work.seconds_left) == (5, 10)
        work.begin_rate()
        clock.now += 10
        work.update(960)
        assert (work.rate, work.seconds_left) == (1, 40)


def test_log_files_get_few_plain_lines(clock: Clock) -> None:
    line = "train:  10%| 100/1000 steps [00:50,  2.00 steps/s, 7:30 min left, loss 3.21]\n"
    with redirect_stderr(io.StringIO()) as log_file, Progress("train", 1000, "steps") as work:
        clock.now += 50
        work.update(100, note="loss 3.21")
        assert log_file.getvalue() == line
        for done in range(101, 1001):
            clock.now += 0.1
            work.update(done)
    lines = log_file.getvalue().splitlines()
    assert 9 <= len(lines) <= 12 and "\r" not in log_file.getvalue()
    assert lines[-1].startswith("train: 100%| 1000/1000 steps [02:")


def test_a_terminal_gets_a_bar_that_messages_do_not_garble(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with redirect_stderr(Terminal()) as terminal, Progress("train", 1000, "steps") as work:
        for done in range(1, 501):
            clock.now += 0.01
            work.update(done, note="x" * 100)
        text = terminal.getvalue()
        assert "\n" not in text and 40 <= text.count("\r") <= 51
        assert all(len(part) <= 60 for part in text.split("\r")) and "train:  50%|" in text.split("\r")[-1]
        log("epoch 1")
        with Progress("evaluate", 4, "rows") as inner:
            assert [work.label for work in progress.under_way()] == ["train", "evaluate"]
            clock.now += 1
            inner.update(2)
    _, shown = terminal.getvalue().split("epoch 1\n")
    assert terminal.getvalue().split("\n")[0].endswith("\repoch 1") and shown.startswith("\rtrain:  50%|")
    assert "\n\revaluate:  50%|" in terminal.getvalue(), "inner work has a line of its own"


def test_only_rank_0_logs(clock: Clock) -> None:
    logger = logging.getLogger("distill.somewhere")
    try:
        for rank, lines in ((1, 0), (0, 3)):
            configure_logging(rank)
            with redirect_stderr(io.StringIO()) as log_file:
                with Progress("train", 10, "steps") as work:
                    clock.now += 100
                    work.update(10)
                logger.info(f"logged by {rank}")
            assert log_file.getvalue().count("\n") == lines
    finally:
        configure_logging(0)


def test_durations() -> None:
    shown = ["0 s", "59 s", "1:00 min", "3:25 min", "1:03:25 h"]
    assert [duration(seconds) for seconds in (0.2, 59.4, 59.6, 205, 3805)] == shown
