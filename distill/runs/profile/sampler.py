"""A thread that samples what processors and GPU do while a run trains, and keeps a bounded number of averages."""

import threading
import time

import psutil
import torch

from distill.runtime.host import free_memory

INTERVAL = 0.5  # seconds between two samples of a profile
MAX_SAMPLES = 2048  # twice as many as stay; then neighbours are averaged, so that a run of any length fits


class Sampler:
    """Rates and levels since `start`, by name, one value a sample."""

    def __init__(self, interval: float, device: torch.device) -> None:
        self.interval, self._device, self._process = interval, device, psutil.Process()
        self._series: list[dict[str, float]] = []
        self._merged, self._pending = 1, list[dict[str, float]]()  # samples that become one
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="profile", daemon=True)

    def start(self) -> None:
        """Begin; the first sample comes after one interval."""
        self.begin()
        self._thread.start()

    def begin(self) -> None:
        """Begin without a thread: the caller of `sample` decides when."""
        self._began = self._last = time.perf_counter()
        self._before = self._counters()

    def stop(self) -> None:
        """Take the last sample and end the thread."""
        self._ended.set()
        self._thread.join()
        if time.perf_counter() - self._last > self.interval / 5 or not self._series:
            self.sample()

    def series(self) -> dict[str, list[float]]:
        """Each quantity over time: `seconds` since the start, fractions from 0 to 1, bytes, bytes a second."""
        with self._lock:
            names = dict.fromkeys(name for sample in self._series for name in sample)
            return {name: [sample.get(name, 0.0) for sample in self._series] for name in names}

    def sample(self) -> None:
        """Take a sample of now, and of the rates since the one before."""
        now, counters = time.perf_counter(), self._counters()
        span = max(now - self._last, 1e-6)
        rates = {name: (counters[name] - self._before[name]) / span for name in counters}
        # Linux may take back a little of what it has counted as idle.
        rates["machine_cpu"] = min(max(rates["machine_cpu"] / max(rates.pop("machine_time"), 1e-6), 0.0), 1.0)
        self._last, self._before = now, counters
        with self._lock:
            self._keep({"seconds": now - self._began, **rates, **self._levels()})

    def _run(self) -> None:
        while not self._ended.wait(self.interval):
            self.sample()

    def _counters(self) -> dict[str, float]:
        """What only grows: seconds of processors, bytes of the network."""
        process, machine, network = self._process.cpu_times(), psutil.cpu_times(), psutil.net_io_counters()
        total = sum(machine[:8])  # the others are parts of these
        return {
            "process_cpu": process.user + process.system,
            "machine_cpu": total - machine.idle - getattr(machine, "iowait", 0.0),
            "machine_time": total,
            "network_sent": getattr(network, "bytes_sent", 0.0),
            "network_received": getattr(network, "bytes_recv", 0.0),
        }

    def _levels(self) -> dict[str, float]:
        """What goes up and down: bytes of memory, and the fraction of the time in which the GPU computes."""
        levels = {
            "process_memory": float(self._process.memory_info().rss),
            "memory_free": float(free_memory()),
        }
        if self._device.type == "cuda":
            gpu_free, total = torch.cuda.mem_get_info(self._device)
            levels |= {"gpu_memory": float(total - gpu_free), "gpu_memory_total": float(total)}
            try:
                levels["gpu_busy"] = torch.cuda.utilization(self._device) / 100
            except Exception:  # NVML's Python module, the driver or the right to read it is missing
                return levels
        return levels

    def _keep(self, sample: dict[str, float]) -> None:
        self._pending.append(sample)
        if len(self._pending) < self._merged:
            return
        self._series.append(_mean(self._pending))
        self._pending = []
        if len(self._series) >= MAX_SAMPLES:
            self._series = [_mean(self._series[at : at + 2]) for at in range(0, len(self._series), 2)]
            self._merged *= 2


def _mean(samples: list[dict[str, float]]) -> dict[str, float]:
    """One sample in place of several, which ends when the last of them did."""
    means = {name: sum(sample.get(name, 0.0) for sample in samples) / len(samples) for name in samples[0]}
    return means | {"seconds": samples[-1]["seconds"]}
