"""The gradients of one model in a flat bucket, and the one exchange of a step that sums them over the ranks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from distill.distributed.bucket import MAX_STATS, Bucket
from distill.distributed.ranks import WIRE, Ranks, naming_lost_rank


class GradientSync:
    """The gradients of a model, and how they are summed over the ranks.

    The gradients of all trainable parameters are views into one flat fp32 bucket, so that backward adds to the bucket
    and one exchange sums the whole gradient over the ranks, with a collective call for each of the bucket's few
    segments. Losses are already divided by the global number of their targets, therefore ranks are always summed and
    never averaged. All methods raise RankLost as those of `Ranks` do.

    Attributes:
        ranks: between which gradients are summed.
        gradients: all of them, flat, padding included (always zero).
    """

    def __init__(self, ranks: Ranks, model: nn.Module) -> None:
        """Give every rank the weights and buffers of rank 0 and lay the gradients of `model` into the bucket.

        All ranks make it, once, after the model is on its device and before the optimizer is built. Parameters that
        are tied count once; those without `requires_grad` get no gradient; those that a batch does not touch have a
        gradient of zeros. Raises ValueError for trainable weights that are not in fp32.
        """
        self.ranks = ranks
        plain = self._plain_parameters(model)
        ranks.broadcast_all([tensor.detach() for tensor in [*plain, *model.buffers()]])
        self._bucket = Bucket([parameter for parameter in plain if parameter.requires_grad], ranks.device)
        self.gradients = self._bucket.gradients
        self._under_way: list[Callable[[], None]] = []  # what to wait for: one entry per segment that was started
        self._began = 0.0  # when the exchange under way did

    def _plain_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that every rank holds whole."""
        return list(model.parameters())

    def zero(self) -> None:
        """Set all gradients to zero in place; they have to stay views into the bucket."""
        self._bucket.flat.zero_()

    def scale(self, factor: float) -> None:
        """Multiply all gradients by `factor`, in place."""
        self.gradients.mul_(factor)

    @contextmanager
    def micro_batch(self, last: bool, overlap: bool = True) -> Iterator[None]:
        """Wrap forward and the one backward of a micro-batch; `last` is true for the last one of the window.

        With `sync=window` the exchange begins during the last backward, segment by segment, unless `overlap` is false
        because the gradient is still to be changed before `all_reduce_gradients`, or it is the first of all. With
        `sync=every` the gradients are exchanged after each micro-batch, for comparison; that of the last one happens in
        `all_reduce_gradients`.
        """
        every, is_first = self.ranks.settings.sync == "every", self.ranks.traffic.num_syncs == 0
        begins = last and overlap and self.ranks.size > 1 and not (every or is_first)
        self._bucket.on_completion(self._start if begins else None)
        yield
        self._bucket.on_completion(None)
        if self.ranks.size > 1 and every and not last:
            self._exchange()
            # The bucket now holds the same sum on all ranks and takes part in the next exchange: as its mean.
            self.gradients.div_(self.ranks.size)
            self._bucket.stats.zero_()

    def all_reduce_gradients(self, stats: Tensor | None = None) -> Tensor | None:
        """Sum the gradients over all ranks, once per window, and with them `stats`.

        Every rank has to call it, also one that had no micro-batch in this window.

        Args:
            stats: up to 63 numbers of this rank, [n] float32, such as counts and losses; n is the same on all ranks.

        Returns:
            The stats summed over all ranks, [n] float32.
        """
        if not self._bucket.is_whole():
            raise RuntimeError("a gradient left the bucket: use zero(), never set_to_none=True")
        count = 0 if stats is None else len(stats)
        assert count <= MAX_STATS, "too many stats"
        reduced = self._bucket.stats
        if self.ranks.size == 1:
            return None if stats is None else stats.to(reduced, copy=True)
        while True:
            reduced.zero_()
            if stats is not None:
                reduced[:count] = stats
            reduced[-1:].fill_(1)  # "this rank has no further micro-batch": counts the ranks that are through
            self._exchange()
            # Ranks may have fewer micro-batches than others; with sync=every they go along until all are through.
            if self.ranks.settings.sync == "window" or int(reduced[-1]) == self.ranks.size:
                return None if stats is None else reduced[:count].clone()
            self.gradients.div_(self.ranks.size)

    def _exchange(self) -> None:
        """Sum the bucket over the ranks, in place: start the segments that are not under way yet, then wait for all."""
        if self.ranks.traffic.num_syncs == 0:
            self.ranks.barrier()  # one may compile its kernels for longer than the others wait in an exchange
        self.ranks.traffic.num_syncs += 1
        for number in range(len(self._under_way), len(self._bucket.segments)):
            self._start(number)
        with self.ranks.waiting():
            for wait in self._under_way:
                wait()
        self._under_way = []
        self.ranks.traffic.exchange_seconds += time.perf_counter() - self._began

    def _start(self, number: int) -> None:
        """Begin the exchange of a segment, cut into the stripes that the ranks send side by side."""
        if not self._under_way:
            self._began = time.perf_counter()
        values = self._bucket.flat[self._bucket.segments[number]]
        parts = list(values.chunk(self.ranks.stripes))
        gradients = wire = None
        dtype, scale = WIRE.get(self.ranks.settings.compression, (None, 1.0))
        if dtype is not None:
            # Counts and losses stay exact: bfloat16 ends at 256 for consecutive integers.
            stats = self._bucket.stats if number == len(self._bucket.segments) - 1 else values[:0]
            gradients = values[len(stats) :]
            wire = (gradients if scale == 1 else gradients * scale).to(dtype)
            parts = [*wire.chunk(self.ranks.stripes), *([stats] if len(stats) else [])]
        for part in parts:
            self.ranks.count(part)
        with naming_lost_rank():
            wait = self.ranks.begin_sum(parts, f"gradients/{number}")

        def finish() -> None:
            wait()
            if gradients is not None and wire is not None:
                gradients.copy_(wire)
                if scale != 1:
                    gradients.div_(scale)

        self._under_way.append(finish)
