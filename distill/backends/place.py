"""Where this process stands among the ranks of a run: the environments of torchrun, horovodrun, Slurm and MPI."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from distill.errors import SettingError

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
    # Only inside `srun`: the shell of a batch script has a rank too, yet it is nobody's worker. The number of tasks
    # on this node is part of a list.
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class Place:
    """This process among the ranks of a run; `launcher` is what started them."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that a launcher gave to this process, or None when it was started by hand."""
    for launcher, (rank, size, local_rank, local_size) in VARIABLES.items():
        if rank not in environment or size not in environment:
            continue
        numbers = [int(environment[rank]), int(environment[size]), int(environment.get(local_rank, 0))]
        if launcher == "Slurm":
            numbers.append(_tasks_here(environment))
        else:
            # A launcher that tells no local size (one pod per rank, say) has one rank on each host.
            numbers.append(int(environment.get(local_size, 1)))
        return Place(launcher, *numbers)
    return None


def meeting_point(place: Place, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port where the ranks meet: those of rank 0, the same on all ranks.

    Raises SettingError when the launcher says nothing that all ranks could derive them from.
    """
    address, told = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    port = None if told is None else int(told)
    if address is None and place.launcher == "Slurm":
        address = first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "")))
    if address is None and place.local_size == place.size:
        address = "127.0.0.1"
    if port is None and place.launcher == "Slurm":
        port = _port_from(int(environment["SLURM_JOB_ID"]) * 7 + int(environment.get("SLURM_STEP_ID", 0)))
    elif port is None and place.launcher == "horovodrun":
        port = _port_from(int(environment.get("HOROVOD_GLOO_RENDEZVOUS_PORT", 0)))
    elif port is None and place.local_size == place.size:
        port = _port_from(os.getppid())  # mpirun is the parent of all ranks of a host
    if not address or port is None:
        raise SettingError(
            f"backend: {place.launcher} tells no meeting point; set MASTER_ADDR to the host of rank 0 and "
            "MASTER_PORT to a free port there"
        )
    return address, port


def first_host(node_list: str) -> str:
    """The first name of a Slurm node list: `gpu[03-07,9],login` -> `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", node_list)
    return "".join(part or "" for part in match.groups()) if match else ""


def _tasks_here(environment: Mapping[str, str]) -> int:
    """This node's entry in SLURM_STEP_TASKS_PER_NODE, which looks like `8(x3),4`."""
    counts: list[int] = []
    for entry in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        number, _, times = entry.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts[min(int(environment.get("SLURM_NODEID", 0)), len(counts) - 1)]


def _port_from(number: int) -> int:
    return FIRST_PORT + number % NUM_PORTS
