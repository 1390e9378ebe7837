"""Rule: a GPU computes too little at a time."""

from typing import Any

from distill.runs.profile.figures import Figures
from distill.runs.profile.finding import Finding, percent
from distill.runs.profile.phases import COMPUTING

NAME = "small micro-batches"
IDLE = 0.25  # share of its time that the GPU may stand still beside computing
FREE = 0.6  # of its memory, that has to be unused
MOST = 16  # times the rows


def find(figures: Figures) -> Finding | None:
    """Lost is the time of forward and backward passes in which the GPU had nothing to compute: F (1 - u) / T.

    u is its utilisation while these passes take F of a step T: what is left of it waits for the host, which starts
    operations one by one, whatever the rows in them. With k times the rows in a micro-batch that wait falls to 1 / k:
    T' = T - F (1 - u) (1 - 1 / k), for the largest power of two k that memory and the rows of a step allow.
    """
    rank = figures.ranks[0]
    busy, used, total = (figures.sample(name, rank) for name in ("gpu_busy", "gpu_memory", "gpu_memory_total"))
    if busy is None or not used or not total:
        return None
    computing = float(sum(figures.phase(phase)[0] for phase in COMPUTING))
    utilisation = min(busy * figures.step / max(computing, 1e-9), 1.0)
    if 1 - utilisation < IDLE or used > (1 - FREE) * total:
        return None
    waiting = computing * (1 - utilisation)
    sentence = (
        f"The GPU computes in {percent(busy)} of the time and waits for the host in {percent(waiting / figures.step)}, "
        f"with {percent(1 - used / total)} of its memory free"
    )
    times = _times(figures, total / used)
    change = larger(figures, times)
    gain = figures.step / (figures.step - waiting * (1 - 1 / times))
    advice = "" if change else "The rows of a step are in one micro-batch already: precision.compile=true starts less."
    return Finding(NAME, waiting / figures.step, sentence, advice, change, gain)


def _times(figures: Figures, by_memory: float) -> int:
    """How many times the rows: a power of two that memory, and the micro-batches of a step, allow."""
    most = min(by_memory, figures.settings.micro_batches, MOST)
    return 1 << max(int(most).bit_length() - 1, 0)


def larger(figures: Figures, times: int) -> dict[str, Any]:
    """So many times the rows in a micro-batch, and the same step; empty where that cannot be."""
    settings = figures.settings
    if times < 2:
        return {}
    if settings.rows_per_step is not None:
        return {"train.batch_size": settings.batch_size * times}
    if settings.accumulate % times:
        return larger(figures, times // 2)
    return {"train.batch_size": settings.batch_size * times, "train.accumulate": settings.accumulate // times}
