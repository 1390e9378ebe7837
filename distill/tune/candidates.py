"""Which changes are worth a trial, by the profile of the run as it is."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from distill.runs.profile.figures import Figures
from distill.runs.profile.finding import Finding
from distill.runs.profile.phases import DATA
from distill.runs.profile.preparation import preparation
from distill.runs.profile.record import RunProfile
from distill.runs.profile.rules.micro_batch import larger
from distill.tune.candidate import Candidate, keeps_student

FORMAT_SPEEDUP = 1.2  # of products in bf16, below which the format is not tried
WAITING = 0.01  # share of the time that the loop waits for data, below which threads are not tried
WORTHWHILE = 1.02  # times as fast: less is no reason to go further the same way


def candidates(profile: RunProfile, findings: list[Finding], given: dict[str, Any]) -> dict[str, list[Candidate]]:
    """The changes to try, by kind: first what the rules advise, then what only a trial can say.

    Args:
        given: the settings of the run, nested by their names.
    """
    figures = Figures(profile)
    found = {"rules": list(_by_rules(findings))}
    known = [candidate.change for candidate in found["rules"]]
    for kind, propose in PROPOSALS.items():
        found[kind] = [candidate for candidate in propose(figures, given) if candidate.change not in known]
    return found


def _by_rules(findings: list[Finding]) -> Iterator[Candidate]:
    for finding in findings:
        if finding.change and finding.gain > 1.01 and all(keeps_student(*each) for each in finding.change.items()):
            yield Candidate(f"rule: {finding.rule}", finding.change, finding.gain, finding.sentence)


def _workers(figures: Figures, given: dict[str, Any]) -> Iterator[Candidate]:
    """One more thread that prepares batches, where the loop waits for any: max(T - D, P / n, U / c)."""
    found = preparation(figures)
    if found is not None and float(figures.phase(DATA).max()) > WAITING * figures.step:
        threads = found.threads + 1
        gain = found.step / found.seconds(threads)
        yield Candidate("another thread for batches", {"train.workers": threads}, gain, "the loop waits for data")


def _micro_batch(figures: Figures, given: dict[str, Any]) -> Iterator[Candidate]:
    """Twice the rows in a micro-batch, where there is room for what the whole process takes now, once more."""
    rank = figures.ranks[0]
    if rank.device == "cpu":
        used, free = max(rank.samples["process_memory"]), min(rank.samples["memory_free"]) / rank.local_ranks
    else:
        used = max(rank.samples["gpu_memory"])
        free = rank.samples["gpu_memory_total"][0] - used
    if free > used:
        yield from filter(None, [_rows(figures, 2, None)])


def _rows(figures: Figures, times: int, predicted: float | None) -> Candidate | None:
    """So many times the rows in a micro-batch; None where the rows of a step do not allow it."""
    settings, change = figures.settings, larger(figures, times)
    if times > settings.micro_batches or change.get("train.batch_size") != times * settings.batch_size:
        return None
    name = f"{times} times the rows in a micro-batch"
    further = partial(_again, lambda gain: _rows(figures, 2 * times, gain)) if times < 8 else None
    return Candidate(name, change, predicted, _reason(predicted), further)


def _teacher(figures: Figures, given: dict[str, Any]) -> Iterator[Candidate]:
    """Several micro-batches in one forward of a teacher that runs live."""
    teacher = given.get("teacher") or {}
    cache = teacher.get("cache") or {}
    live = teacher.get("kind") != "none" and cache.get("top_k") is None and cache.get("sampled") is None
    if live and figures.settings.micro_batches > 1:
        yield from filter(None, [_teachers(figures, 2 * int(teacher.get("micro_batches") or 1), None)])


def _teachers(figures: Figures, count: int, predicted: float | None) -> Candidate | None:
    if count > max(figures.settings.micro_batches, 2):
        return None
    further = partial(_again, lambda gain: _teachers(figures, 2 * count, gain)) if count < 8 else None
    return Candidate(
        f"{count} micro-batches in a forward of the teacher",
        {"teacher.micro_batches": count},
        predicted,
        _reason(predicted),
        further,
    )


def _again(make: Callable[[float], Candidate | None], before: float, doubled: float) -> Candidate | None:
    """The candidate of another doubling, after the first one took a step from `before` to `doubled` seconds.

    Of what each micro-batch costs besides its rows, T = c + a / k, every doubling saves half of what the last one did.
    """
    if before < WORTHWHILE * doubled:
        return None
    return make(before / (doubled - (before - doubled) / 2))


def _reason(predicted: float | None) -> str:
    if predicted is None:
        return "each micro-batch costs something besides its rows; how much, a trial says"
    return "a doubling saves half of what the one before did"


def _rings(figures: Figures, given: dict[str, Any]) -> Iterator[Candidate]:
    if len(figures.ranks) > 1 and str(given["backend"]["rings"]) != "auto":
        yield Candidate("rings by measurement", {"backend.rings": "auto"}, None, "connections may be capped one by one")


def _threads(figures: Figures, given: dict[str, Any]) -> Iterator[Candidate]:
    """On processors: all cores of a rank for torch, or one less, which the threads for batches get."""
    rank = figures.ranks[0]
    cores = max(rank.cores // rank.local_ranks, 1)
    now = given["backend"]["threads"]
    for count in sorted({cores, cores - 1} - {0, now or cores}, reverse=True):
        if rank.device == "cpu":
            name = f"{count} thread{'s' * (count > 1)} of torch"
            yield Candidate(name, {"backend.threads": count}, None, f"a rank has {cores} cores")


def _kernels(figures: Figures, given: dict[str, Any]) -> Iterator[Candidate]:
    if given["precision"]["kernels"] == "plain":
        yield Candidate("the package's kernels", {"precision.kernels": "auto"}, None, "they replace slower ones")


def _precision(figures: Figures, given: dict[str, Any]) -> Iterator[Candidate]:
    """bf16 in place of fp32, where this processor or GPU multiplies faster in it.

    How much a step gains is not predicted: the measured speed of products alone is several times that of the passes.
    """
    import torch

    from distill.models.kernels.precision import bf16_speedup

    if given["precision"]["student"] != "fp32" or given["precision"]["teacher"] != "fp32":
        return
    speedup = bf16_speedup(torch.device(figures.ranks[0].device))
    if speedup >= FORMAT_SPEEDUP:
        change = {"precision.student": "bf16", "precision.teacher": "bf16"}
        yield Candidate("bf16", change, None, f"products alone are {speedup:.1f} times as fast in it")


def _compile(figures: Figures, given: dict[str, Any]) -> Iterator[Candidate]:
    if not given["precision"]["compile"]:
        yield Candidate("compiled models", {"precision.compile": "true"}, None, "what it gains, a trial says")


PROPOSALS: dict[str, Callable[[Figures, dict[str, Any]], Iterator[Candidate]]] = {
    "workers": _workers,
    "micro_batch": _micro_batch,
    "teacher": _teacher,
    "rings": _rings,
    "threads": _threads,
    "kernels": _kernels,
    "precision": _precision,
    "compile": _compile,
}
