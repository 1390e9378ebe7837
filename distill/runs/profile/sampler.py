"""A thread that samples the machine while a run trains, and keeps a bounded number of averages."""

import threading
import time

import torch

from distill.runs.profile.energy import Processors
from distill.runs.profile.gpu import Gpu
from distill.runs.profile.machine import Machine

MOST_SAMPLES = 2048  # twice as many as stay; then neighbours are averaged, so that a run of any length fits
TO_KWH = 1 / 3.6e6


class Sampler:
    """Rates and levels since `start`, by name, one value a sample.

    Attributes:
        notes: what this machine does not say.
    """

    def __init__(self, interval: float, device: torch.device) -> None:
        self.interval = interval
        self._machine, self._processors = Machine(), Processors()
        self._gpu = Gpu(device) if device.type == "cuda" else None
        self._series: list[dict[str, float]] = []
        self._merged, self._pending = 1, list[dict[str, float]]()  # samples that become one
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="profile", daemon=True)
        self._retries = self._gpu.retries() if self._gpu else 0
        self._gpu_joules = self._gpu.joules() if self._gpu else None
        self.notes = [note for note in (self._processors.note, self._gpu.note if self._gpu else "") if note]
        self.cores, self.threads_of_core = self._machine.cores, self._machine.threads_of_core

    def start(self) -> None:
        """Begin; the first sample comes after one interval."""
        self.begin()
        self._thread.start()

    def begin(self) -> None:
        """Begin without a thread: whoever calls `sample` says when."""
        self._began = self._last = time.perf_counter()
        self._before = self._machine.counters()

    def stop(self) -> None:
        """Take the last sample and end the thread."""
        self._ended.set()
        self._thread.join()
        if time.perf_counter() - self._last > self.interval / 5 or not self._series:
            self.sample()

    def series(self) -> dict[str, list[float]]:
        """Each quantity over time: `seconds` since the start, shares from 0 to 1, bytes, bytes a second, watts."""
        with self._lock:
            names = dict.fromkeys(name for sample in self._series for name in sample)
            return {name: [sample.get(name, 0.0) for sample in self._series] for name in names}

    def energy(self) -> dict[str, float]:
        """kWh since the start, of what the machine tells: all processors of the host, the GPU of this rank."""
        found = {"processors": self._processors.joules()}
        if self._gpu is not None and self._gpu_joules is not None:
            found["gpu"] = (self._gpu.joules() or 0.0) - self._gpu_joules
        return {name: joules * TO_KWH for name, joules in found.items() if joules is not None}

    def retries(self) -> int:
        """Allocations of GPU memory since the start that found it full."""
        return self._gpu.retries() - self._retries if self._gpu else 0

    def _run(self) -> None:
        while not self._ended.wait(self.interval):
            self.sample()

    def sample(self) -> None:
        """Take a sample of now, and of the rates since the one before."""
        now, counters = time.perf_counter(), self._machine.counters()
        span, self._last = max(now - self._last, 1e-6), now
        sample = {"seconds": now - self._began, **self._rates(counters, span), **self._machine.levels()}
        if self._gpu is not None:
            sample |= self._gpu.levels()
        self._processors.joules()  # often enough to notice a counter that begins anew
        with self._lock:
            self._keep(sample)

    def _rates(self, counters: dict[str, float], span: float) -> dict[str, float]:
        """What the counters have grown by, a second; the machine's processors as a share of all of them."""
        grown = {name: counters[name] - self._before.get(name, counters[name]) for name in counters}
        self._before = counters
        whole = max(grown.pop("machine_time"), 1e-6)
        # Linux may take back a little of what it has counted as waiting for disks.
        shares = {name: min(max(grown.pop(name) / whole, 0.0), 1.0) for name in ("machine_cpu", "machine_iowait")}
        return shares | {name: value / span for name, value in grown.items()}

    def _keep(self, sample: dict[str, float]) -> None:
        self._pending.append(sample)
        if len(self._pending) < self._merged:
            return
        self._series.append(_mean(self._pending))
        self._pending = []
        if len(self._series) >= MOST_SAMPLES:
            self._series = [_mean(self._series[at : at + 2]) for at in range(0, len(self._series), 2)]
            self._merged *= 2


def _mean(samples: list[dict[str, float]]) -> dict[str, float]:
    """One sample in place of several, which ends when the last of them did."""
    means = {name: sum(each.get(name, 0.0) for each in samples) / len(samples) for name in samples[0]}
    return means | {"seconds": samples[-1]["seconds"]}
