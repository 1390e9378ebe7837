"""Where the ranks of a run meet before their first exchange: an address that all derive alike, and its store."""

import os
import re
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from distill.distributed.rank import RankInfo
from distill.runtime.errors import RankLost, SettingError

POLL = 0.05  # seconds between two looks at who is there
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below the ports that Linux gives to outgoing connections


def open_store(info: RankInfo, timeout: float, purpose: str) -> dist.Store:
    """The store that all ranks share, as it is after this start of them and no earlier one.

    Args:
        timeout: seconds that a rank waits for an entry.
        purpose: keeps its entries apart from those of other users of the same store.
    """
    address, port = meeting_point(info)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process holds the store
    store = dist.TCPStore(
        address,
        port,
        info.size,
        is_master=info.rank == 0 and not agent,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )
    # After a restart by torchrun the old entries are still in its store. A store of rank 0 is new each time; the counts
    # of restarts may differ there, as an agent that joined later begins at 0.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent else "0"
    return dist.PrefixStore(f"{purpose}/{start}", store)


def wait_for_all(store: dist.Store, size: int, timeout: float) -> None:
    """Wait until all ranks have come here.

    Communication libraries wait for ranks without heeding signals; after this they need not wait.

    Raises RankLost after `timeout` seconds, or when the store is gone.
    """
    until = time.monotonic() + timeout
    try:
        store.add("met", 1)
        while (num_joined := store.add("met", 0)) < size:
            if time.monotonic() > until:
                raise RankLost(
                    f"{size - num_joined} of {size} ranks have not come within {timeout:g} s (backend.timeout)"
                )
            time.sleep(POLL)
    except dist.DistError as error:
        raise RankLost("the ranks' meeting point is gone") from error


def meeting_point(info: RankInfo, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port where the ranks meet: those of rank 0, the same on all ranks.

    Raises SettingError when the launcher sets no variable from which all ranks could derive them.
    """
    address, port_text = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    port = None if port_text is None else int(port_text)
    if address is None and info.launcher == "Slurm":
        address = first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "")))
    if address is None and info.local_size == info.size:
        address = "127.0.0.1"
    if port is None and info.launcher == "Slurm":
        port = _port_from(int(environment["SLURM_JOB_ID"]) * 7 + int(environment.get("SLURM_STEP_ID", 0)))
    elif port is None and info.launcher == "horovodrun":
        port = _port_from(int(environment.get("HOROVOD_GLOO_RENDEZVOUS_PORT", 0)))
    elif port is None and info.local_size == info.size:
        port = _port_from(os.getppid())  # mpirun is the parent of all ranks of a host
    if not address or port is None:
        raise SettingError(
            f"backend: {info.launcher} gives no meeting point; set MASTER_ADDR to the host of rank 0 and "
            "MASTER_PORT to a free port there"
        )
    return address, port


def first_host(node_list: str) -> str:
    """The first name of a Slurm node list: `gpu[03-07,9],login` -> `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", node_list)
    return "".join(part or "" for part in match.groups()) if match else ""


def _port_from(number: int) -> int:
    return FIRST_PORT + number % NUM_PORTS
