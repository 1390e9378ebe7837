"""Names what holds a run up, by plain rules over the phases of its steps, with the setting that helps."""

from collections.abc import Iterable
from functools import cached_property
from statistics import fmean, median

from distill.runs.facts import Finding
from distill.runs.profile.phases import CHECKPOINT, COMPUTING, DATA, EVALUATION, EXCHANGE, PHASES
from distill.runs.profile.record import RunProfile

NAMED = 0.1  # fraction of the time that has to be lost for a bottleneck to be named
MIN_STEPS = 5  # that can be compared; fewer show nothing
OUTLIER = 2.0  # times the median, above which a step is not typical
STEADY = 0.6  # fraction of the steps in which one rank has to be the slowest; else ranks are slow in turn
COMPUTED = 0.5  # fraction of the preparation of batches; above it that computes, below it waits for storage
IDLE = 0.25  # fraction of its time that a GPU may stand still
FREE = 0.6  # fraction of a GPU's memory that has to be unused where larger micro-batches are advised


class Times:
    """Seconds of the phases over the steps that all ranks have, without the first and the traced ones.

    Evaluation is work of another kind and left out; checkpoints are left out of what makes a step typical.
    """

    def __init__(self, profile: RunProfile) -> None:
        self.profile = profile
        count = min(len(rank.steps) for rank in profile.ranks)
        left_out = {index - len(rank.steps) for rank in profile.ranks for index in rank.left_out}
        counted = [index for index in range(-count, 0) if index not in left_out] or list(range(-count, 0))
        self._steps = [[rank.steps[index] for index in counted] for rank in profile.ranks]

    def seconds(self, rank: int, phases: Iterable[str]) -> list[float]:
        """Of these phases together, by step."""
        phase_indices = [PHASES.index(phase) for phase in phases]
        return [sum(step[step_index] for step_index in phase_indices) for step in self._steps[rank]]

    def without(self, *phases: str) -> list[list[float]]:
        """Seconds of all other phases but evaluation, by rank and step."""
        kept_phases = [phase for phase in PHASES if phase not in (EVALUATION, *phases)]
        return [self.seconds(rank, kept_phases) for rank in range(len(self._steps))]

    @cached_property
    def whole(self) -> list[float]:
        """The seconds of each step, checkpoints included, on the rank that took longest."""
        return [max(step) for step in zip(*self.without(), strict=True)]

    @cached_property
    def typical(self) -> list[int]:
        """Places of the steps that are no outliers."""
        bare = [max(step) for step in zip(*self.without(CHECKPOINT), strict=True)]
        return [index for index, seconds in enumerate(bare) if seconds <= OUTLIER * median(bare)]

    def fraction(self, rank: int, *phases: str) -> float:
        """The fraction of a rank's typical steps that these phases take, checkpoints aside."""
        bare, phase_seconds = self.without(CHECKPOINT)[rank], self.seconds(rank, phases)
        return sum(phase_seconds[index] for index in self.typical) / max(
            sum(bare[index] for index in self.typical), 1e-9
        )


def diagnose(profile: RunProfile) -> list[Finding]:
    """What the rules find, the most time lost first; also what is too little to be named."""
    if not profile.ranks or min(len(rank.steps) for rank in profile.ranks) < MIN_STEPS:
        return []
    times = Times(profile)
    rules = (waiting_for_data, waiting_for_exchange, slow_rank, slow_checkpoints, small_micro_batches)
    return sorted((finding for rule in rules if (finding := rule(times))), key=lambda finding: -finding.lost)


def conclusion(profile: RunProfile, findings: list[Finding]) -> str:
    """The bottleneck in a sentence, or that there is none."""
    if findings and findings[0].named:
        return f"The bottleneck: {findings[0].sentence}"
    if not profile.ranks or min(len(rank.steps) for rank in profile.ranks) < MIN_STEPS:
        return f"The profile is too short to name a bottleneck: it has fewer than {MIN_STEPS} steps."
    return f"No bottleneck: no rule finds {NAMED:.0%} of the time lost."


def _finding(rule: str, lost: float, sentence: str) -> Finding:
    return Finding(rule=rule, lost=lost, sentence=sentence, named=lost >= NAMED)


def waiting_for_data(times: Times) -> Finding:
    """The wait of the rank in the middle; who prepares batches either computes or waits for storage."""
    waits = sorted((times.fraction(number, DATA), number) for number in range(len(times.profile.ranks)))
    lost, number = waits[len(waits) // 2]
    loader = times.profile.ranks[number].loader
    threads = 0 if loader.in_loop else loader.most_at_once
    cure = f"set train.workers={max(2 * threads, 1)}"
    if loader.computed >= COMPUTED * loader.prepared:
        why = f"batches are computed too slowly: {cure}, up to the cores that are free"
    else:
        why = f"batches wait for storage: {cure}, or data.local=DIR to read from a disk of each node"
    return _finding("data", lost, f"the loop waits for data in {lost:.0%} of its time, as {why}.")


def waiting_for_exchange(times: Times) -> Finding | None:
    """The exchange on the rank that came last, which waits for no other rank."""
    ranks, settings = len(times.profile.ranks), times.profile.settings
    if ranks < 2:
        return None
    least = [min(step) for step in zip(*(times.seconds(rank, [EXCHANGE]) for rank in range(ranks)), strict=True)]
    lost = sum(least[index] for index in times.typical) / sum(times.whole[index] for index in times.typical)
    if settings.sync == "every" and settings.micro_batches > 1:
        cure = "set backend.sync=window for one exchange a step"
    elif settings.compression == "none":
        cure = "set backend.compression=bf16 for half the bytes"
    else:
        cure = "only a faster network, or more sequences a step, would help"
    return _finding("exchange", lost, f"the ranks wait for their exchange in {lost:.0%} of the time: {cure}.")


def slow_rank(times: Times) -> Finding | None:
    """What the slowest rank takes for its own work beyond the next one, where it is the same rank in most steps."""
    computing = [
        [seconds[step_index] for step_index in times.typical] for seconds in times.without(CHECKPOINT, EXCHANGE)
    ]
    if len(computing) < 2:
        return None
    following, slowest = sorted(range(len(computing)), key=lambda rank: fmean(computing[rank]))[-2:]
    rank = times.profile.ranks[slowest]
    if fmean(step.index(max(step)) == slowest for step in zip(*computing, strict=True)) < STEADY:
        return None
    lost = (fmean(computing[slowest]) - fmean(computing[following])) / fmean(
        times.whole[step_index] for step_index in times.typical
    )
    host = f"rank {rank.rank} on {rank.host}"
    return _finding("slow rank", lost, f"all wait for {host} in {lost:.0%} of the time: relieve or replace that host.")


def slow_checkpoints(times: Times) -> Finding:
    lost = max(sum(times.seconds(rank, [CHECKPOINT])) for rank in range(len(times.profile.ranks))) / sum(times.whole)
    rarer = 4 * times.profile.settings.save_every
    return _finding("checkpoints", lost, f"checkpoints take {lost:.0%} of the time: set train.save_every={rarer}.")


def small_micro_batches(times: Times) -> Finding | None:
    """The time of forward and backward passes in which a GPU with free memory had nothing to compute."""
    samples, settings = times.profile.ranks[0].samples, times.profile.settings
    if not samples.get("gpu_busy") or settings.micro_batches < 2:
        return None
    idle = 1 - min(fmean(samples["gpu_busy"]) / max(times.fraction(0, *COMPUTING), 1e-9), 1.0)
    if idle < IDLE or fmean(samples["gpu_memory"]) > (1 - FREE) * fmean(samples["gpu_memory_total"]):
        return None
    lost = idle * times.fraction(0, *COMPUTING)
    cure = (
        f"set train.batch_size={2 * settings.batch_size}, with the present size of a step as train.sequences_per_step"
    )
    return _finding("small micro-batches", lost, f"the GPU waits for the host in {lost:.0%} of the time: {cure}.")
