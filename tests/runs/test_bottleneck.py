"""The rules name what a made-up profile was made to have, with the setting that helps, and nothing else."""

from typing import Any

import pytest

from distill.runs.facts import Finding
from distill.runs.profile.bottleneck import conclusion, diagnose
from distill.runs.profile.loader import LoaderTimes
from distill.runs.profile.phases import PHASES
from distill.runs.profile.record import RankProfile, RunProfile, RunSettings
from distill.runs.profiling import downsample, summary, table

STEPS = 40
HEALTHY = {"data": 0.001, "teacher": 0.03, "forward": 0.02, "backward": 0.04, "optimizer": 0.01}


def step(**seconds: float) -> list[float]:
    """The phases of a step of 100 ms, or those that are named here."""
    return [{**HEALTHY, **seconds}.get(phase, 0.0) for phase in PHASES]


def rank(number: int = 0, steps: list[list[float]] | None = None, **fields: Any) -> RankProfile:
    steps = steps or [step() for _ in range(STEPS)]
    totals = {phase: sum(one[place] for one in steps) for place, phase in enumerate(PHASES)}
    loader = LoaderTimes(len(steps), prepared=0.02 * len(steps), computed=0.02 * len(steps), most_at_once=1)
    usual = {"totals": totals, "loader": loader, "samples": {"seconds": [0.5, 1.0], "process_cpu": [1.0, 1.0]}}
    return RankProfile(number, f"host{number}", steps, num_steps=len(steps), **{**usual, **fields})


def run(*ranks: RankProfile, **settings: Any) -> RunProfile:
    return RunProfile(list(ranks), RunSettings(**{"batch_size": 8, "micro_batches": 4, "save_every": 100, **settings}))


def named(profile: RunProfile) -> Finding:
    """The only finding that is named."""
    findings = [finding for finding in diagnose(profile) if finding.named]
    assert len(findings) == 1, findings
    assert conclusion(profile, findings) == f"The bottleneck: {findings[0].sentence}"
    return findings[0]


def waiting(computed: float, threads: int = 1) -> RunProfile:
    """A run whose loop of 100 ms waits 100 ms more for windows that take 200 ms, this fraction of them computing."""
    loader = LoaderTimes(STEPS, 0.2 * STEPS, 0.2 * computed * STEPS, max(threads, 1), in_loop=not threads)
    return run(rank(steps=[step(data=0.1)] * STEPS, loader=loader))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_healthy_run_has_none(ranks: int) -> None:
    profile = run(*(rank(number, [step(exchange=0.005)] * STEPS) for number in range(ranks)))
    assert not [finding for finding in diagnose(profile) if finding.named]
    assert conclusion(profile, diagnose(profile)) == "No bottleneck: no rule finds 10% of the time lost."


def test_too_few_steps_say_nothing() -> None:
    profile = run(rank(steps=[step(data=5.0)] * 3))
    assert diagnose(profile) == [] and "fewer than 5 steps" in conclusion(profile, [])


@pytest.mark.parametrize(
    ("computed", "threads", "words"),
    [
        (0.9, 1, "computed too slowly: set train.workers=2,"),
        (0.9, 0, "computed too slowly: set train.workers=1,"),
        (0.1, 2, "wait for storage: set train.workers=4, or data.local=DIR"),
    ],
)
def test_waiting_for_data(computed: float, threads: int, words: str) -> None:
    finding = named(waiting(computed, threads))
    assert finding.rule == "data" and words in finding.sentence and finding.lost == pytest.approx(0.5)


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
    assert finding.rule == "exchange" and words in finding.sentence and finding.lost == pytest.approx(0.5)


def test_a_rank_that_is_always_the_slowest_is_named() -> None:
    """Three ranks wait 60 ms in each step of 160 ms for the fourth."""
    quick, slow = step(exchange=0.06), step(forward=0.08)
    finding = named(run(*(rank(number, [slow if number == 2 else quick] * STEPS) for number in range(4))))
    assert finding.rule == "slow rank" and "rank 2 on host2" in finding.sentence
    assert finding.lost == pytest.approx(0.06 / 0.161, rel=0.01)


def test_ranks_that_are_slow_in_turn_are_not() -> None:
    quick, slow = step(exchange=0.06), step(forward=0.08)
    ranks = [rank(number, [slow if place % 4 == number else quick for place in range(STEPS)]) for number in range(4)]
    assert not [finding for finding in diagnose(run(*ranks)) if finding.named]


def test_checkpoints_that_take_long() -> None:
    """A second in every tenth step of 100 ms: half of the time. These steps are typical ones otherwise."""
    steps = [step(checkpoint=1.0 if place % 10 == 0 else 0.0) for place in range(STEPS)]
    finding = named(run(rank(steps=steps), save_every=10))
    assert finding.rule == "checkpoints" and "train.save_every=40" in finding.sentence
    assert finding.lost == pytest.approx(0.5, abs=0.01)


def gpu(busy: float, used: float) -> dict[str, list[float]]:
    return {"seconds": [0.5], "gpu_busy": [busy], "gpu_memory": [used], "gpu_memory_total": [80e9]}


def test_a_gpu_that_waits_for_the_host() -> None:
    """It computes in half of the time, which is all but what 90 of 101 ms need; with most of its memory free."""
    finding = named(run(rank(samples=gpu(0.45, 8e9))))
    assert finding.rule == "small micro-batches" and "train.batch_size=16" in finding.sentence
    assert finding.lost == pytest.approx(0.9 - 0.45, abs=0.02)
    for samples, micro_batches in ((gpu(0.45, 60e9), 4), (gpu(0.85, 8e9), 4), (gpu(0.45, 8e9), 1)):
        assert not [f for f in diagnose(run(rank(samples=samples), micro_batches=micro_batches)) if f.named]


def test_the_first_the_traced_and_the_odd_steps_do_not_count() -> None:
    """Nor does evaluation, whatever it takes."""
    steps = [step(data=9.0), *[step(evaluation=5.0)] * (STEPS - 2), step(data=3.0)]
    profile = run(rank(steps=steps, left_out=[0]))
    assert not [finding for finding in diagnose(profile) if finding.named]


def test_the_summary_and_its_table() -> None:
    block = summary(waiting(0.9))
    assert block.bottleneck == "data" and block.steps == STEPS and block.ranks == 1
    assert block.phases["data"] == pytest.approx(0.1 * STEPS)
    assert block.step_seconds is not None
    assert block.step_seconds.mean == block.step_seconds.longest == pytest.approx(0.2)
    lines = table(block).splitlines()
    assert lines[1].split() == ["waiting", "for", "data", "4.00", "50.0%", "100.00"] and lines[-1] == block.conclusion


def test_curves_are_short() -> None:
    long = {"seconds": [float(n) for n in range(1000)], "process_cpu": [1.0] * 1000}
    short = downsample(long)
    assert len(short["seconds"]) == len(short["process_cpu"]) == 250 and short["seconds"][0] == 1.5
    assert downsample({}) == {}
