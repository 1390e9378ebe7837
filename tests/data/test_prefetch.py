"""Prefetch: windows in order whatever the threads do, few of them ahead, none after the loop has left."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distill.data import prefetch as module
from distill.data.prefetch import WINDOWS_AHEAD, prefetch

TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("threads", [0, 1, 6])
def test_windows_come_in_order_and_few_are_ahead(threads: int) -> None:
    """Storage that is slow and uneven."""
    lock, under_way, most_under_way, taken, farthest = threading.Lock(), 0, 0, 0, 0
    all_at_work = threading.Barrier(max(threads, 1), timeout=60)  # a thread of a busy machine may come late

    def prepare(step: int) -> int:
        nonlocal under_way, most_under_way, farthest
        with lock:
            under_way += 1
            most_under_way, farthest = max(most_under_way, under_way), max(farthest, step - taken)
        if step < 5 + all_at_work.parties:
            all_at_work.wait()
        time.sleep(0.001 + 0.003 * (step % 3))
        with lock:
            under_way -= 1
        return step

    for window in prefetch(prepare, range(5, 65), threads):
        assert window == 5 + taken
        taken += 1
    assert taken == 60 and most_under_way == max(threads, 1)
    assert farthest <= 5 + max(WINDOWS_AHEAD, threads)


def test_leaving_early_prepares_no_further_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window that is under way when the loop leaves comes after it has cancelled the others."""
    begun, cancelled = list[int](), threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(False, cancel_futures=cancel_futures)
            cancelled.set()
            super().shutdown(wait)

    def prepare(step: int) -> int:
        begun.append(step)
        assert step == 0 or cancelled.wait(60)
        return step

    monkeypatch.setattr(module, "ThreadPoolExecutor", Pool)
    windows = iter(prefetch(prepare, range(10**9), 1))
    assert next(windows) == 0
    windows.close()  # type: ignore[attr-defined]
    assert begun in ([0], [0, 1])


SLOW_ROWS = """
import sys
from dataclasses import replace
import numpy as np, torch, tiny
from slow_pages import SlowPages

rows = tiny.make_rows(400)
try:
    slow = SlowPages(rows, 0.005)
except OSError as error:
    sys.exit(f"skipped: {error}")
batches = tiny.make_batches(rows, tiny.make_masks(tiny.make_tokenizer(), rows), 4, 1, seed=3)
late = replace(batches, sequences=slow.rows, threads=8)
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
    done = subprocess.run([sys.executable, "-c", SLOW_ROWS], capture_output=True, text=True, timeout=500, env=path)
    if done.stderr.startswith("skipped"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
