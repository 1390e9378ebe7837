"""The ranks of a host share its cores, and a run resumes with the number of threads that it began with."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.config.settings import BackendConfig
from distill.distributed.devices import choose_device, keep_threads


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    yield monkeypatch
    torch.set_num_threads(before)


@pytest.mark.parametrize(("threads", "local_size", "expected"), [(None, 1, 2), (None, 2, 1), (2, 2, 2), (1, 1, 1)])
def test_the_ranks_of_a_host_share_its_cores(
    two_cores: pytest.MonkeyPatch, threads: int | None, local_size: int, expected: int
) -> None:
    choose_device(BackendConfig(device="cpu", threads=threads), 0, local_size)
    assert torch.get_num_threads() == expected


def ranks(*others: int, local_size: int = 1) -> Any:
    """The ranks of a run as one of them sees them, of which the others have found so many threads."""
    return SimpleNamespace(local_size=local_size, barrier=lambda: None, gather=lambda own: [own, *others])


def test_a_run_goes_on_as_it_began(two_cores: pytest.MonkeyPatch) -> None:
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
    two_cores.setenv("OMP_NUM_THREADS", "1")
    assert keep_threads(BackendConfig(), recorded, alone) == {"threads": 1}


def test_all_ranks_begin_with_as_many_as_the_one_with_the_fewest(two_cores: pytest.MonkeyPatch) -> None:
    others = ranks(1, 2, local_size=2)
    recorded = keep_threads(BackendConfig(), {}, others)
    assert recorded == {"threads": 1, "local_ranks": 2} and torch.get_num_threads() == 1
    torch.set_num_threads(2)
    assert keep_threads(BackendConfig(threads=2), {}, others)["threads"] == 2, "who says how many gets them"
    assert keep_threads(BackendConfig(), recorded | {"threads": 2}, others)["threads"] == 2, "a resumed run began so"
