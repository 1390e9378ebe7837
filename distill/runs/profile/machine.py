"""Reads what the processors, memory, disk and network of this host, and this process, have done so far."""

import os
from pathlib import Path

import psutil

from distill.runtime.host import free_memory

PRESSURE = Path("/proc/pressure")  # of Linux since 4.20: time in which tasks wanted a resource and had to wait
PRESSED = ("cpu", "io", "memory")
GROUP = Path("/sys/fs/cgroup")


class Machine:
    """The counters of this host and process; rates are differences of two readings.

    What the system does not tell is left out.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads_of_core = max(
            1, (psutil.cpu_count() or 1) // (psutil.cpu_count(logical=False) or psutil.cpu_count() or 1)
        )

    def counters(self) -> dict[str, float]:
        """What only grows: seconds of processors, bytes of disk and network, faults, seconds of waiting."""
        own, cpu = self._process.cpu_times(), psutil.cpu_times()
        idle = cpu.idle + getattr(cpu, "iowait", 0.0)
        found = {
            "process_cpu": own.user + own.system,
            "process_user": own.user,
            "machine_cpu": sum(cpu[:8]) - idle,  # the others are parts of the first
            "machine_time": sum(cpu[:8]),
            "machine_iowait": getattr(cpu, "iowait", 0.0),
            "major_faults": float(_major_faults()),
        }
        if (disk := psutil.disk_io_counters()) is not None:
            found |= {"disk_read": float(disk.read_bytes), "disk_written": float(disk.write_bytes)}
        if (network := psutil.net_io_counters()) is not None:
            found |= {"network_sent": float(network.bytes_sent), "network_received": float(network.bytes_recv)}
        return found | {f"{name}_stalled": seconds for name in PRESSED if (seconds := _stalled(name)) is not None}

    def levels(self) -> dict[str, float]:
        """What goes up and down: bytes of memory."""
        memory = psutil.virtual_memory()
        free = free_memory()
        return {
            "process_memory": float(self._process.memory_info().rss),
            "memory_free": float(memory.available if free is None else free),
            "memory_total": float(memory.total),
            "swap_used": float(psutil.swap_memory().used),
        }


def _major_faults() -> int:
    """Pages that this process, or a thread of it, had to wait for until they came from a disk."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _stalled(name: str) -> float | None:
    """Seconds in which at least one task wanted this resource and had to wait; None where the system does not count.

    In a container of version 2 the group's own tasks, else all of the host.
    """
    for path in (GROUP / f"{name}.pressure", PRESSURE / name):
        try:
            some = path.read_text().splitlines()[0]
        except (OSError, IndexError):
            continue
        return int(some.rpartition("total=")[2]) / 1e6
    return None
