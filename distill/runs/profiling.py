"""The profile of a run: begun from its settings, gathered from all ranks, written and logged by rank 0."""

import json
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from distill.config.settings import Config
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.runs.facts import Profile, StepTimes
from distill.runs.profile.bottleneck import MIN_STEPS, Times, conclusion, diagnose
from distill.runs.profile.phases import PHASES, TITLES
from distill.runs.profile.record import RankProfile, RunProfile, RunSettings
from distill.runs.profile.recorder import Recorder
from distill.runtime.files import atomic

RANKS = "profile.json"  # in the folder of the profile: the records of all ranks, and the findings of the rules
TABLE = "profile.txt"  # beside it: a table to read
MAX_POINTS = 300  # of a curve

logger = logging.getLogger(__name__)


def recorder(config: Config, path: Path, batches: Batches, ranks: Ranks) -> AbstractContextManager[Recorder | None]:
    """The recorder of this rank, as a context around training; a null context without `profile=on`."""
    if not config.profile.enabled:
        return nullcontext()
    return Recorder(config.profile, path, batches.step_shape.micro_batches, ranks)


def gather_profile(
    profile: Recorder | None, config: Config, batches: Batches, ranks: Ranks, identity: dict[str, Any]
) -> Profile | None:
    """Gather the profile from all ranks, which all call it after the recorder's context has ended; None without one.

    Rank 0 writes what all ranks recorded into the run folder, with the run's identity, and logs where the time goes.
    """
    if profile is None:
        return None
    profiles = [RankProfile.of(content) for content in ranks.gather(asdict(profile.record()))]
    settings = RunSettings(
        batches.step_shape.batch_size,
        batches.step_shape.micro_batches,
        config.train.save_every,
        config.backend.sync,
        config.backend.compression,
    )
    run_profile = RunProfile(profiles, settings)
    summarized = summary(run_profile)
    if ranks.rank == 0:
        with atomic(profile.folder / RANKS) as new:
            new.write_text(json.dumps(asdict(run_profile) | {"summary": summarized.model_dump(), "identity": identity}))
        with atomic(profile.folder / TABLE) as new:
            new.write_text(table(summarized) + "\n")
        logger.info(table(summarized) if config.profile.stop_after else summarized.conclusion)
    return summarized


def summary(profile: RunProfile) -> Profile:
    """The profile of a run, short enough for results.json; the records of the ranks have the rest."""
    findings = diagnose(profile)
    return Profile(
        conclusion=conclusion(profile, findings),
        findings=findings,
        bottleneck=next((finding.rule for finding in findings if finding.named), None),
        steps=max(rank.num_steps for rank in profile.ranks),
        phases={phase: fmean(rank.totals.get(phase, 0.0) for rank in profile.ranks) for phase in PHASES},
        step_seconds=step_seconds(profile),
        ranks=len(profile.ranks),
        samples=downsample(profile.ranks[0].samples),
    )


def step_seconds(profile: RunProfile) -> StepTimes | None:
    """Times of the steps that were recorded one by one, without the first, the traced ones and evaluation."""
    if min(len(rank.steps) for rank in profile.ranks) < MIN_STEPS:
        return None
    seconds = Times(profile).whole
    p95 = quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    return StepTimes(mean=fmean(seconds), median=median(seconds), p95=p95, longest=max(seconds), steps=len(seconds))


def downsample(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    """Average neighbouring samples, so that each curve has at most `MAX_POINTS` points."""
    count = len(samples.get("seconds", []))
    width = max(1, -(-count // MAX_POINTS))
    return {
        name: [float(f"{fmean(values[at : at + width]):.5g}") for at in range(0, count, width)]
        for name, values in samples.items()
    }


def table(profile: Profile) -> str:
    """Where the time goes: a line for each phase, and the bottleneck."""
    steps, total = max(profile.steps, 1), max(sum(profile.phases.values()), 1e-9)
    lines = [f"{'phase':<24}{'seconds':>10}{'of all':>8}{'ms a step':>11}"]
    for phase, seconds in profile.phases.items():
        lines.append(f"{TITLES[phase]:<24}{seconds:>10.2f}{seconds / total:>8.1%}{1000 * seconds / steps:>11.2f}")
    return "\n".join([*lines, profile.conclusion])
