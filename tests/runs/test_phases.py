"""The phases of a step on the host's clock and on that of a GPU, whose events are made up here."""

import time
from typing import Any

import pytest
import torch

from distill.runs.profile.phases import BACKWARD, DATA, FORWARD, OTHER, PHASES, CudaPhases, Phases


def by_name(step: list[float]) -> dict[str, float]:
    return {phase: seconds for phase, seconds in zip(PHASES, step, strict=True) if seconds > 1e-4}


def test_each_phase_gets_its_time() -> None:
    phases = Phases()
    for _ in range(2):
        phases.enter(FORWARD)
        time.sleep(0.02)
        phases.enter(BACKWARD)
        time.sleep(0.04)
    phases.end_step()
    phases.enter(DATA)
    time.sleep(0.01)
    phases.end_step()
    first, second = map(by_name, phases.steps)
    assert first[FORWARD] == pytest.approx(0.04, abs=0.02) and first[BACKWARD] == pytest.approx(0.08, abs=0.02)
    assert second.keys() == {DATA}


def test_what_lies_between_two_steps_may_be_left_out() -> None:
    phases = Phases()
    phases.end_step()
    time.sleep(0.02)
    phases.restart()
    phases.end_step()
    assert sum(phases.steps[1]) < 0.01


def test_a_mark_costs_little() -> None:
    phases, began = Phases(), time.perf_counter()
    for _ in range(10_000):
        phases.enter(FORWARD)
    assert (time.perf_counter() - began) / 10_000 < 20e-6


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
