"""The progress line: what it says, where it may write, and that nothing garbles it."""

import io
import logging
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from distill.runtime import progress
from distill.runtime.progress import Progress, amount, configure_logging, duration, log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    monkeypatch.setattr(progress, "_open", [])  # a test that ended early elsewhere is none of these tests' business
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock.monotonic)
    yield clock
    assert progress._open == []


def seen(written: str) -> list[str]:
    """The lines that stay on a terminal's screen."""
    return [re.split(r"\r\x1b\[K", line)[-1] for line in written.split("\n")]


def test_line_says_done_rate_elapsed_and_left(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress("train", 1000, "steps", stream) as line:
        clock.now += 50
        line.update(100, note="loss 3.21")
        assert stream.getvalue() == ("train  10% 100/1,000 steps, 2 steps/s, 50 s elapsed, 7:30 min left  loss 3.21\n")


def test_a_limit_in_seconds_ends_the_work_before_its_total(clock: Clock) -> None:
    stream = io.StringIO()
    for total, left in ((1000, "10 s left"), (0, "10 s left"), (110, "5 s left")):
        with Progress("train", total, "steps", stream, limit=60) as line:
            clock.now += 50
            line.update(100)
        assert left in stream.getvalue().splitlines()[-2]


def test_a_limit_that_is_moved(clock: Clock) -> None:
    """As by an evaluation, which is none of the minutes of a training."""
    with Progress("train", 0, "steps", io.StringIO(), limit=60) as line:
        clock.now += 100
        line.update(50)
        assert line.seconds_left == 0
        line.end_in(20)
        assert line.seconds_left == 20


def test_rate_counts_this_process_only(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress("train", 1000, "steps", stream, start=900) as line:
        clock.now += 10
        line.update(950)
    assert "95% 950/1,000 steps, 5 steps/s, 10 s elapsed, 10 s left" in stream.getvalue()


def test_log_files_get_few_lines(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress("train", 1000, "steps", stream) as line:
        for done in range(1, 1001):
            clock.now += 0.1
            line.update(done)
    lines = stream.getvalue().splitlines()
    assert 9 <= len(lines) <= 11 and "\r" not in stream.getvalue()
    assert lines[-1].startswith("train 100% 1,000/1,000 steps") and "left" not in lines[-1]


def test_terminal_line_is_rewritten_in_place_and_fits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    with Progress("train", 1000, "steps", stream) as line:
        for done in range(1, 1001):
            clock.now += 0.01
            line.update(done, note="x" * 100)
        assert stream.getvalue().count("\n") == 0
        assert 90 <= stream.getvalue().count("\r") <= 102
        assert all(len(part) < 40 for part in stream.getvalue().split(progress.WIPE))
    assert seen(stream.getvalue())[0].startswith("train 100% 1,000/1,000 steps")


def test_log_does_not_garble_the_line(clock: Clock) -> None:
    stream = Terminal()
    with Progress("train", 10, "steps", stream) as line:
        clock.now += 1
        line.update(5)
        log("epoch 1: perplexity 38.9", stream)
        assert seen(stream.getvalue())[0] == "epoch 1: perplexity 38.9"
        assert seen(stream.getvalue())[1].startswith("train  50%")
    log("done", stream)
    assert seen(stream.getvalue())[2] == "done"


def test_a_message_elsewhere_writes_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log("hello")
    assert capsys.readouterr().err == "hello\n"


def test_inner_work_has_the_line_to_itself(clock: Clock) -> None:
    stream = Terminal()
    with Progress("train", 10, "steps", stream) as outer:
        with Progress("evaluate", 4, "rows", stream) as inner:
            clock.now += 1
            outer.update(5)
            inner.update(2)
            assert seen(stream.getvalue())[-1].startswith("evaluate  50%")
        clock.now += 1
        outer.update(6)
        assert seen(stream.getvalue())[-1].startswith("train  60%")


def test_only_rank_0_speaks(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("distill.somewhere")
    try:
        for rank, expected in ((1, ""), (0, "said by 0\n")):
            configure_logging(rank)
            stream = Terminal()
            with Progress("train", 10, "steps", stream) as line:
                clock.now += 100
                line.update(10)
            assert bool(stream.getvalue()) == (rank == 0)
            logger.info(f"said by {rank}")
            assert capsys.readouterr().err == expected
    finally:
        configure_logging(0)


def test_a_first_step_that_compiles_is_no_part_of_the_rate(clock: Clock) -> None:
    """It took 25 seconds and promised hours: the rate, and the time left, count from where it was over."""
    stream = io.StringIO()
    with Progress("train", 1000, "steps", stream) as line:
        clock.now += 25
        line.update(1)
        line.begin_rate()
        clock.now += 10
        line.update(21)
    assert "2% 21/1,000 steps, 2 steps/s, 35 s elapsed, 8:10 min left" in stream.getvalue().splitlines()[1]


def test_unknown_total_and_double_close(clock: Clock) -> None:
    stream = io.StringIO()
    line = Progress("tokens", 0, "tokens", stream)
    clock.now += 20
    line.update(24_690_000)
    line.close()
    line.close()
    assert stream.getvalue().splitlines()[-1] == "tokens 24.69M tokens, 1.23M tokens/s, 20 s elapsed"


def test_line_is_closed_when_the_work_fails(clock: Clock) -> None:
    with pytest.raises(RuntimeError), Progress("train", 10, "steps", io.StringIO()):
        raise RuntimeError


def test_on_a_real_terminal() -> None:
    code = (
        "from distill.runtime.progress import *\nwith Progress('x', 3, 'rows') as p:\n    p.update(3); log('between')"
    )
    reader, writer = pty.openpty()
    subprocess.run([sys.executable, "-c", code], stderr=writer, check=True, timeout=60)
    os.close(writer)
    time.sleep(0.05)
    written = os.read(reader, 65536).decode().replace("\r\n", "\n")
    os.close(reader)
    assert seen(written)[0] == "between" and seen(written)[1].startswith("x 100% 3/3 rows")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (205, "3:25 min"), (3805, "1:03:25 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (3.14159, "3.14"),
        (950.0, "950"),
        (12_345, "12,345"),
        (1_234_567, "1.23M"),
        (4.56e9, "4.56G"),
    ],
)
def test_amounts(value: float, text: str) -> None:
    assert amount(value) == text
