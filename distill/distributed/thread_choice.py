"""How many threads compute on a processor that other programs may use, too: measured before anything else runs.

The threads of a product wait for each other. Where another program has taken the core of one of them all wait, so that
two threads may be slower than one; a run then takes fewer.
"""

import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from distill.config.settings import BackendConfig

if TYPE_CHECKING:
    from distill.distributed.ranks import Ranks

WINDOW = 0.05  # seconds of each measurement: longer than the turn that a system gives to a program
ROUNDS = 3
QUIET = 0.7  # fraction of the ideal speed above which the machine counts as idle
CLEARLY = 1.15  # times as fast, for fewer threads to be taken: what is measured varies
HEIGHT, WIDTH = 256, 384  # of the product that a thread computes, a few milliseconds as in the layers of small models

logger = logging.getLogger(__name__)


def use_quickest_threads() -> None:
    """Take as many of torch's threads as are quickest just now; all where `OMP_NUM_THREADS` sets their number."""
    available = torch.get_num_threads()
    if available == 1 or "OMP_NUM_THREADS" in os.environ:
        return
    chosen = quickest(available, _rate)
    torch.set_num_threads(chosen)
    if chosen < available:
        logger.info(
            f"backend.threads={chosen}: other programs are at work here, and {available} threads would be slower; "
            f"backend.threads={available} takes all"
        )


def keep_threads(settings: BackendConfig, recorded: Mapping[str, Any], ranks: "Ranks") -> dict[str, int]:
    """Continue with as many threads as a run began with, since its last bits may depend on them; for its checkpoints.

    A run of several ranks begins with as many on each as the one with the fewest has found. All ranks call it.

    Args:
        recorded: of the checkpoint to resume from, as this function gave it; empty where there is none. Where other
            numbers of ranks shared a host, each takes its share anew.
    """
    begun, now, local_size = recorded.get("threads"), torch.get_num_threads(), ranks.local_size
    ranks.barrier()  # hosts may be minutes apart in reading a checkpoint
    fewest = min(ranks.gather(now))
    if settings.threads is None and "OMP_NUM_THREADS" not in os.environ:
        is_same = recorded.get("local_ranks", 1) == local_size
        if is_same and isinstance(begun, int) and 0 < begun <= len(os.sched_getaffinity(0)):
            if begun != now:
                torch.set_num_threads(begun)
                logger.info(f"backend.threads={begun}, as this run began; now it would be {now}")
        elif fewest != now:
            torch.set_num_threads(fewest)
            logger.info(f"backend.threads={fewest}, as on the rank with the fewest")
    return {"threads": torch.get_num_threads(), **({"local_ranks": local_size} if local_size > 1 else {})}


def quickest(available: int, rate: Callable[[int], float]) -> int:
    """The number of threads, from `available` down by halves to one, that no smaller one of them clearly beats.

    Args:
        rate: the work done in a second by so many threads.
    """
    counts = [available]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    rates: dict[int, list[float]] = {}

    def measure(candidates: list[int]) -> None:
        for _ in range(ROUNDS):  # in turns, as others may come and go
            for count in candidates:
                rates.setdefault(count, []).append(rate(count))

    measure([available, 1])
    middle = {count: statistics.median(measured) for count, measured in rates.items()}
    if middle[available] >= QUIET * available * middle[1]:
        return available
    measure(counts[1:-1])
    middle = {count: statistics.median(measured) for count, measured in rates.items()}
    best = available
    for count in counts[1:]:
        if middle[count] >= CLEARLY * middle[best]:
            best = count
    return best


def _rate(threads: int) -> float:
    """Products of the same size a second, each on so many threads."""
    torch.set_num_threads(threads)
    matrix, weight = torch.ones(HEIGHT * threads, WIDTH), torch.ones(WIDTH, 4 * WIDTH)
    out = torch.mm(matrix, weight)  # starts the threads
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < WINDOW:
        torch.mm(matrix, weight, out=out)
        count += threads
    return count / (time.perf_counter() - began)
