"""Rule: the loop waits for batches whose preparation waits for storage."""

from distill.runs.profile.figures import Figures
from distill.runs.profile.finding import Finding, percent
from distill.runs.profile.preparation import MOST_THREADS, preparation
from distill.runs.profile.rules.loader import computes

NAME = "I/O wait"


def find(figures: Figures) -> Finding | None:
    """Lost is the wait for data, D / T, where less than half of the preparation P is computing.

    Prediction for n threads: T' = max(T - D, P / n, U / c), as reads that wait do not hinder each other. Storage that
    is out of bandwidth, not of patience, gives less; then the rows belong on a disk of the node.
    """
    found = preparation(figures)
    if found is None or computes(found):
        return None
    sentence = (
        f"The loop waits for data in {percent(found.lost)} of its time, and its preparation waits for storage in "
        f"{percent(1 - found.computing)} of its own"
    )
    local = "Rows on a disk of each node (corpus.local=DIR) need no network."
    threads = found.best_threads(MOST_THREADS)
    gain = found.step / found.seconds(threads)
    if threads == found.threads or gain < 1.02:
        return Finding(NAME, found.lost, sentence, local, gain=found.step / (found.step - found.waited))
    return Finding(NAME, found.lost, sentence, local, {"train.workers": threads}, gain)
