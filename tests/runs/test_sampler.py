"""What is sampled of this process and host, and that any length of a run fits."""

import time

import pytest
import torch

from distill.runs.profile import sampler as sampling
from distill.runs.profile.loader import LoaderClock
from distill.runs.profile.sampler import Sampler

CPU = torch.device("cpu")


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_this_process_is_sampled() -> None:
    sampler = Sampler(0.05, CPU)
    sampler.start()
    before = time.process_time()
    busy(0.4)
    computed = time.process_time() - before
    sampler.stop()
    series = sampler.series()
    assert len({len(values) for values in series.values()}) == 1 and len(series["seconds"]) >= 2
    spans = [now - then for then, now in zip([0.0, *series["seconds"]], series["seconds"], strict=False)]
    measured = sum(rate * span for rate, span in zip(series["process_cpu"], spans, strict=True))
    assert measured == pytest.approx(computed, abs=0.15)
    assert all(0 <= share <= 1.001 for share in series["machine_cpu"])
    assert min(series["process_memory"]) > 10e6 and min(series["memory_free"]) > 0
    assert {"network_sent", "network_received"} <= series.keys()


def test_samples_of_a_long_run_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_SAMPLES", 8)
    sampler = Sampler(0.5, CPU)
    for number in range(64):
        sampler._keep({"seconds": float(number), "process_cpu": float(number)})
    series = sampler.series()
    assert len(series["seconds"]) < 8 and series["process_cpu"][0] == pytest.approx(sum(range(16)) / 16)
    assert series["seconds"][0] == 15  # a sample covers the time up to there


def test_the_loader_knows_computing_from_waiting() -> None:
    for work, least, most in ((busy, 0.8, 1.1), (time.sleep, 0.0, 0.3)):
        clock = LoaderClock()
        clock.watch(lambda step, work=work: work(0.05))(0)
        assert least <= clock.times.computed / clock.times.prepared <= most, work
        assert clock.times.windows == 1 and clock.times.in_loop and clock.times.most_at_once == 1


def test_a_gpu_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory always; its utilisation where NVML's module is there."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6e9, 8e9))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 75)
    sampler = Sampler(0.5, torch.device("cuda"))
    sampler.begin()
    sampler.sample()
    series = sampler.series()
    assert (series["gpu_memory"], series["gpu_memory_total"], series["gpu_busy"]) == ([2e9], [8e9], [0.75])
    monkeypatch.delattr(torch.cuda, "utilization")
    assert "gpu_busy" not in sampler._levels()
