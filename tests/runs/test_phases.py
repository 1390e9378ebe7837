"""The phases of a step on the host's clock and on that of a GPU, whose events are made up here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.runs.profile import phases as module
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
