"""The training sequences in their order: every window of micro-batches is a pure function of its step.

Shapes: B sequences of a micro-batch, S positions.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np
import torch

from distill.data.batch import Batch, as_dummy
from distill.data.order import Fed, Mixture, Order
from distill.data.sequence_store import SequenceStore
from distill.runtime.errors import Interrupted
from distill.runtime.seed import key
from distill.runtime.signals import in_force

WINDOWS_AHEAD = 4  # or one for each thread, where those are more
NAP = 0.25  # seconds between two looks, while the loop waits, whether the process is to stop

Window = TypeVar("Window")


class Collator(Protocol):
    """What makes micro-batches of sequences, for one task."""

    @property
    def pad_id(self) -> int:
        """What fills up sequences."""
        ...

    @property
    def identity(self) -> str:
        """Everything that decides the batch of a sequence besides its key."""
        ...

    def collate(self, tokens: np.ndarray, row_keys: np.ndarray, row_ids: np.ndarray, /) -> Batch:
        """tokens [B, S], row_keys [B] uint64, row_ids [B]; everything random is a function of the sequence's key."""
        ...


def num_threads(requested: int | None, local_size: int) -> int:
    """Threads that prepare batches: as many as requested, else one for every four cores of this rank, from 1 to 4."""
    if requested is not None:
        return requested
    cores = len(os.sched_getaffinity(0)) // local_size
    return min(4, max(1, cores // 4))


@dataclass(frozen=True)
class StepShape:
    """How a step is split: into ranks, of which this one is `rank`, and their micro-batches."""

    batch_size: int  # most sequences of a micro-batch
    sequences: int  # of a step, of all ranks together
    rank: int = 0
    size: int = 1  # ranks
    equal_windows: bool = False  # all ranks have as many micro-batches in a window: a missing one is a dummy batch

    @property
    def micro_batches(self) -> int:
        """Most micro-batches of a rank in a step; ranks that have a sequence less than others may have one less."""
        return -(-self.sequences // (self.size * self.batch_size))


@dataclass(frozen=True)
class Batches:
    """Shuffled, collated, dealt to the ranks.

    The order of an epoch depends on seed and epoch alone; a step takes the next `sequences_per_step` of it, which are
    dealt to the ranks in turn. So the sequences of a step are the same for every split into ranks, micro-batches and
    accumulation, the ranks differ by one sequence at most, and the last step of an epoch is merely shorter.
    """

    sequences: SequenceStore  # [num_sequences, S]
    collator: Collator
    order: Order | Mixture  # of the sequences
    step_shape: StepShape
    seed: int
    static: bool = False  # the same masks in every epoch: those of epoch 0
    threads: int = 1  # that prepare windows ahead of the loop; 0: the loop prepares its own

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences and positions of a micro-batch."""
        return self.step_shape.batch_size, self.sequences.shape[1]

    @property
    def sequences_per_step(self) -> int:
        return self.step_shape.sequences

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.order) // self.sequences_per_step)

    def numbers_of(self, step: int) -> np.ndarray:
        """The sequences of a step, of all ranks: [n] int64, in its order."""
        return self._sequences(*self._position(step), self.sequences_per_step)[0]

    def window(self, step: int, tokens: np.ndarray | None = None) -> list[Batch]:
        """This rank's micro-batches of a step, or of `tokens` [n, S] in place of its sequences, those of all ranks.

        When a short last step has fewer sequences than ranks it is empty, or of dummy batches where windows are to be
        equal.
        """
        shape = self.step_shape
        numbers, passes = self._sequences(*self._position(step), self.sequences_per_step)
        own = slice(shape.rank, None, shape.size)
        window = list(self._micro_batches(numbers[own], passes[own], None if tokens is None else tokens[own]))
        if shape.equal_windows:
            on_rank_0 = -(-len(numbers) // shape.size)
            missing = -(-on_rank_0 // shape.batch_size) - len(window)
            if missing:
                one = own if len(numbers[own]) else slice(1)  # a sequence that is being read in any case
                window += [as_dummy(self.batch(numbers[one][:1], passes[one][:1]))] * missing
        return window

    def _position(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the position in it at which the step begins."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        return epoch, step_of_epoch * self.sequences_per_step

    def _sequences(self, epoch: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of so many sequences of an epoch, or those that are left of it, and the pass of each."""
        positions = np.arange(first, min(first + count, len(self.order)))
        return self.order.numbers(epoch, positions), self.order.passes(epoch, positions) + np.zeros_like(positions)

    def _micro_batches(
        self, numbers: np.ndarray, passes: np.ndarray, tokens: np.ndarray | None = None
    ) -> Iterator[Batch]:
        for start in range(0, len(numbers), self.step_shape.batch_size):
            here = slice(start, start + self.step_shape.batch_size)
            yield self.batch(numbers[here], passes[here], None if tokens is None else tokens[here])

    def batch(self, numbers: np.ndarray, passes: np.ndarray | int, tokens: np.ndarray | None = None) -> Batch:
        """The sequences of these numbers, or `tokens` in place of them, with their masks of a pass (in plain orders an
        epoch), of each or of all.
        """
        row_keys = key(self.seed, "mask", np.zeros_like(passes) if self.static else passes, numbers)
        batch = self.collator.collate(self.sequences[numbers] if tokens is None else tokens, row_keys, numbers)
        dropout_keys = key(self.seed, "dropout", passes, batch.row_ids)
        return replace(batch, dropout_keys=tuple(dropout_keys.tolist()))

    def first(self, count: int) -> Iterator[Batch]:
        """The `count` sequences that training begins with, of all ranks, in micro-batches."""
        return self._micro_batches(*self._sequences(0, 0, count))

    def sources_fed(self, step: int) -> dict[str, Fed]:
        """What has been fed of each source of a mixture, by all ranks, up to the end of a step; else nothing."""
        return self.order.fed(*self._position(step)) if isinstance(self.order, Mixture) else {}

    def stream(
        self,
        start: int,
        stop: int,
        device: torch.device,
        read_ahead: Callable[[Batch], Batch] | None = None,
    ) -> Iterator[list[Batch]]:
        """The windows of the steps [start, stop), prepared ahead in threads (in pinned memory for CUDA).

        `read_ahead` is called on each batch in those threads.
        """

        def prepare(step: int) -> list[Batch]:
            window = self.window(step)
            if read_ahead is not None:
                window = [read_ahead(batch) for batch in window]
            return [batch.pinned() for batch in window] if device.type == "cuda" else window

        for window in prefetch(prepare, range(start, stop), self.threads):
            # What gives up Python's lock here, as moving and freeing tensors do, gets it back when the thread that
            # prepares the next window no longer needs it. So nothing is moved that need not be, and a window is
            # freed before the next one begins: else the loop would seem to wait for data that it has already.
            yield window if device.type == "cpu" else [batch.to(device) for batch in window]
            del window


def prefetch(prepare: Callable[[int], Window], steps: range, threads: int) -> Iterator[Window]:
    """The windows of the steps in their order, each prepared in one of the threads; without threads by the loop itself.

    After a signal to stop the process, a loop that would have to wait gets no further window: the step under
    way is the last one in any case, and storage that is out of order may keep a window back for minutes.
    """
    if not threads:
        yield from _in_loop(prepare, steps)
        return
    coming = iter(steps)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="batches")
    try:
        ahead = deque(pool.submit(prepare, step) for step in islice(coming, max(WINDOWS_AHEAD, threads)))
        while ahead and _comes(ahead[0]):
            try:
                window = ahead.popleft().result()
            except Interrupted:  # in the thread that prepared it, which does not act on signals
                return
            ahead.extend(pool.submit(prepare, step) for step in islice(coming, 1))
            yield window
            del window  # see `Batches.stream`
    finally:
        pool.shutdown(cancel_futures=True)


def _in_loop(prepare: Callable[[int], Window], steps: range) -> Iterator[Window]:
    try:
        yield from map(prepare, steps)
    except Interrupted:  # outside of the training loop a signal raises here, as anywhere else
        if not in_force().is_deferred:
            raise


def _comes(future: Future[Window]) -> bool:
    """Waits for a window; False where the process is to stop before it is there."""
    signals = in_force()
    while not wait([future], NAP).done:
        if signals.stopping is not None:
            return False
    return True
