"""Ranks that do not come to an exchange are named by the lowest one that waits for them."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from distributed import run_ranks

from distill.config.settings import BackendConfig
from distill.distributed import build, roll_call


def late_rank(barrier: bool, stop: bool) -> str:
    """What rank 0 says while rank 1 comes late, to an exchange or a barrier, working or with its process halted."""
    roll_call.SIGN_OF_LIFE = 0.1
    backend = build(BackendConfig(name="ddp", device="cpu", threads=1, timeout=100.0))
    said: list[str] = []
    backend._roll_call._say = lambda missing, signs, waited: said.append(f"{sorted(missing)} {len(signs)}")
    backend.sum(torch.ones(1))
    # Only now, since on a busy machine a rank may come late to the first meeting.
    roll_call.FIRST, roll_call.SILENT = 0.6, 0.4
    if backend.rank == 1:
        time.sleep(0.5 if stop else 2.0)  # a halted one has given a sign of life before
        if stop and not os.fork():
            time.sleep(2.0)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        if stop:
            os.kill(os.getpid(), signal.SIGSTOP)
    backend.barrier() if barrier else backend.sum(torch.ones(1))
    backend.sum(torch.ones(1))
    return " ".join(said)


def late_start() -> str:
    """What rank 0 says while rank 1 has not come to the first meeting of all."""
    roll_call.FIRST, roll_call.SIGN_OF_LIFE, roll_call.SILENT = 0.6, 0.1, 0.4
    said: list[str] = []
    roll_call.RollCall._say = lambda self, missing, signs, waited: said.append(f"{sorted(missing)} {len(signs)}")  # type: ignore[method-assign]
    if os.environ["RANK"] == "1":
        time.sleep(2.0)
    build(BackendConfig(name="ddp", device="cpu", threads=1, timeout=100.0)).sum(torch.ones(1))
    return " ".join(said)


def test_a_rank_that_does_not_start_is_named(tmp_path: Path) -> None:
    assert run_ranks(2, tmp_path, late_start) == ["[1] 1", ""]


@pytest.mark.parametrize(("barrier", "stop", "named"), [(False, False, True), (True, False, False), (True, True, True)])
def test_a_rank_that_does_not_come_is_named_once(barrier: bool, stop: bool, named: bool, tmp_path: Path) -> None:
    said = run_ranks(2, tmp_path, late_rank, barrier, stop)
    assert said == ["[1] 2" if named else "", ""]
