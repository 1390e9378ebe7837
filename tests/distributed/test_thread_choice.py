"""As many threads compute as are quickest beside other programs, and a run goes on with those that it began with."""

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.config.settings import BackendConfig
from distill.distributed import thread_choice
from distill.distributed.devices import choose_device
from distill.distributed.thread_choice import keep_threads, quickest


def machine(free: float) -> Callable[[int], float]:
    """Threads that wait for each other, on so many free cores: those without a core of their own slow down all."""
    return lambda threads: threads if threads <= free else 0.4 * threads


@pytest.mark.parametrize(
    ("most", "free", "chosen"), [(2, 2, 2), (2, 1, 1), (8, 8, 8), (8, 5, 4), (8, 2, 8), (8, 1, 8), (6, 3, 3), (2, 0, 2)]
)
def test_the_quickest_is_taken(most: int, free: float, chosen: int) -> None:
    assert quickest(most, machine(free)) == chosen


def test_a_difference_that_may_be_chance_takes_no_threads_away() -> None:
    rates = {4: 2.0, 2: 2.2, 1: 1.5}
    assert quickest(4, rates.__getitem__) == 4
    assert quickest(4, (rates | {2: 2.4}).__getitem__) == 2


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(thread_choice, "_rate", machine(1))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    yield monkeypatch
    torch.set_num_threads(before)


def test_a_busy_machine_is_said(two_threads: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "distill")
    choose_device(BackendConfig(device="cpu"), 0, 1)
    assert torch.get_num_threads() == 1 and "backend.threads=1: other programs are at work here" in caplog.text


def test_who_says_how_many_gets_them(two_threads: pytest.MonkeyPatch) -> None:
    choose_device(BackendConfig(device="cpu", threads=2), 0, 1)
    assert torch.get_num_threads() == 2
    two_threads.setenv("OMP_NUM_THREADS", "2")
    choose_device(BackendConfig(device="cpu"), 0, 1)
    assert torch.get_num_threads() == 2


def ranks(*others: int, local_size: int = 1) -> Any:
    """The ranks of a run as one of them sees them, of which the others have found so many threads."""
    return SimpleNamespace(local_size=local_size, barrier=lambda: None, gather=lambda own: [own, *others])


def test_a_run_goes_on_as_it_began(two_threads: pytest.MonkeyPatch) -> None:
    alone, shared = ranks(), ranks(local_size=2)
    recorded = keep_threads(BackendConfig(), {}, alone)
    assert recorded == {"threads": 2}
    torch.set_num_threads(1)
    assert keep_threads(BackendConfig(), recorded, alone) == {"threads": 2} and torch.get_num_threads() == 2
    assert keep_threads(BackendConfig(), {"threads": 64}, alone) == {"threads": 2}  # of a larger machine
    torch.set_num_threads(1)
    share = keep_threads(BackendConfig(), recorded, shared)
    assert share == {"threads": 1, "local_ranks": 2}, "the share of each of two"
    assert keep_threads(BackendConfig(), {"threads": 2, "local_ranks": 2}, shared)["threads"] == 2
    torch.set_num_threads(1)
    assert keep_threads(BackendConfig(threads=1), recorded, alone) == {"threads": 1}
    two_threads.setenv("OMP_NUM_THREADS", "1")
    assert keep_threads(BackendConfig(), recorded, alone) == {"threads": 1}


def test_all_ranks_begin_with_as_many_as_the_one_with_the_fewest(two_threads: pytest.MonkeyPatch) -> None:
    others = ranks(1, 2, local_size=2)
    recorded = keep_threads(BackendConfig(), {}, others)
    assert recorded == {"threads": 1, "local_ranks": 2} and torch.get_num_threads() == 1
    torch.set_num_threads(2)
    assert keep_threads(BackendConfig(threads=2), {}, others)["threads"] == 2, "who says how many gets them"
    assert keep_threads(BackendConfig(), recorded | {"threads": 2}, others)["threads"] == 2, "a resumed run began so"


def test_it_is_measured_in_a_second() -> None:
    code = (
        "import time, torch; torch.set_num_threads(2); from distill.distributed import thread_choice\n"
        "began = time.perf_counter(); thread_choice.use_quickest_threads()\n"
        "print(torch.get_num_threads(), time.perf_counter() - began < 60)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() in (["1", "True"], ["2", "True"])
