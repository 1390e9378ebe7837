"""The profile of a run: begun from its settings, gathered from all ranks, written and logged by rank 0."""

import json
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from distill.config.settings import Config
from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.runs.facts import Profile, StepTimes
from distill.runs.profile.bottleneck import RunSettings, Times, conclusion, diagnose
from distill.runs.profile.phases import PHASES, TITLES, RankProfile, Recorder
from distill.runtime.files import atomic

RANKS = "profile.json"  # in the folder of the profile: the records of all ranks, and the findings of the rules
TABLE = "profile.txt"  # beside it: a table to read

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
    profiles = [RankProfile(**content) for content in ranks.gather(asdict(profile.record()))]
    settings = RunSettings(
        batches.step_shape.batch_size,
        batches.step_shape.micro_batches,
        {"train.save_every": config.train.save_every}
        | ({} if config.evaluate.every_steps is None else {"evaluate.every_steps": config.evaluate.every_steps}),
        config.backend.sync,
        config.backend.compression,
        batches.threads,
    )
    summarized = summary(profiles, settings)
    if ranks.rank == 0:
        content = {"ranks": [asdict(each) for each in profiles], "settings": asdict(settings)}
        profile.folder.mkdir(parents=True, exist_ok=True)
        with atomic(profile.folder / RANKS) as new:
            new.write_text(json.dumps(content | {"summary": summarized.model_dump(), "identity": identity}))
        with atomic(profile.folder / TABLE) as new:
            new.write_text(table(summarized) + "\n")
        logger.info(table(summarized) if config.profile.stop_after else summarized.conclusion)
    return summarized


def summary(ranks: Sequence[RankProfile], settings: RunSettings) -> Profile:
    """The profile of a run, short enough for results.json; the records of the ranks have the rest."""
    findings = diagnose(ranks, settings)
    return Profile(
        conclusion=conclusion(findings),
        findings=findings,
        bottleneck=next((finding.rule for finding in findings if finding.named), None),
        steps=ranks[0].num_steps,
        phases={phase: sum(rank.totals[phase] for rank in ranks) / len(ranks) for phase in PHASES},
        step_seconds=step_seconds(ranks) if findings else None,
        ranks=len(ranks),
        samples=ranks[0].samples,
    )


def step_seconds(ranks: Sequence[RankProfile]) -> StepTimes:
    """Times of the steps that were recorded one by one, without the first, the traced ones and evaluation."""
    seconds = Times(ranks).whole
    return StepTimes(
        mean=float(seconds.mean()),
        median=float(np.median(seconds)),
        p95=float(np.percentile(seconds, 95)),
        longest=float(seconds.max()),
        steps=len(seconds),
    )


def table(profile: Profile) -> str:
    """Where the time goes: a line for each phase, and the bottleneck."""
    steps, total = max(profile.steps, 1), max(sum(profile.phases.values()), 1e-9)
    lines = [f"{'phase':<24}{'seconds':>10}{'of all':>8}{'ms a step':>11}"]
    for phase, seconds in profile.phases.items():
        lines.append(f"{TITLES[phase]:<24}{seconds:>10.2f}{seconds / total:>8.1%}{1000 * seconds / steps:>11.2f}")
    return "\n".join([*lines, profile.conclusion])
