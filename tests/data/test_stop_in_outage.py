"""A signal ends the waiting for storage that is out of order within a second, wherever a process waits for it."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored import Faulty, folder_of_files, open_rows, write_shards

from distill.config.settings import DataConfig
from distill.data import remote
from distill.data.batches import prefetch
from distill.data.disk_cache import workers
from distill.data.remote import retried
from distill.runtime.errors import Interrupted
from distill.runtime.signals import handled

SOON = 25.0  # seconds: a second, on a machine that may be busy with something else; else all would wait for 30
AFTER = 0.3  # seconds until the signal comes


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pause takes its longest."""
    monkeypatch.setattr(remote.random, "uniform", lambda low, high: 30.0)


@contextmanager
def ends_soon_after_a_signal() -> Iterator[None]:
    timer = threading.Timer(AFTER, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    begun = time.monotonic()
    yield
    assert AFTER * 0.9 < time.monotonic() - begun < AFTER + SOON
    timer.join()


def out_of_order() -> Any:
    raise OSError("503")


def test_another_thread_gives_up_and_keeps_the_status() -> None:
    """The main thread has put off acting on signals, as the training loop has."""
    found: list[BaseException] = []

    def ask() -> None:
        try:
            retried(out_of_order, "s3://a/b")
        except BaseException as error:
            found.append(error)

    with pytest.raises(Interrupted), handled() as signals, signals.deferred(), ends_soon_after_a_signal():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert isinstance(found[0], Interrupted) and found[0].status == 143


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_loop_ends_with_the_step_under_way(tmp_path: Path, threads: int) -> None:
    """Storage that refuses all, sequences that are not in the cache: the loop gets no window, the signal is kept."""
    pytest.importorskip("aiohttp")
    write_shards(tmp_path / "s", np.arange(3200, dtype=np.uint16).reshape(200, 16), 10)
    server = Faulty(folder_of_files(tmp_path / "s"))
    with server.serving() as url:
        store = open_rows(url, DataConfig(cache=str(tmp_path / "c"), local_bytes=1 << 20, shuffle_bytes=100))
        first = store[np.arange(10)]
        server.share = 1.0

        def prepare(step: int) -> np.ndarray:
            return store[np.arange(10 * step, 10 * step + 10)]

        windows = prefetch(prepare, range(9), threads)
        with pytest.raises(Interrupted) as error, handled() as signals, signals.deferred():
            np.testing.assert_array_equal(next(windows), first)
            with ends_soon_after_a_signal():
                assert next(windows, None) is None
            assert signals.requests()[0] == 1
        assert error.value.status == 143


@pytest.mark.parametrize("threads", [0, 1])
def test_outside_of_the_loop_a_signal_raises(threads: int) -> None:
    """As while the first window is waited for: it must not be taken for the end of the run."""

    def prepare(step: int) -> int:
        time.sleep(0.6)
        return retried(out_of_order, "s3://a/b")

    with pytest.raises(Interrupted), handled(), ends_soon_after_a_signal():
        next(prefetch(prepare, range(2), threads), None)
        pytest.fail("went on")


def test_a_request_without_an_answer_is_given_up(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    write_shards(tmp_path / "s", np.arange(3200, dtype=np.uint16).reshape(200, 16), 10)
    server = Faulty(folder_of_files(tmp_path / "s"))
    with server.serving() as url:
        store = open_rows(url, DataConfig(cache=str(tmp_path / "c"), local_bytes=1 << 20, shuffle_bytes=100))
        server.rate = 1.0  # byte a second
        with pytest.raises(Interrupted), handled(), ends_soon_after_a_signal():
            store[np.array([150])]


def test_processes_that_prepare_text_end_in_the_middle_of_it() -> None:
    """Each would sleep for a minute."""
    with pytest.raises(Interrupted), handled(), ends_soon_after_a_signal(), workers(DataConfig(workers=2)) as pool:
        assert pool is not None
        list(pool.map(time.sleep, [60, 60]))
