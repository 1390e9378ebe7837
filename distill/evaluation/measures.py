"""What a measure is, and what all of them share: the batches of a set, and means that are exchanged between ranks.

Every value is a sum over positions divided by their number, so it depends neither on batch size nor on padding nor on
the number of ranks. Shapes: B rows, S positions, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from distill.data.batch import Batch
from distill.data.batches import Collator
from distill.distributed import Backend
from distill.evaluation.row_losses import RowLosses
from distill.evaluation.sets import SEED, EvaluationSet
from distill.models.language_model import LanguageModel, OutputSpec
from distill.runtime.seed import key

LOGITS_BYTES = 128 << 20  # in float64, that exist at once
KEPT_BYTES = 256 << 20  # of head rows that are kept of a model

ProgressCallback = Callable[[int], None]  # gets the number of rows or positions that were scored since the last call


class Measure(Protocol):
    """One number for a model on a set. History, report, comparison and plots know measures by name.

    One of your own is a class, named as `evaluate.measures.NAME._target_`, whose constructor gets `scoring` (a Scoring)
    and the settings beside that; NAME becomes its name. `TargetMean` is all of it but the value at a position.

    Attributes:
        name: its key in results.json.
        title: what the report calls it.
        explanation: half a sentence that follows the title.
        lower_is_better: the direction.
        unit: of what `size` counts.
    """

    name: str
    title: str
    explanation: str
    lower_is_better: bool
    unit: str

    def size(self, data: EvaluationSet) -> int:
        """How much work a set is, in `unit`, over all ranks."""
        ...

    def num_positions(self, data: EvaluationSet) -> int:
        """How many positions it scores, over all ranks."""
        ...

    def score(self, model: LanguageModel, data: EvaluationSet, done: ProgressCallback) -> float | None:
        """The measure of a model that is in evaluation mode; all ranks call it and get the same.

        None where a model lacks what is measured, such as a head for the order of segments.
        """
        ...


@dataclass
class KeptRows:
    """What a model's head is given at the targets of each set, batch by batch, for agreement to read again.

    It is kept where it is `wanted`, and of as many sets as there is `room` for in bytes.
    """

    wanted: bool = False
    by_set: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # each [N, E]
    room: int = KEPT_BYTES

    def add(self, name: str, rows: torch.Tensor) -> None:
        """Keep the rows of one more batch of a set; a set that does not fit is forgotten."""
        self.room -= rows.nbytes
        if self.room >= 0:
            self.by_set.setdefault(name, []).append(rows)
        else:
            self.by_set.pop(name, None)


@dataclass(frozen=True)
class Scoring:
    """What measures share: how rows are masked, how many at once, and the ranks that share the work."""

    collator: Collator
    vocab: int
    batch_size: int
    backend: Backend
    prompts: bool = False  # whether a set has tokens that are no targets
    heads: tuple[str, ...] = ()  # that are scored in place of that over the vocabulary
    # Gets what the rows contribute to each (measure, set) of the model that was scored last; None: nobody asks for it.
    row_losses: dict[tuple[str, str], RowLosses] | None = None
    kept: KeptRows = field(default_factory=KeptRows)  # of the model that is being scored

    def collator_of(self, data: EvaluationSet) -> Collator:
        return data.collator or self.collator

    def batches(self, data: EvaluationSet, done: ProgressCallback) -> Iterator[Batch]:
        """This rank's rows, masked as evaluation always does, longest first and cut to the longest of their batch."""
        collator = self.collator_of(data)
        lengths = (data.rows != collator.pad_id).sum(1)
        order = np.argsort(-lengths, kind="stable")[self.backend.rank :: self.backend.size]
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            ids = data.rows[numbers].astype(np.int64)[:, : max(int(lengths[numbers].max()), 1)]
            keys = key(SEED, "evaluation mask", numbers)
            yield collator.collate(ids, keys, numbers).to(self.backend.device)
            done(len(numbers))

    def head_rows(
        self, model: LanguageModel, data: EvaluationSet, done: ProgressCallback
    ) -> Iterator[tuple[Batch, torch.Tensor]]:
        """This rank's batches, and what the model's head is given at their targets, [N, E]."""
        for batch in self.batches(data, done):
            rows = model(batch.inputs, batch.documents, OutputSpec(True, batch.targets.positions)).head_rows
            assert rows is not None
            if self.kept.wanted:
                self.kept.add(data.name, rows)
            yield batch, rows

    def has_targets(self, data: EvaluationSet) -> bool:
        """Whether any position of the set has a token to predict; every rank finds the same by itself."""
        collator = self.collator_of(data)
        for start in range(0, data.num_rows, self.batch_size):
            numbers = np.arange(start, min(start + self.batch_size, data.num_rows))
            keys = key(SEED, "evaluation mask", numbers)
            if len(collator.collate(data.rows[numbers].astype(np.int64), keys, numbers).targets.positions):
                return True
        return False

    def num_targets(self, data: EvaluationSet) -> int:
        """How many positions of the set have a token to predict, over all ranks."""
        count = sum(len(batch.targets.positions) for batch in self.batches(data, lambda _: None))
        return int(self.backend.sum(torch.tensor(count)))

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.backend.device)


class PerplexityMeter:
    """exp of the mean negative log-likelihood of tokens, over all ranks, in float64."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        # The sum and the number of the losses, rather than torchmetrics' MeanMetric: its import takes a second, a
        # seventh of what a short run's scores take, and it exchanges through torch.distributed alone.
        self.sums = torch.zeros(2, dtype=torch.float64, device=backend.device)

    def update(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """logits [N, V], targets [N] -> the loss of each token [N], float64"""
        losses = cross_entropy(logits.double(), targets, reduction="none")
        self.sums[0] += losses.sum()
        self.sums[1] += len(losses)
        return losses

    def compute(self) -> float:
        total, count = self.backend.sum(self.sums).tolist()
        return exp(total / count) if count else float("nan")


def exp(mean: float) -> float:
    """The exponential; inf for a hopeless model's value, where `math.exp` would end the run with OverflowError."""
    with np.errstate(over="ignore"):
        return float(np.exp(mean))


def token_losses(model: LanguageModel, rows: torch.Tensor | None, targets: torch.Tensor, vocab: int) -> torch.Tensor:
    """Cross-entropy of each token in nats, float64: rows [N, E], targets [N] -> [N], in chunks of bounded memory."""
    assert rows is not None
    size = max(1, LOGITS_BYTES // (8 * vocab))
    losses = [
        cross_entropy(model.logits(some, vocab).double(), wanted, reduction="none")
        for some, wanted in zip(rows.split(size), targets.split(size), strict=True)
    ]
    return torch.cat(losses)
