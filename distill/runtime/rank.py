"""Which rank this process is: the environments of torchrun, horovodrun, Slurm and MPI."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from distill.runtime.errors import SettingError

# Per launcher: the variables of rank, size, local rank and local size.
VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    # Only inside `srun`: the shell of a batch script has a rank too, yet it is no worker. The number of tasks
    # on this node is part of a list.
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}

MAX_RANKS = 1 << 20
SLURM_STEP = "SLURM_STEP_NUM_TASKS"  # which may set the variables of MPI besides
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
    """This process as a launcher has numbered it; None when it was started by hand.

    Raises SettingError where those are no numbers, or no rank of so many.
    """
    for launcher, (rank, size, local_rank, local_size) in VARIABLES.items():
        if rank not in environment or size not in environment:
            continue
        num_ranks = number_of(environment, size, range(1, MAX_RANKS))
        if num_ranks == 1 and (launcher == "Slurm" or (launcher == "MPI" and SLURM_STEP in environment)):
            continue  # an interactive shell is such a step, too, and no launcher of ranks
        numbers = [number_of(environment, rank, range(num_ranks)), num_ranks]
        numbers.append(number_of(environment, local_rank, range(MAX_RANKS)) if local_rank in environment else 0)
        if launcher == "Slurm":
            numbers.append(_tasks_here(environment))
        else:  # a launcher that gives no local size (one pod per rank, say) has one rank on each host
            numbers.append(number_of(environment, local_size, range(1, MAX_RANKS)) if local_size in environment else 1)
        return RankInfo(launcher, *numbers)
    return None


def number_of(environment: Mapping[str, str], name: str, allowed: range) -> int:
    """The number in a variable. Raises SettingError where it holds none, or one that is not allowed."""
    text = environment[name]
    if len(text) < 10 and text.strip().isdecimal() and (number := int(text)) in allowed:
        return number
    raise SettingError(
        f"{name}={text}: a launcher of ranks sets it to a number from {allowed.start} to {allowed.stop - 1}; start "
        "the ranks by torchrun, or unset it for a run of one process"
    )


def refuse_half_numbered(environment: Mapping[str, str] = os.environ) -> None:
    """Raises SettingError where a launcher has set only one of a rank and the number of ranks.

    The shell of a batch script of Slurm has a rank, too, and is none.
    """
    for launcher, (rank, size, *_) in VARIABLES.items():
        if launcher != "Slurm" and (rank in environment) != (size in environment):
            here, missing = (rank, size) if rank in environment else (size, rank)
            raise SettingError(
                f"{here}={environment[here]} without {missing}: a launcher of ranks sets both; start the ranks "
                f"by torchrun, or unset {here} for a run of one process"
            )


def _tasks_here(environment: Mapping[str, str]) -> int:
    """This node's entry in SLURM_STEP_TASKS_PER_NODE, which looks like `8(x3),4`."""
    counts: list[int] = []
    for entry in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        number, _, times = entry.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts[min(int(environment.get("SLURM_NODEID", 0)), len(counts) - 1)]
