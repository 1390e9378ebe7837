"""A teacher that ran once: what was kept of it is read from a cache."""

from collections.abc import Iterator

import torch

from distill.data.batch import Batch
from distill.models.language_model import NO_OUTPUTS
from distill.teacher.cache import Cache
from distill.teacher.distributions import TopK
from distill.teacher.output import TeacherOutput, Wanted
from distill.teacher.sampling import as_samples


class CachedTeacher:
    """Reads the entries of a batch's rows; they stand at the positions that carry soft targets, in their order."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def read_ahead(self, batch: Batch) -> Batch:
        numbers = batch.row_ids[:0] if batch.is_filler else batch.row_ids
        columns = self.cache.read(numbers)
        return batch.with_teacher_data(**{name: torch.from_numpy(values) for name, values in columns.items()})

    def outputs(self, window: list[Batch], wanted: Wanted) -> Iterator[TeacherOutput]:
        layout = self.cache.layout
        for batch in window:
            data = batch.teacher_data
            source = as_samples(data, layout) if layout.sampled else TopK(data["ids"], data["log_probs"])
            yield TeacherOutput(source, NO_OUTPUTS)
