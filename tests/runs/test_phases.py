"""The phases of a step on the host's clock and on that of a GPU, whose events are made up here; traces and samples."""

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.config.settings import BackendConfig
from distill.config.training import ProfileConfig
from distill.distributed.single import Single
from distill.runs.profile import phases as module
from distill.runs.profile import sampler as sampling
from distill.runs.profile.phases import (
    BACKWARD,
    DATA,
    FORWARD,
    OTHER,
    PHASES,
    UNTYPICAL_STEPS,
    RankProfile,
    Recorder,
    phase,
)
from distill.runs.profile.sampler import Sampler

CPU = torch.device("cpu")


def recorder(folder: Path, **settings: Any) -> Recorder:
    ranks = Single(BackendConfig(device="cpu", threads=1))
    return Recorder(ProfileConfig(**{"enabled": True, "trace_steps": 0, **settings}), folder, 1, ranks)


def by_name(step: list[float]) -> dict[str, float]:
    return {phase: seconds for phase, seconds in zip(PHASES, step, strict=True) if seconds > 0}


class Clock:
    """The clock of the host, set by hand: seconds that binary fractions hold exactly. No step is untypical."""

    now = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(module, "UNTYPICAL_STEPS", 0)


def run_two_steps(record: Recorder, clock: Clock) -> RankProfile:
    with record:
        for _ in range(2):
            with phase(FORWARD):
                clock.now += 0.25
            with phase(BACKWARD):
                clock.now += 0.5
                with phase(DATA):
                    clock.now += 1.0
        record.end_step()
        clock.now += 0.125  # before the first phase of a step
        with phase(DATA):
            clock.now += 2.0
        record.end_step()
        clock.now += 8.0  # before another step, which does not come
    return record.record()


def test_each_phase_gets_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase within another one interrupts that; what is in no phase is another thing."""
    clock = Clock(monkeypatch)
    profile = run_two_steps(recorder(tmp_path), clock)
    first, second = map(by_name, profile.steps)
    assert first == {FORWARD: 0.5, BACKWARD: 1.0, DATA: 2.0} and second == {OTHER: 0.125, DATA: 2.0}
    assert by_name([*profile.totals.values()]) == {FORWARD: 0.5, BACKWARD: 1.0, DATA: 4.0, OTHER: 0.125}
    assert profile.num_steps == 2 and len(profile.samples["seconds"]) == 1


def test_on_a_gpu_the_events_of_a_step_are_read_after_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only then have they happened for certain: reading them earlier would wait for the GPU."""
    clock, read_at = Clock(monkeypatch), list[float]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            self.at = clock.now

        def elapsed_time(self, other: "Event") -> float:
            read_at.append(clock.now)
            return 1000 * (other.at - self.at)

    for name, made in (("Event", Event), ("current_stream", str), ("synchronize", str)):
        monkeypatch.setattr(torch.cuda, name, made)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6e9, 8e9))
    record = recorder(tmp_path)
    record._ranks.device = record._sampler._device = torch.device("cuda")
    profile = run_two_steps(record, clock)
    first, second = map(by_name, profile.steps)
    assert first == {FORWARD: 0.5, BACKWARD: 1.0, DATA: 2.0} and second == {OTHER: 0.125, DATA: 2.0}
    assert min(read_at) == 5.625


def test_without_a_recorder_nothing_is_timed() -> None:
    assert phase(FORWARD) is phase(BACKWARD)
    with phase(FORWARD), torch.profiler.profile() as profiler, phase(BACKWARD):
        torch.ones(3).sum()
    assert not {FORWARD, BACKWARD} & {event.name for event in profiler.events()}


@pytest.mark.parametrize(
    ("trace_steps", "ends", "traced", "typical"), [(2, 9, [4, 5], 3), (2, 5, [4], 0), (2, 3, [], 0), (0, 5, [], 2)]
)
def test_a_step_warms_the_profiler_up_before_those_of_the_trace(
    tmp_path: Path, trace_steps: int, ends: int, traced: list[int], typical: int
) -> None:
    """The first steps and the traced ones are not typical."""
    path = tmp_path / "profile" / "trace-rank-0.json.gz"
    with recorder(tmp_path, trace_steps=trace_steps) as record:
        for number in range(ends):
            with phase(FORWARD), torch.profiler.record_function(f"step-{number}"):
                torch.ones(3).sum()
            record.end_step()
    assert path.exists() == bool(traced) and UNTYPICAL_STEPS == 3
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if traced else []
    names = [event.get("name") for event in events]
    assert [name for name in names if str(name).startswith("step-")] == [f"step-{number}" for number in traced]
    assert names.count(FORWARD) == len(traced)
    profile = record.record()
    assert profile.num_steps == ends and len(profile.steps) == typical and profile.totals[FORWARD] > 0


def test_after_an_error_nothing_is_asked_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorder(tmp_path)
    record._ranks.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    with pytest.raises(RuntimeError, match="the GPU is lost"), record:
        record.end_step()
        raise RuntimeError("the GPU is lost")
    assert phase(FORWARD) is phase(BACKWARD) and record.record().steps == []


def test_this_process_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it has computed is in the samples, whatever else the machine does meanwhile; those of a long run fit."""
    monkeypatch.setattr(sampling, "INTERVAL", 0.02)
    sampler, before = Sampler(CPU), time.process_time()
    sampler.start()
    while len(sampler.series().get("seconds", [])) < 3:
        sum(range(10_000))
    sampler.stop()
    sampler.sample()
    computed = time.process_time() - before
    series = sampler.series()
    assert len({len(values) for values in series.values()}) == 1
    spans = [now - then for then, now in zip([0.0, *series["seconds"]], series["seconds"], strict=False)]
    used = sum(rate * span for rate, span in zip(series["process_cpu"], spans, strict=True))
    assert used == pytest.approx(computed, abs=0.05) and all(0 <= fraction <= 1 for fraction in series["machine_cpu"])
    assert min(series["process_memory"]) > 10e6 and {"network_sent", "network_received"} <= series.keys()
    monkeypatch.setattr(sampling, "MAX_SAMPLES", 8)
    for _ in range(64):
        sampler.sample()
    seconds = sampler.series()["seconds"]
    assert 4 <= len(seconds) < 8 and sorted(seconds) == seconds and sampler._interval > sampling.INTERVAL


def test_a_gpu_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory always; its utilisation where NVML's module is there."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6e9, 8e9))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 75)
    sampler = Sampler(torch.device("cuda"))
    sampler.sample()
    series = sampler.series()
    assert (series["gpu_memory"], series["gpu_memory_total"], series["gpu_busy"]) == ([2e9], [8e9], [0.75])
    monkeypatch.delattr(torch.cuda, "utilization")
    assert "gpu_busy" not in sampler._levels()
