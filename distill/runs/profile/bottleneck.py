"""What a profile shows, gathered from all ranks: the bottleneck that plain rules name, with the setting that helps."""

import json
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from distill.runs.facts import Finding, Profile, StepTimes
from distill.runs.profile.phases import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    EXCHANGE,
    FORWARD,
    PHASES,
    TEACHER,
    TITLES,
    RankProfile,
    Recorder,
)
from distill.runs.run import Run
from distill.runtime.files import write_text

RANKS = "profile.json"  # in the folder of the profile: the records of all ranks, and the findings of the rules
TABLE = "profile.txt"  # beside it: a table to read
NAMED = 0.1  # fraction of the time that has to be lost for a bottleneck to be named
MIN_STEPS = 5  # that can be compared; fewer show nothing
OUTLIER = 2.0  # times the median, above which a step is not typical
STEADY = 0.6  # fraction of the steps in which one rank has to be the slowest; else ranks are slow in turn
IDLE = 0.25  # fraction of its time that a GPU may stand still
FREE = 0.6  # fraction of a GPU's memory that has to be unused where larger micro-batches are advised

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSettings:
    """The settings that the rules read, as they were in force; `micro_batches` of a rank in a step."""

    batch_size: int
    micro_batches: int
    checkpoints: dict[str, int]  # by the setting that makes them: steps between two
    sync: str = "window"
    compression: str = "none"
    workers: int = 1
    async_checkpoints: bool = False


class Times:
    """Seconds of the R ranks over their S steps.

    Evaluation is work of another kind and left out; checkpoints are left out of what makes a step typical.

    Attributes:
        work: of each rank in each step, without evaluation and checkpoints, [R, S].
        whole: of each step, checkpoints included, on the rank that took longest, [S].
        typical: which steps are no outliers, [S].
    """

    def __init__(self, ranks: Sequence[RankProfile]) -> None:
        self._seconds = np.array([rank.steps for rank in ranks])  # [R, S, phases]
        self.work = self.of(*(phase for phase in PHASES if phase not in (EVALUATION, CHECKPOINT)))
        self.whole = (self.work + self.of(CHECKPOINT)).max(0)
        longest = self.work.max(0)
        self.typical = longest <= OUTLIER * np.median(longest)

    def of(self, *phases: str) -> NDArray[np.float64]:
        """Of these phases together, [R, S]."""
        return self._seconds[:, :, [PHASES.index(phase) for phase in phases]].sum(2)

    def fractions(self, *phases: str) -> NDArray[np.float64]:
        """The fraction of its typical steps that these phases take, by rank."""
        return self.of(*phases)[:, self.typical].sum(1) / np.maximum(self.work[:, self.typical].sum(1), 1e-9)


def diagnose(ranks: Sequence[RankProfile], settings: RunSettings) -> list[Finding]:
    """What the rules find, the most time lost first; also what is too little to be named."""
    if len(ranks[0].steps) < MIN_STEPS:
        return []
    times = Times(ranks)
    findings = [
        waiting_for_data(times, settings),
        waiting_for_exchange(times, settings),
        slow_rank(times, ranks),
        slow_checkpoints(times, settings),
        small_micro_batches(times, settings, ranks[0].samples),
    ]
    return sorted((finding for finding in findings if finding is not None), key=lambda finding: -finding.lost)


def conclusion(findings: Sequence[Finding]) -> str:
    """The bottleneck in a sentence, or that there is none."""
    if not findings:
        return f"The profile is too short to name a bottleneck: it has fewer than {MIN_STEPS} typical steps."
    if findings[0].named:
        return f"The bottleneck: {findings[0].sentence}"
    return f"No bottleneck: no rule finds {NAMED:.0%} of the time lost."


def _finding(rule: str, lost: float, sentence: str) -> Finding:
    return Finding(rule=rule, lost=float(lost), sentence=sentence, named=bool(lost >= NAMED))


def waiting_for_data(times: Times, settings: RunSettings) -> Finding:
    """The wait of the rank in the middle."""
    waits = sorted(times.fractions(DATA))
    lost = waits[len(waits) // 2]
    cure = f"set train.workers={max(2 * settings.workers, 1)}, up to the cores that are free"
    storage = "or data.local=DIR, to read from a disk of each node, where the text lies on slow storage"
    return _finding("data", lost, f"the loop waits for data in {lost:.0%} of its time: {cure}, {storage}.")


def waiting_for_exchange(times: Times, settings: RunSettings) -> Finding | None:
    """The exchange on the rank that came last, which waits for no other rank."""
    if len(times.work) < 2:
        return None
    lost = times.of(EXCHANGE).min(0)[times.typical].sum() / times.whole[times.typical].sum()
    cure = "only a faster network, or more sequences a step, would help"
    if settings.sync == "every" and settings.micro_batches > 1:
        cure = "set backend.sync=window for one exchange a step"
    elif settings.compression == "none":
        cure = "set backend.compression=bf16 for half the bytes"
    return _finding("exchange", lost, f"the ranks wait for their exchange in {lost:.0%} of the time: {cure}.")


def slow_rank(times: Times, ranks: Sequence[RankProfile]) -> Finding | None:
    """What the slowest rank takes for its own work beyond the next one, where it is the same rank in most steps."""
    own = (times.work - times.of(EXCHANGE))[:, times.typical]
    if len(own) < 2:
        return None
    following, slowest = np.argsort(own.mean(1))[-2:]
    if (own.argmax(0) == slowest).mean() < STEADY:
        return None
    lost = (own[slowest] - own[following]).mean() / times.whole[times.typical].mean()
    host = f"rank {ranks[slowest].rank} on {ranks[slowest].host}"
    return _finding("slow rank", lost, f"all wait for {host} in {lost:.0%} of the time: relieve or replace that host.")


def slow_checkpoints(times: Times, settings: RunSettings) -> Finding:
    lost = times.of(CHECKPOINT).sum(1).max() / times.whole.sum()
    name, every = min(settings.checkpoints.items(), key=lambda item: item[1])
    cure = f"{name}={4 * every}"
    if name == "train.save_every" and not settings.async_checkpoints:
        cure = f"train.async_checkpoints=true, or {cure}"
    return _finding("checkpoints", lost, f"checkpoints take {lost:.0%} of the time: set {cure}.")


def small_micro_batches(times: Times, settings: RunSettings, samples: dict[str, list[float]]) -> Finding | None:
    """The time of forward and backward passes in which the GPU of rank 0, with free memory, had nothing to compute."""
    if not samples.get("gpu_busy") or settings.micro_batches < 2:
        return None
    computing = times.fractions(TEACHER, FORWARD, BACKWARD)[0]
    idle = 1 - min(np.mean(samples["gpu_busy"]) / max(computing, 1e-9), 1.0)
    if idle < IDLE or np.mean(samples["gpu_memory"]) > (1 - FREE) * np.mean(samples["gpu_memory_total"]):
        return None
    lost, larger = idle * computing, 2 * settings.batch_size
    cure = f"set train.batch_size={larger}, with the present size of a step as train.sequences_per_step"
    return _finding("small micro-batches", lost, f"the GPU waits for the host in {lost:.0%} of the time: {cure}.")


def recorder(run: Run) -> AbstractContextManager[Recorder | None]:
    """The recorder of this rank, as a context around training; a null context without `profile=on`."""
    if not run.config.profile.enabled:
        return nullcontext()
    return Recorder(run.config.profile, run.folder.path, run.data.batches.step_shape.micro_batches, run.ranks)


def gather_profile(profile: Recorder | None, run: Run) -> Profile | None:
    """Gather the profile from all ranks, which all call it after the recorder's context has ended; None without one.

    Rank 0 writes what all ranks recorded into the run folder, with the run's identity, and logs where the time goes.
    """
    if profile is None:
        return None
    ranks = [RankProfile(**content) for content in run.ranks.gather(asdict(profile.record()))]
    config, shape, every = run.config, run.data.batches.step_shape, run.config.evaluate.every_steps
    saves = {"train.save_every": config.train.save_every} | ({} if every is None else {"evaluate.every_steps": every})
    backend, threads = config.backend, run.data.batches.threads
    settings = RunSettings(
        shape.batch_size, shape.micro_batches, saves, backend.sync, backend.compression, threads,
        config.train.async_checkpoints,
    )  # fmt: skip
    found = summary(ranks, settings)
    if run.ranks.rank == 0:
        content = {"ranks": [asdict(each) for each in ranks], "settings": asdict(settings)}
        content |= {"summary": found.model_dump(), "identity": run.identity}
        profile.folder.mkdir(parents=True, exist_ok=True)
        for name, text in {RANKS: json.dumps(content), TABLE: f"{table(found)}\n"}.items():
            write_text(profile.folder / name, text)
        logger.info(table(found) if config.profile.stop_after else found.conclusion)
    return found


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
    median, p95, longest = np.percentile(seconds, [50, 95, 100]).tolist()
    return StepTimes(mean=float(seconds.mean()), median=median, p95=p95, longest=longest, steps=len(seconds))


def table(profile: Profile) -> str:
    """Where the time goes: a line for each phase, and the bottleneck."""
    steps, total = max(profile.steps, 1), max(sum(profile.phases.values()), 1e-9)
    lines = [f"{'phase':<24}{'seconds':>10}{'of all':>8}{'ms a step':>11}"]
    for phase, seconds in profile.phases.items():
        lines.append(f"{TITLES[phase]:<24}{seconds:>10.2f}{seconds / total:>8.1%}{1000 * seconds / steps:>11.2f}")
    return "\n".join([*lines, profile.conclusion])
