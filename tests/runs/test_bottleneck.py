"""The rules name what a made-up profile was made to have, with the setting that helps, and nothing else."""

from typing import Any

import pytest

from distill.runs.facts import Finding
from distill.runs.profile.bottleneck import RunSettings, conclusion, diagnose, summary, table
from distill.runs.profile.phases import PHASES, RankProfile

STEPS = 40
HEALTHY = {"data": 0.001, "teacher": 0.03, "forward": 0.02, "backward": 0.04, "optimizer": 0.01}
Profile = tuple[list[RankProfile], RunSettings]


def step(**seconds: float) -> list[float]:
    """The phases of a step of 100 ms, or those that are named here."""
    return [{**HEALTHY, **seconds}.get(phase, 0.0) for phase in PHASES]


def rank(number: int = 0, steps: list[list[float]] | None = None, **samples: list[float]) -> RankProfile:
    steps = steps or [step()] * STEPS
    totals = {phase: sum(one[place] for one in steps) for place, phase in enumerate(PHASES)}
    return RankProfile(number, f"host{number}", steps, totals, len(steps), samples)


def run(*ranks: RankProfile, **settings: Any) -> Profile:
    return [*ranks], RunSettings(
        **{"batch_size": 8, "micro_batches": 4, "checkpoints": {"train.save_every": 100}, **settings}
    )


def named(profile: Profile) -> Finding | None:
    """The finding that is named, of which there is at most one."""
    findings = diagnose(*profile)
    assert findings and not any(finding.named for finding in findings[1:])
    if not findings[0].named:
        assert conclusion(findings) == "No bottleneck: no rule finds 10% of the time lost."
        return None
    assert conclusion(findings) == f"The bottleneck: {findings[0].sentence}"
    return findings[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_healthy_run_has_none(ranks: int) -> None:
    assert named(run(*(rank(number, [step(exchange=0.005)] * STEPS) for number in range(ranks)))) is None


def test_too_few_steps_say_nothing() -> None:
    profile = run(rank(steps=[step(data=5.0)] * 4))
    assert diagnose(*profile) == [] and "fewer than 5 typical steps" in conclusion([])
    assert summary(*profile).step_seconds is None


@pytest.mark.parametrize(("workers", "cure"), [(0, 1), (1, 2), (2, 4)])
def test_waiting_for_data(workers: int, cure: int) -> None:
    """Half of a step, on the rank in the middle."""
    ranks = [rank(number, [step(data=wait)] * STEPS) for number, wait in enumerate((0.0, 0.1, 0.1))]
    finding = named(run(*ranks, workers=workers))
    assert finding is not None and finding.rule == "data" and finding.lost == pytest.approx(0.5)
    assert f"50% of its time: set train.workers={cure}," in finding.sentence and "data.local=DIR" in finding.sentence


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sync": "every"}, "backend.sync=window"),
        ({"sync": "every", "micro_batches": 1}, "backend.compression=bf16"),
        ({}, "backend.compression=bf16"),
        ({"compression": "bf16"}, "a faster network"),
    ],
)
def test_waiting_for_the_exchange(settings: dict[str, Any], words: str) -> None:
    """Two ranks, each of which stands still for half of its step."""
    finding = named(run(*(rank(number, [step(exchange=0.101)] * STEPS) for number in range(2)), **settings))
    assert finding is not None and finding.rule == "exchange" and finding.lost == pytest.approx(0.5)
    assert words in finding.sentence


def test_a_rank_that_is_always_the_slowest_is_named() -> None:
    """Three ranks wait 60 ms in each step of 160 ms for the fourth; for ranks that are slow in turn nothing helps."""
    quick, slow = step(exchange=0.06), step(forward=0.08)
    finding = named(run(*(rank(number, [slow if number == 2 else quick] * STEPS) for number in range(4))))
    assert finding is not None and finding.rule == "slow rank" and "rank 2 on host2" in finding.sentence
    assert finding.lost == pytest.approx(0.06 / 0.161, rel=0.01)
    ranks = [rank(number, [slow if place % 4 == number else quick for place in range(STEPS)]) for number in range(4)]
    assert named(run(*ranks)) is None


def test_checkpoints_that_take_long() -> None:
    """A second in every tenth step of 100 ms: half of the time. These steps are typical ones otherwise."""
    steps = [step(checkpoint=1.0 if place % 10 == 0 else 0.0) for place in range(STEPS)]
    finding = named(run(rank(steps=steps), checkpoints={"train.save_every": 10}))
    assert finding is not None and finding.rule == "checkpoints" and "train.save_every=40" in finding.sentence
    assert finding.lost == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("busy", "used", "micro_batches", "lost"),
    [(0.45, 8e9, 4, 0.44), (0.45, 60e9, 4, None), (0.85, 8e9, 4, None), (0.45, 8e9, 1, None)],
)
def test_a_gpu_that_waits_for_the_host(busy: float, used: float, micro_batches: int, lost: float | None) -> None:
    """It computes in half of the time, which is all but what 90 of 101 ms need; with most of its memory free."""
    samples = {"seconds": [0.5], "gpu_busy": [busy], "gpu_memory": [used], "gpu_memory_total": [80e9]}
    finding = named(run(rank(0, None, **samples), micro_batches=micro_batches))
    assert (finding is None) == (lost is None)
    if finding is not None:
        assert finding.rule == "small micro-batches" and "train.batch_size=16" in finding.sentence
        assert finding.lost == pytest.approx(lost, abs=0.01)


def test_odd_steps_and_evaluation_do_not_count() -> None:
    assert named(run(rank(steps=[step(data=9.0), *[step(evaluation=5.0)] * (STEPS - 2), step(data=3.0)]))) is None


def test_the_summary_and_its_table() -> None:
    block = summary(*run(rank(steps=[step(data=0.1)] * STEPS, process_cpu=[1.0])))
    assert (block.bottleneck, block.steps, block.ranks, block.samples) == ("data", STEPS, 1, {"process_cpu": [1.0]})
    assert block.phases["data"] == pytest.approx(0.1 * STEPS) and block.step_seconds is not None
    assert block.step_seconds.mean == pytest.approx(0.2) and block.step_seconds.longest == pytest.approx(0.2)
    lines = table(block).splitlines()
    assert lines[1].split() == ["waiting", "for", "data", "4.00", "50.0%", "100.00"] and lines[-1] == block.conclusion
