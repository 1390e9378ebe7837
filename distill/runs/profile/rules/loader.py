"""Rule: the loop waits for batches whose preparation computes."""

import math

from distill.runs.profile.figures import Figures
from distill.runs.profile.finding import Finding, percent
from distill.runs.profile.preparation import Preparation, preparation

NAME = "CPU-bound loader"
COMPUTING = 0.5  # share of the preparation: above it computes, below it waits for storage
ONE_AT_A_TIME = (0.8, 1.15)  # threads that compute on average, of several: they hold Python's lock in turn


def find(figures: Figures) -> Finding | None:
    """Lost is the wait for data, D / T, where at least half of the preparation P is computing.

    Prediction for n threads: T' = max(T - D, P / n, U / c), with U seconds of processors a step and c cores that other
    programs leave (`Preparation.seconds`). Threads that hold Python's lock in turn are recognised by
    computing one at a time, though there are several: more of them gain nothing.
    """
    found = preparation(figures)
    if found is None or not computes(found):
        return None
    who = f"{found.threads} thread{'s' * (found.threads > 1)}" if found.threads else "the loop itself"
    sentence = (
        f"The loop waits for data in {percent(found.lost)} of its time, while {who} "
        f"compute{'s' * (found.threads < 2)} batches"
    )
    if held_by_python(found):
        advice = "Python computes in one thread at a time, so that more threads gain nothing: prepare less for a row."
        return Finding(NAME, found.lost, sentence, advice, gain=found.step / (found.step - found.waited))
    threads = found.best_threads(math.ceil(found.cores) + 1)
    gain = found.step / found.seconds(threads)
    if threads == found.threads or gain < 1.02:
        advice = (
            f"The {found.cores:.1f} cores that this rank can use are busy: give it more, or prepare less for a row."
        )
        return Finding(NAME, found.lost, sentence, advice, gain=found.step / (found.step - found.waited))
    return Finding(NAME, found.lost, sentence, change={"train.workers": threads}, gain=gain)


def computes(found: Preparation) -> bool:
    """Whether it is the processor that preparation needs, rather than storage."""
    return found.computing >= COMPUTING or held_by_python(found)


def held_by_python(found: Preparation) -> bool:
    """Whether the threads compute one after the other."""
    least, most = ONE_AT_A_TIME
    return found.threads > 1 and found.computing < COMPUTING and least <= found.computing * found.threads <= most
