"""The interface between the training loop and the ranks of a run, with everything in it that all backends share."""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from distill.config.settings import BackendConfig
from distill.distributed.bucket import MAX_STATS, Bucket
from distill.distributed.rank import RankInfo
from distill.distributed.rings import choose_rings, parse_rings
from distill.runtime.errors import RankLost

# Number formats on the wire by `backend.compression`, and what gradients are multiplied by there. fp16 loses its digits
# below 6e-5, where most gradients of one rank lie, and ends at 65,504: with this factor they go from 6e-8 to 64.
WIRE = {"bf16": (torch.bfloat16, 1.0), "fp16": (torch.float16, 1024.0)}
LARGEST_TRIAL = 8 * 2**20  # elements that `rings=auto` exchanges to measure


@contextmanager
def _naming_lost_rank() -> Iterator[None]:
    """Turn the error of a communication library whose rank is gone into RankLost, in one line."""
    try:
        yield
    except RuntimeError as error:
        # Without the line of the library's source, and without its advice.
        reason = re.sub(r"^\[\S+\] *", "", str(error).strip() or type(error).__name__).split(". ")[0].split("\n")[0]
        raise RankLost(f"another rank has ended or does not answer: {reason}") from error


# Of the messages of Gloo and NCCL when a rank is gone, in exchanges that torch makes by itself.
LOST = re.compile(r"gloo/transport|[Cc]onnection (was )?(closed|reset|refused)|Broken pipe|NCCL|Timed out waiting")


@contextmanager
def naming_lost_rank_inside() -> Iterator[None]:
    """The same around a computation with exchanges inside, whose other errors are left alone."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankLost) or not LOST.search(str(error)):
            raise
        with _naming_lost_rank():
            raise


class Backend:
    """The ranks of one run, seen from one of them.

    The gradients of all trainable parameters are views into one flat fp32 bucket, so that backward adds to the bucket
    and one exchange sums the whole gradient over the ranks, with a collective call for each of the bucket's few
    segments. Losses are already divided by the global number of their targets, therefore ranks are always summed and
    never averaged. All methods raise RankLost when another rank is gone, or has not answered for `backend.timeout`
    seconds.

    Attributes:
        name: single, ddp or horovod.
        rank, size: this process among all of them.
        local_rank, local_size: this process among those of its host.
        device: where model and batches of this rank live.
        rings: rings in force for the exchange of gradients; with `backend.rings=auto` known after `prepare`.
        ring_seconds: what `backend.rings=auto` measured: seconds of one exchange by number of rings; else empty.
        engine: in words, what carries the gradients.
        num_syncs: exchanges of the gradient so far.
        num_collectives: calls of the communication library so far, of any kind.
        exchange_seconds: from the beginning of each exchange of the gradient to its end, added up.
        bytes_sent: bytes this rank handed to those calls; a ring carries 2 (size - 1) / size times that per rank.
        gradients: all of them after `prepare`, flat, padding included (always zero).
    """

    name: str
    engine: str
    equal_windows = False  # whether all ranks have to have the same number of micro-batches in a window
    divides: frozenset[str] = frozenset()  # of "student" and "teacher", those whose weights are divided between ranks

    def __init__(self, settings: BackendConfig, info: RankInfo, device: torch.device) -> None:
        self.settings = settings
        self.rank, self.size = info.rank, info.size
        self.local_rank, self.local_size = info.local_rank, info.local_size
        self.device = device
        requested = parse_rings(settings.rings)
        self.rings, self._measure_rings = requested or 1, requested is None and self.size > 1
        self.ring_seconds: dict[int, float] = {}
        self.num_syncs = self.num_collectives = self.bytes_sent = 0
        self.exchange_seconds = self._exchange_began = 0.0
        self.gradients = torch.empty(0)
        self._bucket = Bucket([], device)
        self._under_way: list[Callable[[], None]] = []  # what to wait for: one entry per segment that was started

    def prepare(self, model: nn.Module) -> None:
        """Give every rank the weights and buffers of rank 0 and lay the gradients of `model` into the bucket.

        Call it once and on all ranks, after the model is on `device` and before the optimizer is built. Parameters
        that are tied count once; those without `requires_grad` get no gradient; those that a batch does not touch have
        a gradient of zeros. Raises ValueError for trainable weights that are not in fp32.
        """
        self._broadcast_all([*model.parameters(), *model.buffers()])
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._bucket, self._under_way = Bucket(parameters, self.device), []
        self.gradients = self._bucket.gradients
        if self._measure_rings:
            self._choose_rings()
            self._measure_rings = False

    def divide(self, model: nn.Module, blocks: Sequence[nn.Module], calls: int, trained: bool) -> None:
        """Divide the weights of a model between the ranks, in place, if it is one that this backend divides.

        Args:
            blocks: modules in it that are called one after the other, `calls` times in all.
            trained: whether it is the student.
        """
        raise NotImplementedError

    def zero_gradients(self) -> None:
        """Set all gradients to zero in place; they have to stay the views that `prepare` made."""
        self._bucket.flat.zero_()

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by `factor`, in place."""
        self.gradients.mul_(factor)

    @contextmanager
    def sync(self, last: bool, overlap: bool = True) -> Iterator[None]:
        """Wrap forward and the one backward of a micro-batch; `last` is true for the last one of the window.

        With `sync=window` the exchange begins during the last backward, segment by segment, unless `overlap` is false
        because the gradient is still to be changed before `sum_gradients`. With `sync=every` the
        gradients are exchanged after each micro-batch, for comparison; the exchange of the last one is that of
        `sum_gradients`.
        """
        every = self.settings.sync == "every"
        self._bucket.on_completion(self._start if last and overlap and self.size > 1 and not every else None)
        yield
        self._bucket.on_completion(None)
        if self.size > 1 and every and not last:
            self._exchange()
            # The bucket now holds the same sum on all ranks and takes part in the next exchange: as its mean.
            self.gradients.div_(self.size)
            self._bucket.stats.zero_()

    def sum_gradients(self, stats: Tensor | None = None) -> Tensor | None:
        """Sum the gradients over all ranks, once per window, and with them `stats`.

        Every rank has to call it, also one that had no micro-batch in this window.

        Args:
            stats: up to 63 numbers of this rank, [n] float32, such as counts and losses; n is the same on all ranks.

        Returns:
            The stats summed over all ranks, [n] float32.
        """
        if not self._bucket.is_whole():
            raise RuntimeError("a gradient left the bucket: use zero_gradients(), never set_to_none=True")
        count = 0 if stats is None else len(stats)
        assert count <= MAX_STATS, "too many stats"
        reduced = self._bucket.stats
        if self.size == 1:
            return None if stats is None else stats.to(reduced, copy=True)
        while True:
            reduced.zero_()
            if stats is not None:
                reduced[:count] = stats
            reduced[-1] = 1  # "this rank has no further micro-batch": counts the ranks that are through
            self._exchange()
            # Ranks may have fewer micro-batches than others; with sync=every they go along until all are through.
            if self.settings.sync == "window" or int(reduced[-1]) == self.size:
                return None if stats is None else reduced[:count].clone()
            self.gradients.div_(self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, in its own type; the input stays as it is."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            self._count(result)
            with self._waiting():
                self._sum(result)
        return result

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value` on every rank.

        That is a tensor (all ranks give one of the same shape and type), or what JSON holds: nothing that comes from
        another process is ever run here, as unpickling it would.
        """
        if self.size == 1:
            return value
        if isinstance(value, Tensor):
            self._broadcast_all([value := value.detach().clone(memory_format=torch.contiguous_format)])
            return value
        data = _as_bytes(value)
        length = self.broadcast(torch.tensor(len(data)))
        data = self.broadcast(data if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8))
        return json.loads(data.numpy().tobytes())

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, by rank, on all of them; what JSON holds."""
        if self.size == 1:
            return [value]
        data = _as_bytes(value)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        lengths = self.sum(lengths)
        table = torch.zeros(self.size, int(lengths.max()), dtype=torch.int32)  # Horovod sums no bytes
        table[self.rank, : len(data)] = data
        rows = self.sum(table).to(torch.uint8)
        return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths.tolist(), strict=True)]

    @contextmanager
    def in_lockstep(self, models: Sequence[nn.Module], idle: Callable[[Any], object]) -> Iterator[None]:
        """While it is open ranks may compute different numbers of forwards of the models; all ranks open it together.

        Where models are divided between the ranks those without work join in the forwards of the others.

        Args:
            idle: computes a forward of one of the models whose outcome nobody reads.
        """
        yield

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around forward and backward passes, in which divided models exchange their weights."""
        yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Where the host reads what an exchange has given: on a GPU it is here that it waits for the other ranks."""
        yield

    def barrier(self) -> None:
        """Wait until all ranks have come here, however long that takes."""
        if self.size > 1:
            self.num_collectives += 1
            with self._waiting():
                self._barrier()

    def close(self) -> None:
        """Leave the group of ranks once all have come here; nothing but attributes may be used afterwards.

        Not for a rank that fails: `launch.leave` is.
        """
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # After an error the others may never come to `close`.
        if error is None:
            self.close()

    # What a backend of several ranks gives; one process never comes here.

    def _barrier(self) -> None:
        """Wait for all ranks."""
        raise NotImplementedError

    def _sum(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor of any type over all ranks, in place."""
        raise NotImplementedError

    def _begin_sum(self, parts: Sequence[Tensor], name: str) -> Callable[[], None]:
        """Begin to sum contiguous parts of the bucket over all ranks, in place, part i on ring i; gives how to wait.

        `name` is the same for the same part of every exchange.
        """
        raise NotImplementedError

    def _broadcast(self, data: Tensor) -> None:
        """Overwrite [bytes] uint8 with those of rank 0, in place."""
        raise NotImplementedError

    def _settle_rings(self) -> None:
        """Close the rings that `backend.rings=auto` tried and did not take."""
        raise NotImplementedError

    def _exchange(self) -> None:
        """Sum the bucket over the ranks, in place: start the segments that are not under way yet, then wait for all."""
        self.num_syncs += 1
        for number in range(len(self._under_way), len(self._bucket.segments)):
            self._start(number)
        with self._waiting():
            for wait in self._under_way:
                wait()
        self._under_way = []
        self.exchange_seconds += time.perf_counter() - self._exchange_began

    def _start(self, number: int) -> None:
        """Begin the exchange of a segment, cut into one stripe per ring."""
        if not self._under_way:
            self._exchange_began = time.perf_counter()
        values = self._bucket.flat[self._bucket.segments[number]]
        parts = list(values.chunk(self.rings))
        gradients = wire = None
        dtype, scale = WIRE.get(self.settings.compression, (None, 1.0))
        if dtype is not None:
            # Counts and losses stay exact: bfloat16 ends at 256 for consecutive integers.
            stats = self._bucket.stats if number == len(self._bucket.segments) - 1 else values[:0]
            gradients = values[len(stats) :]
            wire = (gradients if scale == 1 else gradients * scale).to(dtype)
            parts = [*wire.chunk(self.rings), *([stats] if len(stats) else [])]
        for part in parts:
            self._count(part)
        with _naming_lost_rank():
            wait = self._begin_sum(parts, f"gradients/{number}")

        def finish() -> None:
            wait()
            if gradients is not None and wire is not None:
                gradients.copy_(wire)
                if scale != 1:
                    gradients.div_(scale)

        self._under_way.append(finish)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A wait for the other ranks."""
        with _naming_lost_rank():
            yield

    def _choose_rings(self) -> None:
        """Measure one, two and four rings on (a part of) the bucket, which is still all zeros, and take what pays."""
        trial = self._bucket.flat[:LARGEST_TRIAL]
        if self.settings.compression in WIRE:
            trial = trial.to(WIRE[self.settings.compression][0])

        def seconds(rings: int) -> float:
            self.sum(torch.zeros(1))  # ranks leave it together, and a barrier some hundredths of a second apart
            start = time.perf_counter()
            self._begin_sum(trial.chunk(rings), f"trial/{rings}")()
            return float(self.sum(torch.tensor(time.perf_counter() - start, dtype=torch.float64))) / self.size

        self.rings, self.ring_seconds = choose_rings(seconds)
        self._settle_rings()
        self.num_collectives = self.bytes_sent = 0

    def _broadcast_all(self, tensors: list[Tensor]) -> None:
        # As bytes and in one call: any mixture of types, and no latency per tensor.
        if self.size == 1 or not tensors:
            return
        with torch.no_grad():
            data = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
            self._count(data)
            with self._waiting():
                self._broadcast(data)
            start = 0
            for tensor in tensors:
                stop = start + tensor.numel() * tensor.element_size()
                # A copy, since a slice of bytes need not begin where the element type may begin.
                tensor.copy_(data[start:stop].clone().view(tensor.dtype).view_as(tensor))
                start = stop

    def _count(self, tensor: Tensor) -> None:
        self.num_collectives += 1
        self.bytes_sent += tensor.numel() * tensor.element_size()


def _as_bytes(value: Any) -> Tensor:
    """`value` as the bytes of its JSON, [n] uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
