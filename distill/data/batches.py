"""The training rows in their order: every window of micro-batches is a pure function of its step.

Shapes: B rows of a micro-batch, S positions, N positions with soft targets, K kept entries of the teacher.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from distill.data.collate.mlm import IGNORE, Masker
from distill.seed import key, shuffled

WINDOWS_AHEAD = 4


class Batch(NamedTuple):
    """One micro-batch. The places are found on the CPU, so that no step waits for a device to count or to search."""

    inputs: torch.Tensor  # [B, S] int64, token ids with masks in place
    targets: torch.Tensor  # [B * S] int64, the token to predict or IGNORE
    masked: torch.Tensor  # [num_targets] int64, flat places to predict
    real: torch.Tensor | None  # [num_positions] int64, flat places that are no padding; None when all are
    attention: torch.Tensor | None  # [B, S] bool, False at padding; None when there is none
    top_ids: torch.Tensor | None = None  # [N, K] int32, the teacher's largest entries; None when it is asked live
    top_log_probs: torch.Tensor | None = None  # [N, K + 1] float16, theirs and, last, that of all others together

    @property
    def num_targets(self) -> int:
        return len(self.masked)

    @property
    def num_positions(self) -> int:
        return self.inputs.numel() if self.real is None else len(self.real)

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        changed = {name: change(tensor) for name, tensor in self._asdict().items() if tensor is not None}
        return self._replace(**changed)


def make_batch(ids: np.ndarray, row_keys: np.ndarray, masker: Masker, pad_id: int) -> Batch:
    """ids [B, S] int64, each row masked by its own key [B]."""
    inputs, targets = masker(ids, row_keys)
    attention = ids != pad_id
    places = [torch.from_numpy(np.flatnonzero(where)) for where in (targets != IGNORE, attention)]
    full = len(places[1]) == ids.size
    return Batch(
        torch.from_numpy(inputs),
        torch.from_numpy(targets.reshape(-1)),
        places[0],
        None if full else places[1],
        None if full else torch.from_numpy(attention),
    )


def some_rows(rows: np.ndarray, most: int | None, purpose: str) -> np.ndarray:
    """At most `most` of the rows, in their old order: a choice that depends on `purpose` and on nothing else."""
    if most is None or most >= len(rows):
        return rows
    return rows[np.sort(shuffled(np.arange(most), len(rows), key(0, purpose)))]


def num_workers(asked: int | None, local_size: int) -> int:
    """Threads that prepare batches: those asked for, else one for every four cores of this rank, from 1 to 4."""
    cores = len(os.sched_getaffinity(0)) // local_size
    return min(4, max(1, cores // 4)) if asked is None else asked


@dataclass(frozen=True)
class Batches:
    """Shuffled, masked, shared between the ranks.

    The order of an epoch depends on seed and epoch alone; a step takes the next `rows_per_step` of it, and rank r takes
    every `size`-th of these. So the rows of a step are the same for every split into ranks, micro-batches and
    accumulation, the ranks' shares differ by one row at most, and the last step of an epoch is merely shorter.
    """

    rows: np.ndarray  # [num_rows, S]
    masker: Masker
    pad_id: int
    batch_size: int
    accumulate: int
    seed: int
    rank: int = 0
    size: int = 1
    workers: int = 1  # threads that prepare windows ahead; 0: the loop prepares its own
    # A teacher cache: row numbers -> `top_ids` and `top_log_probs` of all their positions that carry soft targets.
    taught: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None

    @property
    def rows_per_step(self) -> int:
        return self.batch_size * self.accumulate * self.size

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.rows_per_step)

    def window(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step; empty when a short last step has fewer rows than ranks."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        first = step_of_epoch * self.rows_per_step
        places = np.arange(first, min(first + self.rows_per_step, len(self.rows)))[self.rank :: self.size]
        numbers = shuffled(places, len(self.rows), key(self.seed, "order", epoch))
        return [
            self.batch(numbers[start : start + self.batch_size], epoch)
            for start in range(0, len(numbers), self.batch_size)
        ]

    def batch(self, numbers: np.ndarray, epoch: int) -> Batch:
        """The rows of these numbers with their masks of an epoch; static masks are those of epoch 0."""
        ids = self.rows[numbers].astype(np.int64)
        row_keys = key(self.seed, "mask", 0 if self.masker.settings.static else epoch, numbers)
        batch = make_batch(ids, row_keys, self.masker, self.pad_id)
        if self.taught is None:
            return batch
        top_ids, top_log_probs = map(torch.from_numpy, self.taught(numbers))
        return batch._replace(top_ids=top_ids, top_log_probs=top_log_probs)

    def stream(self, start: int, stop: int, device: torch.device) -> Iterator[list[Batch]]:
        """The windows of the steps [start, stop), prepared ahead in `workers` threads (in pinned memory for CUDA)."""

        def prepare(step: int) -> list[Batch]:
            window = self.window(step)
            return [batch.pinned() for batch in window] if device.type == "cuda" else window

        if not self.workers:
            yield from ([batch.to(device) for batch in prepare(step)] for step in range(start, stop))
            return
        in_hand = max(WINDOWS_AHEAD, self.workers)
        with ThreadPoolExecutor(self.workers, thread_name_prefix="batches") as pool:
            ahead = [pool.submit(prepare, step) for step in range(start, min(start + in_hand, stop))]
            for step in range(start, stop):
                window = ahead.pop(0).result()
                if step + in_hand < stop:
                    ahead.append(pool.submit(prepare, step + in_hand))
                yield [batch.to(device) for batch in window]
