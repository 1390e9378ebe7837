"""What the report and results.json say of a profile: shares of the phases, findings, samples over time, energy."""

from typing import Any

import numpy as np

from distill.runs.profile.figures import Figures
from distill.runs.profile.finding import Finding
from distill.runs.profile.phases import PHASES
from distill.runs.profile.record import RankProfile, RunProfile
from distill.runs.profile.rules import LEAST_STEPS, conclusion, diagnose

SHOWN = 300  # samples of a curve
LEAST_FREE = 0.05  # share of a host's memory, below which it is nearly full


def summary(profile: RunProfile) -> dict[str, Any]:
    """The profile of a run, short enough for results.json; the records of the ranks have the rest."""
    findings = diagnose(profile)
    return {
        "conclusion": conclusion(profile, findings),
        "findings": [finding.as_dict() for finding in findings],
        "bottleneck": _first_named(findings),
        "steps": max(rank.num_steps for rank in profile.ranks),
        "phases": phase_seconds(profile.ranks),
        "step_seconds": _step_seconds(profile),
        "ranks": len(profile.ranks),
        "samples": shortened(profile.ranks[0].samples),
        "energy": energy(profile.ranks),
        "notes": list(dict.fromkeys(note for rank in profile.ranks for note in [*rank.notes, *nearly_full(rank)])),
    }


def _first_named(findings: list[Finding]) -> str | None:
    return next((finding.rule for finding in findings if finding.named), None)


def phase_seconds(ranks: list[RankProfile]) -> dict[str, float]:
    """Seconds of each phase over all steps, the mean of the ranks."""
    return {phase: float(np.mean([rank.totals.get(phase, 0.0) for rank in ranks])) for phase in PHASES}


def _step_seconds(profile: RunProfile) -> dict[str, float] | None:
    """Of the steps that are known one by one, without the first ones, those that were traced, and evaluation."""
    if min(len(rank.steps) for rank in profile.ranks) < LEAST_STEPS:
        return None
    figures = Figures(profile)
    times = figures.with_checkpoints
    return {
        "mean": float(times.mean()),
        "typical": figures.step,
        "median": float(np.median(times)),
        "p95": float(np.quantile(times, 0.95)),
        "longest": float(times.max()),
        "steps": len(times),
    }


def shortened(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    """Means of neighbours, so that each curve has at most `SHOWN` points."""
    count = len(samples.get("seconds", []))
    parts = np.array_split(np.arange(count), min(count, SHOWN)) if count else []
    return {
        name: [float(f"{np.mean([values[at] for at in part]):.5g}") for part in parts]
        for name, values in samples.items()
    }


def energy(ranks: list[RankProfile]) -> dict[str, float]:
    """kWh by part: the processors of each host once, the GPUs of all ranks; empty where no machine says it."""
    hosts = {rank.host: rank.energy["processors"] for rank in ranks if "processors" in rank.energy}
    gpus = [rank.energy["gpu"] for rank in ranks if "gpu" in rank.energy]
    return ({"processors": sum(hosts.values())} if hosts else {}) | ({"gpus": sum(gpus)} if gpus else {})


def nearly_full(rank: RankProfile) -> list[str]:
    """A note on a host whose memory was nearly full at any time."""
    free, total = rank.samples.get("memory_free", []), rank.samples.get("memory_total", [])
    if not free or min(free) >= LEAST_FREE * total[0]:
        return []
    return [f"the memory of {rank.host} was nearly full: {min(free) / 2**30:.2f} GiB were left at one time"]
