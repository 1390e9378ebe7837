"""Several rings at once: process groups of torch.distributed with connections of their own, and how many to take."""

import statistics
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

CANDIDATES = (1, 2, 4)
GAIN = 1.1  # more than one ring has to be this many times faster than one
CLOSE = 1.03  # among those, the fewest rings within this factor of the fastest
MIN_ROUNDS, MAX_ROUNDS = 2, 15  # and one before them, which opens connections and does not count
SECONDS = 2.0  # of measuring: on a fast network more rounds fit in, and chance decides less


def requested_rings(setting: str) -> int | None:
    """The number of rings in `backend.rings`, or None for auto."""
    return None if setting == "auto" else int(setting)


class TorchRings:
    """`number` rings over all ranks: the group that torch.distributed has anyway, and further ones."""

    def __init__(self, number: int, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        self._groups = [dist.group.WORLD, *(dist.new_group(timeout=limit) for _ in range(number - 1))]

    def begin_sum(self, parts: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to sum contiguous tensors over all ranks, in place, part i on ring i; gives how to wait."""
        works = [
            dist.all_reduce(part, group=self._groups[i % len(self._groups)], async_op=True)
            for i, part in enumerate(parts)
        ]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def keep(self, number: int) -> None:
        """Close all but the first `number` rings."""
        for group in self._groups[number:]:
            dist.destroy_process_group(group)
        del self._groups[number:]


def choose_rings(seconds: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """The number of rings to use, and the seconds that one exchange took with each of `CANDIDATES`.

    `seconds(rings)` measures one exchange and gives the same number on all ranks.
    """
    times: dict[int, list[float]] = {rings: [] for rings in CANDIDATES}
    for i in range(MAX_ROUNDS + 1):
        taken = {rings: seconds(rings) for rings in CANDIDATES}
        if i > 0:
            for rings in CANDIDATES:
                times[rings].append(taken[rings])
        if i >= MIN_ROUNDS and sum(map(sum, times.values())) >= SECONDS:
            break
    typical = {rings: statistics.median_low(times[rings]) for rings in CANDIDATES}
    fastest = min(typical.values())
    if typical[1] < GAIN * fastest:
        return 1, typical
    return min(rings for rings in CANDIDATES if typical[rings] <= CLOSE * fastest), typical
