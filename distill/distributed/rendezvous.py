"""Where the ranks of a run meet before their first exchange: an address that all derive alike, and its store."""

import errno
import itertools
import os
import re
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread

import torch.distributed as dist

from distill.runtime.errors import RankLost, SettingError, first_line
from distill.runtime.rank import VARIABLES, RankInfo, number_of

POLL = 0.05  # seconds between two looks at who is there
RETRY, CONNECT = 0.5, 5.0  # seconds between two attempts to reach rank 0, and that one takes at most
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below the ports that Linux gives to outgoing connections

_meetings = itertools.count()  # of this process, which may train several times: all its ranks count alike


def open_store(info: RankInfo, timeout: float, purpose: str) -> dist.Store:
    """The store that all ranks share, as it is after this start of them and no earlier one.

    Args:
        timeout: seconds that a rank waits for rank 0, and later for an entry.
        purpose: keeps its entries apart from those of other users of the same store.

    Raises:
        SettingError: rank 0 has no such address, its port is taken, or another rank has the same or other numbers.
        RankLost: nothing answers at that address.
    """
    number = next(_meetings)
    address, port = meeting_point(info)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process holds the store
    is_master = info.rank == 0 and not agent
    wait_for_address(address, port, timeout, is_master=is_master)
    store = _connected(address, port, is_master, timeout)
    # In torchrun's store the old entries are still there after a restart, and after an earlier run of these processes.
    # A store of rank 0 is new each time; the counts of restarts may differ there, as an agent that joined later begins
    # at 0.
    start = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{number}" if agent else "0"
    shared = dist.PrefixStore(f"{purpose}/{start}", store)
    if not agent:
        _refuse_contradiction(info, shared)
    return shared


def wait_for_address(address: str, port: int, timeout: float, prefix: str = "MASTER_", is_master: bool = False) -> None:
    """Wait until rank 0 listens at its address; rank 0 looks whether there is such an address, and the port is free.

    torch would wait where no signal ends it, and write warnings meanwhile. A name may come to exist later, as those of
    pods do. Raises as `open_store`.

    Args:
        prefix: of the variables ADDR and PORT that give the address.
    """
    until = time.monotonic() + timeout
    while (problem := _problem(address, port, is_master, min(CONNECT, timeout))) is not None:
        if problem.errno == errno.EADDRINUSE:
            raise SettingError(
                f"{prefix}PORT={port} is in use on this host, by another program or another rank 0: set it to a free "
                "port, the same for all ranks"
            )
        if time.monotonic() > until:
            reason = f"{problem.strerror or problem} for {timeout:g} s (backend.timeout)"
            if isinstance(problem, socket.gaierror):
                raise SettingError(f"{prefix}ADDR={address}: {reason}; set it to the host of rank 0")
            raise RankLost(f"rank 0 does not answer at {address}:{port} ({prefix}ADDR, {prefix}PORT): {reason}")
        time.sleep(RETRY)


def _problem(address: str, port: int, is_master: bool, timeout: float) -> OSError | None:
    """Why the ranks cannot meet at this address now; None: they can."""
    try:
        if not is_master:
            socket.create_connection((address, port), timeout).close()
            return None
        socket.getaddrinfo(address, port)
        with socket.create_server(("", port)):
            return None
    except OSError as error:
        return error


def _connected(address: str, port: int, is_master: bool, timeout: float) -> dist.Store:
    """The store at this address. Raises RankLost where what answers there is none.

    In a thread of its own: it waits without a limit, and without heeding signals, for a server that is silent. The
    thread is a daemon, so that the end of the process does not wait for it.
    """
    limit, found = timedelta(seconds=timeout), Future[dist.Store]()

    def connect() -> None:
        try:
            found.set_result(dist.TCPStore(address, port, is_master=is_master, timeout=limit, wait_for_workers=False))
        except Exception as error:
            found.set_exception(error)

    Thread(target=connect, name="rendezvous", daemon=True).start()
    try:
        return found.result(timeout)
    except (dist.DistError, TimeoutError) as error:
        reason = first_line(error) if str(error) else f"no store of ranks answered for {timeout:g} s (backend.timeout)"
        raise RankLost(f"the ranks do not meet at {address}:{port} (MASTER_ADDR, MASTER_PORT): {reason}") from error


def _refuse_contradiction(info: RankInfo, store: dist.Store) -> None:
    """Raises SettingError where another process is the same rank, or has another number of ranks."""
    rank, size = VARIABLES[info.launcher][:2]
    if (other := store.compare_set("size", "", str(info.size)).decode()) != str(info.size):
        raise SettingError(f"{size}={info.size}: another rank has {size}={other}; set the same number for all ranks")
    if store.add(f"rank/{info.rank}", 1) > 1:
        raise SettingError(
            f"{rank}={info.rank}: another process is this rank; give every process another number, from 0 to "
            f"{info.size - 1}"
        )


def wait_for_all(store: dist.Store, info: RankInfo, timeout: float) -> None:
    """Wait until all ranks have come here.

    Communication libraries wait for ranks without heeding signals; after this they need not wait.

    Raises RankLost after `timeout` seconds, or when the store is gone.
    """
    until = time.monotonic() + timeout
    try:
        store.add(f"met/{info.rank}", 1)
        store.add("met", 1)
        while store.add("met", 0) < info.size:
            if time.monotonic() > until:
                missing = [str(rank) for rank in range(info.size) if not store.add(f"met/{rank}", 0)]
                shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
                raise RankLost(
                    f"{len(missing)} of {info.size} ranks have not joined within {timeout:g} s: rank {shown}; find out "
                    "why they did not start, or raise backend.timeout"
                )
            time.sleep(POLL)
    except dist.DistError as error:
        raise RankLost(
            "the store through which the ranks meet has closed: rank 0, or the launcher that held it, has ended, and "
            "its log names the reason"
        ) from error


def meeting_point(info: RankInfo, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port where the ranks meet: those of rank 0, the same on all ranks.

    Raises SettingError when the launcher sets no variable from which all ranks could derive them, or no port.
    """
    address = environment.get("MASTER_ADDR")
    port = number_of(environment, "MASTER_PORT", range(1, 65_536)) if "MASTER_PORT" in environment else None
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
