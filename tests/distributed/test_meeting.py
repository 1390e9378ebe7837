"""Which rank a process is, its device and threads, and ranks that cannot meet or stop answering: one line, in time."""

import importlib.util
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import free_port, run_ranks
from forked import Forked
from job import environment, wait_for
from torch.distributed import TCPStore

from distill.config.settings import BackendConfig
from distill.distributed import RankLost, ddp, fsdp, join_ranks
from distill.distributed.ddp import Ddp
from distill.distributed.devices import choose_device, keep_threads
from distill.distributed.fsdp import Fsdp
from distill.distributed.launch import should_launch
from distill.distributed.rendezvous import first_host, meeting_point, open_store, wait_for_all
from distill.runtime.errors import SettingError
from distill.runtime.rank import RankInfo, rank_from_env

HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
TIMEOUT = 1.0  # seconds, for what does not come
LONG = 60.0  # for what does, on a busy machine


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


# --- the numbers of a rank


def numbered(names: str, *values: object, **more: str) -> dict[str, str]:
    return dict(zip(names.split(), map(str, values), strict=True)) | more


TORCHRUN = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
SLURM = "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_NODEID SLURM_STEP_TASKS_PER_NODE"
MPI = "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE"
HOROVODRUN = "HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE"


@pytest.mark.parametrize(
    ("variables", "info"),
    [
        ({}, None),
        (numbered(TORCHRUN, 3, 4, 1, 2), RankInfo("torchrun", 3, 4, 1, 2)),
        (numbered("RANK WORLD_SIZE", 3, 4), RankInfo("torchrun", 3, 4, 0, 1)),
        (numbered(HOROVODRUN, 1, 2, 1, 2), RankInfo("horovodrun", 1, 2, 1, 2)),
        (numbered(SLURM, 17, 20, 1, 2, "8(x2),4"), RankInfo("Slurm", 17, 20, 1, 4)),
        (numbered("SLURM_PROCID SLURM_NTASKS", 0, 20), None),  # the shell of a batch script
        (numbered(MPI, 5, 8, 1, 4), RankInfo("Open MPI", 5, 8, 1, 4)),
        (numbered("PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS", 5, 8, 1, 4), RankInfo("MPI", 5, 8, 1, 4)),
    ],
)
def test_ranks_of_all_launchers(variables: dict[str, str], info: RankInfo | None) -> None:
    assert rank_from_env(variables) == info


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (numbered("RANK WORLD_SIZE", 0, "two"), "WORLD_SIZE=two: a launcher of ranks sets it to a number from 1 to"),
        (numbered("RANK WORLD_SIZE", 0, 0), "WORLD_SIZE=0: "),
        (numbered("RANK WORLD_SIZE", 2, 2), "RANK=2: a launcher of ranks sets it to a number from 0 to 1;"),
        (numbered("RANK WORLD_SIZE", -1, 2), "RANK=-1: "),
        (numbered("RANK WORLD_SIZE", 0, "9" * 5000), "WORLD_SIZE=999"),
        (numbered("HOROVOD_RANK HOROVOD_SIZE", "", 2), "HOROVOD_RANK=: "),
        (numbered("RANK WORLD_SIZE LOCAL_RANK", 0, 2, "x"), "LOCAL_RANK=x"),
        (numbered("RANK WORLD_SIZE", 1, 2, MASTER_PORT="70000", MASTER_ADDR="a"), "MASTER_PORT=70000"),
        (numbered("RANK WORLD_SIZE", 1, 2, MASTER_PORT="0", MASTER_ADDR="a"), "MASTER_PORT=0"),
        (numbered(MPI, 0, 8, 0, 4), "backend: Open MPI gives no meeting point; set MASTER_ADDR"),
    ],
)
def test_numbers_that_no_launcher_gives(variables: dict[str, str], words: str) -> None:
    with pytest.raises(SettingError, match=f"^{words}"):
        info = rank_from_env(variables)
        assert info is not None
        meeting_point(info, variables)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK"])
def test_half_of_the_numbers_are_no_run_of_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingError, match=f"^{name}=1 without "):
        should_launch(BackendConfig(name="ddp", device="cpu"))
    assert not should_launch(BackendConfig(name="single"))


def test_meeting_points() -> None:
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "gpu[03-07,9],login"}
    address, port = meeting_point(RankInfo("Slurm", 0, 8, 0, 4), slurm)
    assert address == "gpu03" and 20_000 <= port < 32_000
    assert (address, port) == meeting_point(RankInfo("Slurm", 7, 8, 3, 4), slurm)
    given = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert meeting_point(RankInfo("Open MPI", 0, 8, 0, 4), given) == ("head", 1234)
    assert meeting_point(RankInfo("Open MPI", 0, 4, 0, 4), {})[0] == "127.0.0.1"
    nodes = {"a": "a", "a,b": "a", "n[1-3]": "n1", "n[07,9]-ib,x": "n07-ib", "c2-d[1,2]": "c2-d1"}
    assert {each: first_host(each) for each in nodes} == nodes


# --- its device and its threads


def test_a_rank_that_sees_its_own_gpu_alone_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `srun --gpus-per-task=1`; without that variable one GPU is too few for two ranks."""
    for name, value in {"is_available": True, "device_count": 1, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    settings = BackendConfig(device="cuda", threads=torch.get_num_threads())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert choose_device(settings, 1, 2) == torch.device("cuda", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(SettingError, match=r"2 ranks on this host, but torch sees 1 GPU here"):
        choose_device(settings, 1, 2)


@pytest.mark.parametrize(("backend", "waits"), [(Ddp, "1"), (Fsdp, None)])
def test_a_lost_rank_is_an_error_under_nccl_and_no_abort(
    backend: type[Ddp], waits: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a GPU each that are not there: what torch reads when it makes their group."""
    for name, value in numbered(TORCHRUN, 0, 2, 0, 2, TORCH_NCCL_BLOCKING_WAIT="").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")  # so that what is set is taken back
    for name in ("open_store", "wait_for_all", "Heartbeat", "TorchRings"):
        monkeypatch.setattr(ddp, name, lambda *_, **__: None)
    monkeypatch.setattr(ddp, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(fsdp, "init_device_mesh", lambda *_: SimpleNamespace(get_all_groups=list))
    joined: list[str | None] = []
    monkeypatch.setattr(backend, "_join", lambda *_: joined.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT")))
    backend(BackendConfig(name=backend.name))
    assert joined == [waits]


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    yield monkeypatch
    torch.set_num_threads(before)


@pytest.mark.parametrize(("threads", "local_size", "expected"), [(None, 1, 2), (None, 2, 1), (2, 2, 2), (1, 1, 1)])
def test_the_ranks_of_a_host_share_its_cores(
    two_cores: pytest.MonkeyPatch, threads: int | None, local_size: int, expected: int
) -> None:
    torch.set_num_threads(2)
    choose_device(BackendConfig(device="cpu", threads=threads), 0, local_size)
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize(
    ("here", "set_to", "recorded", "others", "local_size", "kept"),
    [
        (2, None, {}, (), 1, 2),
        (1, None, {"threads": 2}, (), 1, 2),  # as the run began
        (2, None, {"threads": 64}, (), 1, 2),  # of a larger machine
        (1, None, {"threads": 2}, (), 2, 1),  # the share of each of two
        (1, None, {"threads": 2, "local_ranks": 2}, (), 2, 2),
        (1, 1, {"threads": 2}, (), 1, 1),  # who sets how many gets them
        (2, None, {}, (1, 2), 2, 1),  # as the rank with the fewest
        (2, 2, {}, (1, 2), 2, 2),
        (2, None, {"threads": 2, "local_ranks": 2}, (1, 2), 2, 2),
    ],
)
def test_a_run_goes_on_with_the_threads_that_it_began_with(
    two_cores: pytest.MonkeyPatch, here: int, set_to: int | None, recorded: dict[str, int], others: tuple[int, ...],
    local_size: int, kept: int,
) -> None:  # fmt: skip
    ranks: Any = SimpleNamespace(local_size=local_size, barrier=lambda: None, gather=lambda own: [own, *others])
    torch.set_num_threads(here)
    found = keep_threads(BackendConfig(threads=set_to), recorded, ranks)
    assert found == {"threads": kept} | ({"local_ranks": local_size} if local_size > 1 else {})
    assert torch.get_num_threads() == kept
    if not others and set_to is None:
        two_cores.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(here)
        assert keep_threads(BackendConfig(), recorded, ranks)["threads"] == here


# --- ranks that cannot meet


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
    with pytest.raises(SettingError, match=r"^MASTER_ADDR=nowhere\.example: Name or service not known for 1 s"):
        meet(monkeypatch, "nowhere.example", 29500, rank)


def test_a_rank_0_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with pytest.raises(RankLost, match=rf"^rank 0 does not answer at 127\.0\.0\.1:{port} .*refused for 1 s"):
        meet(monkeypatch, "127.0.0.1", port, rank=1)


def test_a_port_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingError, match=rf"^MASTER_PORT={port} is in use on this host"):
            meet(monkeypatch, "127.0.0.1", port, rank=0)
        with pytest.raises(RankLost, match=r"MASTER_PORT\): no store of ranks answered for 1 s"):
            meet(monkeypatch, "127.0.0.1", port, rank=1)
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
    first, second = (RankInfo("torchrun", rank, 3, rank, 3) for rank in (0, 1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_all, stores[1], second, 4 * TIMEOUT)
        wait_for(lambda: stores[0].check(["met/1"]))
        for wait, limit in ((partial(wait_for_all, stores[0], first, TIMEOUT), 1), (waiting.result, 4)):
            with pytest.raises(RankLost, match=rf"^1 of 3 ranks have not joined within {limit} s: rank 2; find out"):
                wait()


def test_a_second_run_of_the_same_processes_finds_nothing_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, whose own process holds the store for as long as the program lives."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    port = free_port()
    agent = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    first = meet(monkeypatch, "127.0.0.1", port, 0, timeout=LONG)
    first.set("met", "2")
    second = meet(monkeypatch, "127.0.0.1", port, 0, timeout=LONG)
    assert first.check(["met"]) and not second.check(["met"]) and agent.num_keys() > 0


@HOROVOD
def test_a_launcher_of_horovod_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod itself would abort."""
    for name, value in numbered("HOROVOD_RANK HOROVOD_SIZE HOROVOD_GLOO_RENDEZVOUS_PORT", 0, 2, 1).items():
        monkeypatch.setenv(name, value)
    settings = BackendConfig(name="horovod", device="cpu", threads=1, timeout=TIMEOUT)
    with pytest.raises(SettingError, match=r"^HOROVOD_RANK=0 without HOROVOD_GLOO_RENDEZVOUS_ADDR and"):
        join_ranks(settings)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    with pytest.raises(RankLost, match=r"^rank 0 does not answer at 127\.0\.0\.1:1 \(HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        join_ranks(settings)


def test_the_command_ends_in_one_line(tmp_path: Path) -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = ["+recipe=smoke", "backend=ddp", "backend.timeout=1", "backend.device=cpu"]
    job = Forked([*settings, f"hydra.run.dir={tmp_path / 'run'}"], environment() | rank)
    _, errors = job.communicate(timeout=500)
    lines = errors + "".join(path.read_text() for path in (tmp_path / "run").glob("logs/*.log"))
    assert job.returncode == 4 and lines.count("\n") == 1, lines
    assert lines.startswith("distill: rank 0 does not answer at 127.0.0.1:")
    assert not (tmp_path / "run" / "results.json").exists()


# --- at a barrier, however long it lasts, a rank that is stopped is named after `backend.timeout`; a slow one is not

SILENCE = 8.0  # seconds: a machine may stand still for some of them


def barrier(name: str, silent: int | None, slow: int | None, folder: Path) -> tuple[str, float]:
    """What comes of a barrier for a rank, and the seconds it took; the other one wakes the silent rank afterwards."""
    ranks = join_ranks(BackendConfig(name=name, device="cpu", threads=1, timeout=SILENCE))
    ranks.barrier()
    began, outcome = time.monotonic(), "met"
    if ranks.rank == slow:
        time.sleep(2.5 * SILENCE)
    if ranks.rank == silent:
        (folder / "silent").write_text(str(os.getpid()))
        wait_for((folder / "left").exists)  # the other one may still be at the barrier above
        os.kill(os.getpid(), signal.SIGSTOP)
        return "silent", 0.0
    (folder / "left").touch()
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
        pytest.param("ddp", 0, "the store of the ranks, which rank 0 or its launcher", marks=pytest.mark.slow),
        pytest.param("horovod", 1, "another rank has ended or does not answer", marks=[HOROVOD, pytest.mark.slow]),
    ],
)
def test_a_stopped_rank_is_named(name: str, silent: int, words: str, tmp_path: Path) -> None:
    outcome, seconds = run_ranks(2, tmp_path, barrier, name, silent, None, tmp_path)[1 - silent]
    assert outcome.startswith(words)
    assert seconds < 10 * SILENCE and (name == "horovod" or seconds >= SILENCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", pytest.param("horovod", marks=HOROVOD)])
def test_a_rank_that_is_alive_may_take_longer_than_the_limit(name: str, tmp_path: Path) -> None:
    outcomes = run_ranks(3, tmp_path, barrier, name, None, 1, tmp_path)
    assert [outcome for outcome, _ in outcomes] == ["met"] * 3
    assert all(seconds > 2 * SILENCE for _, seconds in outcomes)
