"""Ranks that cannot meet: one line, the right status, in bounded time, and no run of one process in their place."""

import importlib.util
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from distributed import free_port
from forked import Forked
from job import environment, wait_for
from torch.distributed import TCPStore

from distill.config.settings import BackendConfig
from distill.distributed import RankLost, join_ranks
from distill.distributed.launch import should_launch
from distill.distributed.rendezvous import meeting_point, open_store, wait_for_all
from distill.runtime.errors import SettingError
from distill.runtime.rank import RankInfo, rank_from_env

TIMEOUT = 1.0  # seconds, for what does not come
LONG = 60.0  # for what does, on a busy machine


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def meet(
    monkeypatch: pytest.MonkeyPatch, address: str, port: int, rank: int, size: int = 2, timeout: float = TIMEOUT
) -> Any:
    """What a rank gets that comes to this address; the store is what lives on."""
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    return open_store(RankInfo("torchrun", rank, size, rank, size), timeout, "test")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_that_does_not_exist(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    began = time.monotonic()
    with pytest.raises(SettingError, match=r"^MASTER_ADDR=nowhere\.example: Name or service not known for 1 s"):
        meet(monkeypatch, "nowhere.example", 29500, rank)
    assert time.monotonic() - began < 60


def test_a_rank_0_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with pytest.raises(RankLost, match=rf"^rank 0 does not answer at 127\.0\.0\.1:{port} .*refused for 1 s"):
        meet(monkeypatch, "127.0.0.1", port, rank=1)


def test_a_port_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingError, match=rf"^MASTER_PORT={port} is in use on this host"):
            meet(monkeypatch, "127.0.0.1", port, rank=0)
        began = time.monotonic()
        with pytest.raises(RankLost, match=r"MASTER_PORT\): no store of ranks answered for 1 s"):
            meet(monkeypatch, "127.0.0.1", port, rank=1)
        assert time.monotonic() - began < 60
        # It still waits for the silent server, and the end of this process does not wait for it.
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "rendezvous")
        assert not any(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate())


def test_ranks_of_the_same_or_of_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    stores = [meet(monkeypatch, "127.0.0.1", port, rank, 3, LONG) for rank in (0, 1)]
    with pytest.raises(SettingError, match=r"^RANK=1: another process is this rank"):
        meet(monkeypatch, "127.0.0.1", port, 1, 3, LONG)
    with pytest.raises(SettingError, match=r"^WORLD_SIZE=4: another rank has WORLD_SIZE=3"):
        meet(monkeypatch, "127.0.0.1", port, 2, 4, LONG)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_all, stores[1], info(1), 4 * TIMEOUT)
        wait_for(lambda: stores[0].check(["met/1"]))
        for wait, limit in ((lambda: wait_for_all(stores[0], info(0), TIMEOUT), 1), (waiting.result, 4)):
            with pytest.raises(RankLost, match=rf"^1 of 3 ranks have not joined within {limit} s: rank 2; find out"):
                wait()


def info(rank: int) -> RankInfo:
    return RankInfo("torchrun", rank, 3, rank, 3)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE=two: a launcher of ranks sets it to a number from 1 to"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: a launcher"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: a launcher of ranks sets it to a number from 0 to 1;"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1: a launcher"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE=999"),
        ({"HOROVOD_RANK": "", "HOROVOD_SIZE": "2"}, "HOROVOD_RANK=: a launcher"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK=x"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "70000", "MASTER_ADDR": "a"}, "MASTER_PORT=70000"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "0", "MASTER_ADDR": "a"}, "MASTER_PORT=0"),
    ],
)
def test_numbers_that_no_launcher_gives(variables: dict[str, str], words: str) -> None:
    with pytest.raises(SettingError, match=f"^{words}"):
        numbered = rank_from_env(variables)
        assert numbered is not None
        meeting_point(numbered, variables)


HOROVODRUN = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_a_launcher_of_horovod_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod itself would abort."""
    for name, value in HOROVODRUN.items():
        monkeypatch.setenv(name, value)
    settings = BackendConfig(name="horovod", device="cpu", threads=1, timeout=TIMEOUT)
    with pytest.raises(SettingError, match=r"^HOROVOD_RANK=0 without HOROVOD_GLOO_RENDEZVOUS_ADDR and"):
        join_ranks(settings)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    with pytest.raises(
        RankLost, match=r"^rank 0 does not answer at 127\.0\.0\.1:1 \(HOROVOD_GLOO_RENDEZVOUS_ADDR, .* refused"
    ):
        join_ranks(settings)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK"])
def test_half_of_the_numbers_are_no_run_of_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingError, match=f"^{name}=1 without .*: a launcher of ranks sets both"):
        should_launch(BackendConfig(name="ddp", device="cpu"))
    assert not should_launch(BackendConfig(name="single"))


@pytest.mark.parametrize(
    ("variables", "status", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "x"}, 2, "WORLD_SIZE=x: a launcher"),
        ({"WORLD_SIZE": "2"}, 2, "WORLD_SIZE=2 without RANK"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 4, "rank 0 does not answer at 127.0.0.1:"),
    ],
)
def test_the_command_ends_in_one_line(variables: dict[str, str], status: int, words: str, tmp_path: Path) -> None:
    settings = ["+recipe=smoke", "backend=ddp", "backend.timeout=1", "backend.device=cpu"]
    port = {"MASTER_PORT": str(free_port())}
    job = Forked([*settings, f"hydra.run.dir={tmp_path / 'run'}"], environment() | port | variables)
    _, errors = job.communicate(timeout=500)
    lines = errors + "".join(path.read_text() for path in (tmp_path / "run").glob("logs/*.log"))
    assert job.returncode == status and lines.startswith(f"distill: {words}") and lines.count("\n") == 1, lines
    assert not (tmp_path / "run" / "results.json").exists()


def test_a_second_run_of_the_same_processes_finds_nothing_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, whose own process holds the store for as long as the program lives."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    port = free_port()
    agent = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    first = meet(monkeypatch, "127.0.0.1", port, 0, timeout=LONG)
    first.set("met", "2")
    second = meet(monkeypatch, "127.0.0.1", port, 0, timeout=LONG)
    assert first.check(["met"]) and not second.check(["met"]) and agent.num_keys() > 0
