"""Samples what processors, memory, network and GPU do while a run trains, for its profile and for its live page."""

import threading
import time
from contextlib import suppress

import psutil
import torch

from distill.runtime.host import free_memory

INTERVAL = 0.5  # seconds between two samples of a profile, at first
MAX_SAMPLES = 400  # then every other one leaves, so that a run of any length fits


class Sampler:
    """Rates and levels since `start`, by name, one value a sample; a live page calls `sample` alone."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process, self._interval = device, psutil.Process(), INTERVAL
        self._began = time.perf_counter()
        self._before = self._counters()
        self._samples: list[dict[str, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="profile", daemon=True)

    def start(self) -> None:
        """Sample from now on; the first sample comes after one interval."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; there is one sample at least."""
        self._ended.set()
        self._thread.join()

    def series(self) -> dict[str, list[float]]:
        """Each quantity over time: `seconds` since the start, fractions from 0 to 1, bytes, bytes a second."""
        samples = [*self._samples]
        names = dict.fromkeys(name for sample in samples for name in sample)
        return {name: [sample.get(name, 0.0) for sample in samples] for name in names}

    def sample(self) -> None:
        """Take a sample of now, and of the rates since the one before."""
        before, self._before = self._before, self._counters()
        span = max(self._before["seconds"] - before["seconds"], 1e-6)
        rates = {name: (now - before[name]) / span for name, now in self._before.items()}
        idle = min(max(rates.pop("machine_idle") / (psutil.cpu_count() or 1), 0.0), 1.0)
        sample = rates | {"machine_cpu": 1 - idle, "seconds": self._before["seconds"]} | self._levels()
        self._samples.append({name: float(f"{value:.5g}") for name, value in sample.items()})
        if len(self._samples) == MAX_SAMPLES:
            self._samples = self._samples[1::2]
            self._interval *= 2

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            self.sample()
        if not self._samples:
            self.sample()

    def _counters(self) -> dict[str, float]:
        """What only grows: the time, seconds of processors, bytes of the network."""
        process, machine, network = self._process.cpu_times(), psutil.cpu_times(), psutil.net_io_counters()
        return {
            "seconds": time.perf_counter() - self._began,
            "process_cpu": process.user + process.system,
            "machine_idle": machine.idle + getattr(machine, "iowait", 0.0),
            "network_sent": getattr(network, "bytes_sent", 0.0),  # a host may have no network
            "network_received": getattr(network, "bytes_recv", 0.0),
        }

    def _levels(self) -> dict[str, float]:
        """What goes up and down: bytes of memory, and the fraction of the time in which the GPU computes."""
        levels = {"process_memory": float(self._process.memory_info().rss), "memory_free": float(free_memory())}
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            levels |= {"gpu_memory": float(total - free), "gpu_memory_total": float(total)}
            with suppress(Exception):  # NVML's Python module, the driver or the right to read it is missing
                levels["gpu_busy"] = torch.cuda.utilization(self._device) / 100
        return levels
