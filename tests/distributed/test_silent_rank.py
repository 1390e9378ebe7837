"""At a barrier, however long it lasts, a rank that is stopped is named after `backend.timeout`; a slow one is not."""

import importlib.util
import os
import signal
import time
from pathlib import Path

import pytest
from distributed import run_ranks
from job import wait_for

from distill.config.settings import BackendConfig
from distill.distributed import RankLost, join_ranks

HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
TIMEOUT = 8.0  # seconds: a machine may stand still for some of them


def meet(name: str, silent: int | None, slow: int | None, folder: Path) -> tuple[str, float]:
    """What comes of a barrier for a rank, and the seconds it took; the other one wakes the silent rank afterwards."""
    ranks = join_ranks(BackendConfig(name=name, device="cpu", threads=1, timeout=TIMEOUT))
    ranks.barrier()
    began = time.monotonic()
    if silent is not None and ranks.rank != silent:
        (folder / "left").touch()
    if ranks.rank == slow:
        time.sleep(2.5 * TIMEOUT)
    if ranks.rank == silent:
        (folder / "silent").write_text(str(os.getpid()))
        wait_for((folder / "left").exists)  # the other one may still be at the barrier above
        os.kill(os.getpid(), signal.SIGSTOP)
        return "silent", 0.0
    outcome = "met"
    try:
        ranks.barrier()
    except RankLost as error:
        outcome = str(error)
    seconds = time.monotonic() - began
    if silent is None:
        ranks.close()
    else:
        os.kill(int((folder / "silent").read_text()), signal.SIGCONT)
    return outcome, seconds


@pytest.mark.parametrize(
    ("name", "silent", "words"),
    [
        ("ddp", 1, "rank 1 has not answered for 8 s (backend.timeout): its process is stopped"),
        pytest.param("fsdp", 1, "rank 1 has not answered for 8 s", marks=pytest.mark.slow),
        pytest.param(
            "ddp",
            0,
            "the store of the ranks, which rank 0 or its launcher holds, has not answered for 8 s",
            marks=pytest.mark.slow,
        ),
        pytest.param("horovod", 1, "another rank has ended or does not answer", marks=[HOROVOD, pytest.mark.slow]),
    ],
)
def test_a_stopped_rank_is_named(name: str, silent: int, words: str, tmp_path: Path) -> None:
    outcomes = run_ranks(2, tmp_path, meet, name, silent, None, tmp_path)
    outcome, seconds = outcomes[1 - silent]
    assert outcome.startswith(words)
    assert TIMEOUT <= seconds < 10 * TIMEOUT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", pytest.param("horovod", marks=HOROVOD)])
def test_a_rank_that_is_alive_may_take_longer_than_the_limit(name: str, tmp_path: Path) -> None:
    outcomes = run_ranks(3, tmp_path, meet, name, None, 1, tmp_path)
    assert [outcome for outcome, _ in outcomes] == ["met"] * 3
    assert all(seconds > 2 * TIMEOUT for _, seconds in outcomes)
