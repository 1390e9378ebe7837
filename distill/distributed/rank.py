"""Which rank this process is: the environments of torchrun, horovodrun, Slurm and MPI."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

# Per launcher: the variables of rank, size, local rank and local size.
VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # Only inside `srun`: the shell of a batch script has a rank too, yet it is no worker. The number of tasks
    # on this node is part of a list.
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}

BY_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun alone, and not where its other variables are


@dataclass(frozen=True)
class RankInfo:
    """This process among the ranks of a run; `launcher` is what started them."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def rank_from_env(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """This process as a launcher has numbered it; None when it was started by hand."""
    for launcher, (rank, size, local_rank, local_size) in VARIABLES.items():
        if rank not in environment or size not in environment:
            continue
        numbers = [int(environment[rank]), int(environment[size]), int(environment.get(local_rank, 0))]
        if launcher == "Slurm":
            numbers.append(_tasks_here(environment))
        else:
            # A launcher that gives no local size (one pod per rank, say) has one rank on each host.
            numbers.append(int(environment.get(local_size, 1)))
        return RankInfo(launcher, *numbers)
    return None


def _tasks_here(environment: Mapping[str, str]) -> int:
    """This node's entry in SLURM_STEP_TASKS_PER_NODE, which looks like `8(x3),4`."""
    counts: list[int] = []
    for entry in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        number, _, times = entry.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts[min(int(environment.get("SLURM_NODEID", 0)), len(counts) - 1)]


def may_follow_another(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun may have started this rank again, while former ones are still ending on other hosts."""
    return BY_TORCHRUN in environment
