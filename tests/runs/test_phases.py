"""The phases of a step on the host's clock and on that of a GPU, whose events are made up here."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.config.settings import BackendConfig
from distill.config.training import ProfileConfig
from distill.distributed.single import Single
from distill.runs.profile import phases as module
from distill.runs.profile import recorder
from distill.runs.profile.phases import BACKWARD, DATA, FORWARD, OTHER, PHASES, CudaPhases, Phases


def by_name(step: list[float]) -> dict[str, float]:
    return {phase: seconds for phase, seconds in zip(PHASES, step, strict=True) if seconds > 0}


class Clock:
    """The clock that `Phases` reads, set by hand: seconds that binary fractions hold exactly."""

    now = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))


def test_each_phase_gets_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    phases = Phases()
    for _ in range(2):
        phases.enter(FORWARD)
        clock.now += 0.25
        phases.enter(BACKWARD)
        clock.now += 0.5
    phases.end_step()
    clock.now += 0.125  # before the first mark of a step
    phases.enter(DATA)
    clock.now += 2.0
    phases.end_step()
    assert list(map(by_name, phases.steps)) == [{FORWARD: 0.5, BACKWARD: 1.0}, {OTHER: 0.125, DATA: 2.0}]


def test_what_lies_between_two_steps_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    phases = Phases()
    phases.end_step()
    clock.now += 4.0
    phases.restart()
    clock.now += 0.25
    phases.end_step()
    assert by_name(phases.steps[1]) == {OTHER: 0.25}


class Event:
    """An event in the stream of a GPU that has done what `done` says when the event comes."""

    done = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        self.at = Event.done

    def elapsed_time(self, other: "Event") -> float:
        return 1000 * (other.at - self.at)


def test_on_a_gpu_a_step_is_known_after_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then have its events happened for certain: reading them earlier would wait for the GPU."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(Event, "done", 0.0)
    phases = CudaPhases(torch.device("cuda"))
    for number in (1, 2):
        phases.enter(FORWARD)
        Event.done += 2.0 * number
        phases.enter(BACKWARD)
        Event.done += 3.0 * number
        phases.end_step()
        assert len(phases.steps) == number - 1
        Event.done += 0.5  # what the loop does before its first phase
    phases.finish()
    first, second = map(by_name, phases.steps)
    assert first == {FORWARD: 2.0, BACKWARD: 3.0} and second == {OTHER: 0.5, FORWARD: 4.0, BACKWARD: 6.0}


@pytest.mark.parametrize(("after", "ends", "traced"), [(1, 9, [1, 2]), (4, 9, [4, 5]), (4, 5, [4]), (4, 4, [])])
def test_a_step_warms_the_profiler_up_before_those_of_the_trace(
    tmp_path: Path, after: int, ends: int, traced: list[int]
) -> None:
    path = tmp_path / "trace.json.gz"
    trace = recorder.Trace(path, after, 2, 1, torch.device("cpu"))
    for number in range(ends):
        trace.before_step(number)
        with torch.profiler.record_function(f"step-{number}"):
            torch.ones(3).sum()
    trace.stop()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if traced else []
    assert path.exists() == bool(traced)
    assert sorted({event["name"] for event in events if event["name"].startswith("step-")}) == [
        f"step-{number}" for number in traced
    ]


def test_a_step_that_is_never_read_moves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error a GPU may answer no more: of six steps five are known, the first three and none else untypical."""

    class Late(Phases):
        """Knows a step when the next one has ended."""

        def end_step(self) -> None:
            super().end_step()
            self.later, now = self.steps.pop(), getattr(self, "later", None)
            self.steps.extend([] if now is None else [now])

    monkeypatch.setattr(recorder, "phases_on", lambda device: Late())
    settings, ranks = ProfileConfig(enabled=True, trace_steps=0), Single(BackendConfig(device="cpu", threads=1))
    with pytest.raises(RuntimeError), (record := recorder.Recorder(settings, tmp_path, 1, ranks)):
        for _ in range(6):
            record.end_step()
        raise RuntimeError("the GPU is lost")
    assert len(record.record().steps) == 5 and record.record().left_out == [0, 1, 2]
