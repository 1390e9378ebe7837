"""The gradients of a model in one flat tensor, cut into segments that can be sent while backward still runs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

MAX_STATS = 63  # numbers that travel with the gradients
NUM_STATS = MAX_STATS + 1  # and one of our own
ALIGNMENT = 16  # elements: each gradient starts on a cache line
SEGMENT = 4 * 2**20  # elements, 16 MiB: long enough that latency does not count, short enough to overlap


class Bucket:
    """Stats first, then the gradients in the order of the parameters: `parameter.grad` are views into it.

    Backward comes to the parameters from the last to the first, so the segments count from the end of the bucket, and
    the stats, which are complete after backward, are in the last of them.

    Attributes:
        flat: stats and gradients, float32; padding between them is always zero.
        stats: [64], its beginning.
        gradients: the rest.
        segments: parts of `flat` in the order in which backward completes them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Raises ValueError for trainable weights that are not in fp32."""
        starts, end = [], NUM_STATS
        for parameter in parameters:
            if parameter.dtype != torch.float32:
                raise ValueError(f"trainable weights have to be float32, not {parameter.dtype}")
            starts.append(end)
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.flat = torch.zeros(end, device=device)
        self.stats, self.gradients = self.flat[:NUM_STATS], self.flat[NUM_STATS:]
        self.segments: list[slice] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self._sizes: list[int] = []  # parameters of each segment
        self._on_segment: Callable[[int], None] | None = None
        count = 0
        for start, parameter in zip(reversed(starts), reversed(parameters), strict=True):
            parameter.grad = self.flat[start : start + parameter.numel()].view_as(parameter)
            self._views.append((parameter, parameter.grad))
            self._watch(parameter, len(self.segments))
            count += 1
            if end - start >= SEGMENT and start > NUM_STATS:
                self.segments.append(slice(start, end))
                self._sizes.append(count)
                end, count = start, 0
        self.segments.append(slice(0, end))
        self._sizes.append(count)

    def is_whole(self) -> bool:
        """Whether all gradients are still views into the bucket."""
        return all(parameter.grad is view for parameter, view in self._views)

    def on_completion(self, on_segment: Callable[[int], None] | None) -> None:
        """From now on call `done(number)` when a backward has completed a segment; in order, never for the last one.

        None ends it. Between the two there may be one backward only.
        """
        self._on_segment, self._next = on_segment, 0
        self._missing = list(self._sizes)

    def _watch(self, parameter: nn.Parameter, number: int) -> None:
        def completed(_: Tensor) -> None:
            if self._on_segment is None:
                return
            self._missing[number] -= 1
            # In the same order on all ranks, whatever the order in which their gradients come.
            while self._next < len(self.segments) - 1 and self._missing[self._next] == 0:
                self._next += 1
                self._on_segment(self._next - 1)

        parameter.register_post_accumulate_grad_hook(completed)
