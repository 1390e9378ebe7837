"""Which rank a process is, and where ranks meet."""

import os

import pytest
import torch

from distill.config.settings import BackendConfig
from distill.distributed import ddp, fsdp
from distill.distributed.ddp import Ddp
from distill.distributed.devices import choose_device
from distill.distributed.fsdp import Fsdp
from distill.distributed.rendezvous import first_host, meeting_point
from distill.runtime.errors import SettingError
from distill.runtime.rank import RankInfo, rank_from_env

RANKS = [
    ({}, None),
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, RankInfo("torchrun", 3, 4, 1, 2)),
    ({"RANK": "3", "WORLD_SIZE": "4"}, RankInfo("torchrun", 3, 4, 0, 1)),
    (
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"},
        RankInfo("horovodrun", 1, 2, 1, 2),
    ),
    (
        {
            "SLURM_PROCID": "17",
            "SLURM_STEP_NUM_TASKS": "20",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "2",
            "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
        },
        RankInfo("Slurm", 17, 20, 1, 4),
    ),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "20"}, None),  # the shell of a batch script
    (
        {
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        },
        RankInfo("Open MPI", 5, 8, 1, 4),
    ),
    ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, RankInfo("MPI", 5, 8, 1, 4)),
]


@pytest.mark.parametrize(("environment", "info"), RANKS)
def test_ranks_of_all_launchers(environment: dict[str, str], info: RankInfo | None) -> None:
    assert rank_from_env(environment) == info


def test_meeting_points() -> None:
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "gpu[03-07,9],login"}
    address, port = meeting_point(RankInfo("Slurm", 0, 8, 0, 4), slurm)
    assert address == "gpu03" and 20_000 <= port < 32_000
    assert (address, port) == meeting_point(RankInfo("Slurm", 7, 8, 3, 4), slurm)
    said = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert meeting_point(RankInfo("Open MPI", 0, 8, 0, 4), said) == ("head", 1234)
    assert meeting_point(RankInfo("Open MPI", 0, 4, 0, 4), {})[0] == "127.0.0.1"
    with pytest.raises(SettingError, match="MASTER_ADDR"):
        meeting_point(RankInfo("Open MPI", 0, 8, 0, 4), {})


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[07,9]-ib,x", "n07-ib"), ("c2-d[1,2]", "c2-d1")]
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


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
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "")  # so that what is set is taken back
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    for name in ("open_store", "wait_for_all", "Heartbeat", "TorchRings"):
        monkeypatch.setattr(ddp, name, lambda *_, **__: None)
    monkeypatch.setattr(ddp, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(fsdp, "init_device_mesh", lambda *_: None)
    joined: list[str | None] = []
    monkeypatch.setattr(backend, "_join", lambda *_: joined.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT")))
    backend(BackendConfig(name=backend.name))
    assert joined == [waits]
