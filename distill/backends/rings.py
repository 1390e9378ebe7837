"""Several rings at once: process groups of torch.distributed with connections of their own, and how many to take."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from distill.errors import SettingError

CANDIDATES = (1, 2, 4)
GAIN = 1.1  # more than one ring has to be this many times faster than one
CLOSE = 1.03  # among those, the fewest rings within this factor of the fastest
ROUNDS = 3  # the first one opens connections and does not count


def parse_rings(text: str) -> int | None:
    """The number of rings in `backend.rings`, or None for auto. Raises SettingError."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise SettingError(f"backend.rings={text}: give a number of at least 1, or auto")
    return int(text)


class TorchRings:
    """`number` rings over all ranks: the group that torch.distributed has anyway, and further ones."""

    def __init__(self, number: int, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        self._groups = [dist.group.WORLD, *(dist.new_group(timeout=limit) for _ in range(number - 1))]

    def sum(self, parts: Sequence[Tensor]) -> None:
        """Sum contiguous tensors over all ranks, in place and at the same time, part i on ring i modulo rings."""
        works = []
        for i, part in enumerate(parts):
            works.append(dist.all_reduce(part, group=self._groups[i % len(self._groups)], async_op=True))
        for work in works:
            work.wait()

    def keep(self, number: int) -> None:
        """Close all but the first `number` rings."""
        for group in self._groups[number:]:
            dist.destroy_process_group(group)
        del self._groups[number:]


def choose_rings(seconds: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """The number of rings to use, and the seconds that one exchange took with each of `CANDIDATES`.

    `seconds(rings)` measures one exchange and gives the same number on all ranks.
    """
    best = dict.fromkeys(CANDIDATES, float("inf"))
    for i in range(ROUNDS):
        for rings in CANDIDATES:
            taken = seconds(rings)
            if i > 0:
                best[rings] = min(best[rings], taken)
    fastest = min(best.values())
    if best[1] < GAIN * fastest:
        return 1, best
    return min(rings for rings in CANDIDATES if best[rings] <= CLOSE * fastest), best
