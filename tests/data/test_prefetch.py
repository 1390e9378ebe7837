"""Prefetch: windows in order whatever the threads do, more threads for slow storage, none more for computing."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from distill.data.prefetch import PERIOD, WINDOWS_AHEAD, Pace, Prefetch, ThreadCount, choose_threads

TESTS = Path(__file__).resolve().parent.parent


def pace(step: float, prepared: float, computed: float, threads: int, windows: int = 8) -> Pace:
    """A loop that computes `step` seconds on a window, with threads that hinder each other in computing alone."""
    result = Pace()
    for _ in range(windows):
        loop = max(step, prepared / threads, computed)
        result.add(loop, loop - step, prepared, computed)
    return result


CHOICES = [
    # seconds of step, preparation, computing in it; threads; most -> threads
    (0.07, 0.64, 0.01, 1, 16, 12),  # one window a step takes 9.1, and a quarter more are to spare
    (0.01, 0.64, 0.01, 1, 16, 16),  # the most
    (0.01, 0.64, 0.01, 4, 6, 6),
    (0.05, 0.06, 0.02, 1, 16, 2),
    (0.05, 0.04, 0.01, 1, 16, 1),  # the loop does not wait
    (0.001, 0.02, 0.02, 1, 16, 1),  # computing alone
    (0.001, 0.08, 0.02, 4, 16, 4),  # computing in turns
    (0.001, 0.10, 0.02, 1, 16, 5),  # one thread computes while four wait
    (0.05, 0.64, 0.01, 16, 16, 16),
    (0.05, 0.64, 0.01, 4, 4, 4),
]


@pytest.mark.parametrize(("step", "prepared", "computed", "threads", "most", "expected"), CHOICES)
def test_choice(step: float, prepared: float, computed: float, threads: int, most: int, expected: int) -> None:
    assert choose_threads(pace(step, prepared, computed, threads), threads, most) == expected


def test_a_loop_that_still_waits_gets_one_more_thread() -> None:
    uneven = Pace(windows=10, loop=1.0, waited=0.2, prepared=0.8 * 4, computed=0.1)
    assert choose_threads(uneven, 4, 16) == 5
    assert choose_threads(Pace(windows=10, loop=1.0, waited=0.04, prepared=3.2, computed=0.1), 4, 16) == 4


def follow(count: ThreadCount, windows: int, step: float, wait: float, computed: float, line: float = 0.0) -> list[int]:
    """The numbers of threads over windows that wait so long for storage, of which all threads get one in `line`."""
    numbers = []
    for _ in range(windows):
        loop = max(step, (wait + computed) / count.threads, computed, line)
        count.note(loop, loop - step, max(wait + computed, line * count.threads), computed)
        numbers.append(count.threads)
    return numbers


def test_threads_are_added_while_storage_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "distill")
    numbers = follow(ThreadCount(1, 16), 100, 0.07, 0.63, 0.01)
    assert numbers[:PERIOD] == [1] * PERIOD and set(numbers[PERIOD:]) == {12}
    assert [record.message for record in caplog.records] == [
        "batches wait for storage: 12 threads now prepare them, instead of 1"
    ]


def test_a_number_that_was_given_stays() -> None:
    assert set(follow(ThreadCount(2, 2), 100, 0.001, 0.63, 0.01)) == {2}


def test_threads_that_help_nothing_are_given_up_for_good(caplog: pytest.LogCaptureFixture) -> None:
    """A full line, which gives a window in 0.1 seconds however many read."""
    caplog.set_level("INFO", "distill")
    numbers = follow(ThreadCount(2, 16), 200, 0.05, 0.15, 0.001, line=0.1)
    assert max(numbers) > 2 and set(numbers[60:]) == {2}
    assert [record.message for record in caplog.records][1:] == [
        f"batches wait as long with {max(numbers)} threads as with 2: back to 2"
    ]


def test_windows_come_in_order_while_threads_are_added() -> None:
    """Storage that is slow and uneven; no more windows are ahead than threads may be."""
    lock, under_way, most_under_way, taken, farthest = threading.Lock(), 0, 0, 0, 0

    def prepare(step: int) -> int:
        nonlocal under_way, most_under_way, farthest
        with lock:
            under_way += 1
            most_under_way, farthest = max(most_under_way, under_way), max(farthest, step - taken)
        time.sleep(0.01 + 0.03 * (step % 3))
        with lock:
            under_way -= 1
        return step

    count = ThreadCount(1, 6)
    for window in Prefetch(prepare, range(5, 125), count):
        assert window == 5 + taken
        taken += 1
    assert taken == 120 and 1 < count.threads == most_under_way <= 6
    assert farthest <= 5 + max(WINDOWS_AHEAD, 6)


def spin(step: int) -> int:
    end = time.thread_time() + 0.01
    while time.thread_time() < end:
        pass
    return step


@pytest.mark.parametrize("threads", [1, 2])
def test_preparation_that_computes_gets_no_more_threads(threads: int) -> None:
    """Here the loop does nothing but wait."""
    count = ThreadCount(threads, 16)
    assert list(Prefetch(spin, range(60), count)) == list(range(60))
    assert count.threads == threads


def test_leaving_early_prepares_no_further_windows() -> None:
    begun = []

    def prepare(step: int) -> int:
        begun.append(step)
        time.sleep(0.02)
        return step

    windows = iter(Prefetch(prepare, range(10**9), ThreadCount(1, 1)))
    assert next(windows) == 0
    windows.close()  # type: ignore[attr-defined]
    assert begun in ([0], [0, 1])


SLOW_ROWS = """
import logging, sys
from dataclasses import replace
import numpy as np, torch, tiny
from slow_pages import SlowPages
from distill.data.batches import Threads

logging.basicConfig(level=logging.INFO)
rows = tiny.make_rows(400)
try:
    slow = SlowPages(rows, 0.005)
except OSError as error:
    sys.exit(f"skipped: {error}")
batches = tiny.make_batches(rows, tiny.make_masks(tiny.make_tokenizer(), rows), 4, 1, seed=3)
late = replace(batches, sequences=slow.rows, threads=Threads(1, 8))
for step, (window,) in enumerate(late.stream(7, 100, torch.device("cpu")), 7):
    (expected,) = batches.window(step)
    assert torch.equal(window.ids, expected.ids) and np.array_equal(window.row_ids, expected.row_ids)
    assert all(torch.equal(a, b) for a, b in zip(window.targets, expected.targets))
assert step == 99 and slow.reads == 4 * 93
"""


@pytest.mark.slow
def test_page_faults_leave_python_to_others_and_are_met_by_threads() -> None:
    """Sequences of a memory map whose pages come late: had a fault kept Python's lock, nobody could bring the page."""
    path = {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", SLOW_ROWS], capture_output=True, text=True, timeout=100, env=path)
    if done.stderr.startswith("skipped"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert "batches wait for storage: " in done.stderr
