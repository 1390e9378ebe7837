"""A teacher that ran once: its largest entries are read from a cache."""

from collections.abc import Iterator

import torch

from distill.data.batch import Batch
from distill.models.language_model import NO_OUTPUTS
from distill.teacher.cache import Cache
from distill.teacher.signal import Signal, TopK, Wanted


class CachedTeacher:
    """Reads the entries of a batch's rows; they stand at the positions that carry soft targets, in their order."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def read_ahead(self, batch: Batch) -> Batch:
        numbers = batch.row_ids[:0] if batch.is_filler else batch.row_ids
        ids, log_probs = map(torch.from_numpy, self.cache.read(numbers))
        return batch.with_teacher_data(ids=ids, log_probs=log_probs)

    def signals(self, window: list[Batch], wanted: Wanted) -> Iterator[Signal]:
        for batch in window:
            yield Signal(TopK(batch.teacher_data["ids"], batch.teacher_data["log_probs"]), NO_OUTPUTS)
