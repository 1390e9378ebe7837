"""Rule: the run waits for memory, which is full."""

from typing import Any

from distill.runs.profile.figures import Figures
from distill.runs.profile.finding import Finding, percent

NAME = "memory"
MORE = "That is the gain where they fit: while pages still come from a disk, halve them again or give it more memory."
STALLED = 0.03  # share of the time in which tasks stall for memory, that shows it to be short
SAMPLED = ("memory_stalled", "major_faults", "process_user")
FAULTS = 5.0  # pages a second that a rank has to wait for: fewer are its own files, read for the first time


def find(figures: Figures) -> Finding | None:
    """Lost is the time in which the threads of torch do not compute: 1 - u / n, on a rank that waits for memory.

    u are the seconds of processors a second that the process spends in its own code, without the system's, and n its
    threads; both over the time of the steps that count, however long each of them waits. A rank waits for memory where
    pages come from a disk and Linux counts tasks that stall for memory; that count alone says far too little, as it
    leaves out the search for pages to give away. Prediction with memory enough: T' = T (1 - lost), the more exact the
    better the threads share their work. Half the rows in a micro-batch, and twice as many of these, are the same step;
    whether they fit is not known, as a process does not say how much of its memory is there for the rows, so that the
    prediction is the most that this advice can gain. On a GPU, whose driver counts no such time, a memory that was
    found full is said and its loss is not known.
    """
    lost, waited_for, rank = 0.0, 0.0, None
    for each in figures.ranks:
        stalled, faults, user = (figures.sample(name, each, outliers=True) or 0.0 for name in SAMPLED)
        if faults >= FAULTS and stalled >= STALLED:
            computing = user / max(each.threads, 1)
            if (found := min(max(stalled, 1 - computing), 0.99)) > lost:
                lost, waited_for, rank = found, faults, each
    if rank is None:
        return _on_gpu(figures)
    where = f" on {rank.host}" if len(figures.ranks) > 1 else ""
    sentence = (
        f"The run waits for memory in {percent(lost)} of its time{where}: {waited_for:,.0f} pages a second come from a "
        "disk"
    )
    change = smaller(figures)
    advice = MORE if change else "The micro-batch cannot be halved: it needs more memory."
    return Finding(NAME, lost, sentence, advice, change, gain=1 / (1 - lost))


def _on_gpu(figures: Figures) -> Finding | None:
    retries = max(rank.retries for rank in figures.ranks)
    if not retries:
        return None
    sentence = f"The GPU's memory was found full {retries} times, and what was kept for reuse was given back"
    return Finding(NAME, 0.0, sentence, "What that costs is not known.", smaller(figures))


def smaller(figures: Figures) -> dict[str, Any]:
    """Half the rows in a micro-batch, and the same step; empty where there is one row."""
    settings = figures.settings
    half = settings.batch_size // 2
    if not half or (settings.batch_size % 2 and settings.rows_per_step is None):
        return {}
    again = {} if settings.rows_per_step is not None else {"train.accumulate": 2 * settings.accumulate}
    return {"train.batch_size": half, **again}
