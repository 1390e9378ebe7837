"""What a measure is, and the passes over a set that measures read; every file beside this one is a family of them.

A pass runs a model over a set. What comes out updates torchmetrics Metrics, whose sums all ranks exchange: a value
depends neither on batch size nor on padding nor on the number of ranks. Files that hold Metrics are imported when
models are scored, since the import of torchmetrics takes a second or more. Shapes: N targets, E input size of the
output embedding, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from distill.config.settings import EvaluateConfig
from distill.data.batch import Batch
from distill.data.batches import Collator
from distill.data.sequence_store import outer_ids
from distill.distributed import Ranks
from distill.evaluation.sets import SEED, EvaluationSet
from distill.models.language_model import LanguageModel, OutputSpec
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted, in_a_sentence
from distill.runtime.seed import key

if TYPE_CHECKING:
    from torchmetrics import Metric

LOGITS_BYTES = 128 << 20  # in float64, that exist at once
PRODUCT_BYTES = 1 << 30  # in fp32, of a batch whose logits are computed as one where they fit
KEPT_BYTES = 256 << 20  # of head rows that are kept of a model

# Called with the number of sequences or positions that were scored since the last call.
ProgressCallback = Callable[[int], None]


@dataclass(frozen=True)
class Measure:
    """One number for a model on a set, as results, report, comparison and plots call it."""

    name: str  # its key in results.json
    title: str
    explanation: str  # half a sentence that follows the title
    lower_is_better: bool = True


@dataclass
class KeptRows:
    """What a model's head is given at the targets of each set, batch by batch, for agreement to read again."""

    room: int  # bytes that may still be kept
    by_set: dict[str, list[Tensor]] = field(default_factory=dict)  # each [N, E]

    def add(self, name: str, rows: Tensor) -> None:
        """Keep the rows of one more batch of a set; a set that does not fit is dropped."""
        self.room -= rows.nbytes
        if self.room >= 0:
            self.by_set.setdefault(name, []).append(rows)
        else:
            self.by_set.pop(name, None)


@dataclass(frozen=True)
class Byproducts:
    """What a pass hands over besides its values, where requested."""

    sequence_losses: "Metric | None" = None  # a `SequenceLossSums`: gets the loss of every token, 1 for a wrong class
    head_rows: KeptRows | None = None  # gets what the head is given


NO_BYPRODUCTS = Byproducts()


@dataclass(frozen=True)
class Scoring:
    """What all passes have in common: how sequences become batches, and the ranks that share the work."""

    collator: Collator
    tokenizer: PreTrainedTokenizerBase
    settings: EvaluateConfig
    ranks: Ranks
    sets: Sequence[EvaluationSet] = ()  # that models are scored on
    heads: tuple[str, ...] = ()  # that are scored in place of that over the vocabulary

    @cached_property
    def vocab(self) -> int:
        """V, the length of the tokenizer."""
        return len(self.tokenizer)

    def collator_of(self, data: EvaluationSet) -> Collator:
        """What makes batches of a set's rows."""
        return data.collator or self.collator

    def batches(self, data: EvaluationSet, on_progress: ProgressCallback) -> Iterator[Batch]:
        """This rank's sequences, masked as evaluation always does, longest first, cut to the longest of a batch."""
        for batch in self.collated(data):
            yield batch.to(self.ranks.device)
            on_progress(len(batch.row_ids))

    def collated(self, data: EvaluationSet) -> Iterator[Batch]:
        """`batches` that are not on the device of this rank, for what only counts them."""
        collator, size = self.collator_of(data), self.settings.batch_size
        lengths = (outer_ids(data.sequences) != collator.pad_id).sum(1)
        order = np.argsort(-lengths, kind="stable")[self.ranks.rank :: self.ranks.size]
        for start in range(0, len(order), size):
            numbers = order[start : start + size]
            tokens = data.sequences[numbers][:, : max(int(lengths[numbers].max()), 1)]
            yield collator.collate(tokens, key(SEED, "evaluation mask", numbers), numbers)

    def head_rows(
        self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback
    ) -> Iterator[tuple[Batch, Tensor]]:
        """This rank's batches, and what the model's head is given at their targets, [N, E]."""
        for batch in self.batches(data, on_progress):
            rows = model(batch.inputs, batch.documents, OutputSpec(True, batch.targets.positions)).head_rows
            assert rows is not None
            yield batch, rows

    def tensor(self, array: np.ndarray) -> Tensor:
        """An array on the device of this rank."""
        return torch.from_numpy(array).to(self.ranks.device)


class Trial(NamedTuple):
    """The largest batch of a pass, computed once before training to see whether memory holds it."""

    run: Callable[[LanguageModel], object]
    positions: int  # of the batch on this rank
    setting: str  # that decides how large it is
    value: int


class Pass(ABC):
    """One way to run models over a set, and the measures that read what they give.

    Attributes:
        measures: what it gives a value of; none where no set has such a value.
        user_measures: those of `evaluate.measures` that read it too.
        unit: of what `size` counts.
        keeps_head_rows: whether its head rows are those that agreement reads.
    """

    measures: tuple[Measure, ...]
    user_measures: tuple[Measure, ...] = ()
    unit = "sequences"
    keeps_head_rows = False

    def size(self, data: EvaluationSet) -> int:
        """The work of scoring a set, in `unit`, over all ranks."""
        return data.num_sequences

    def num_positions(self, data: EvaluationSet) -> int:
        """The number of positions that it scores, over all ranks."""
        return data.num_sequences

    def applies_to(self, data: EvaluationSet) -> bool:
        """Whether the settings select a value for this set."""
        return True

    def has_positions(self, data: EvaluationSet) -> bool:
        """Whether a set has any position to score; every rank gets the same by itself."""
        return True

    def by_sequence(self, data: EvaluationSet) -> str | None:
        """The measure of a set that is a mean over what its sequences contribute; None where no measure is."""
        return None

    def trial(self, data: EvaluationSet) -> Trial | None:
        """Its largest batch, unless that is the largest of sequences; all ranks get one, or none does."""
        return None

    @abstractmethod
    def score(
        self,
        model: LanguageModel,
        data: EvaluationSet,
        on_progress: ProgressCallback,
        byproducts: Byproducts = NO_BYPRODUCTS,
    ) -> dict[str, float]:
        """Values by measure, for a model in evaluation mode; all ranks call it and get the same.

        A model that lacks what is measured, such as a head for the order of segments, has no value.

        Args:
            on_progress: gets how much of the set was scored since its last call, in `unit`.
            byproducts: `sequence_losses` where a measure is `by_sequence`, `head_rows` of one that `keeps_head_rows`.
        """


def require_positions(passes: Sequence[Pass], sets: Sequence[EvaluationSet]) -> None:
    """Refuse sets that a pass would score at no position at all: their scores would be no numbers.

    Raises:
        SettingError: a set has none, such as sequences of unknown tokens alone.
    """
    for data in sets:
        for scoring_pass in passes:
            if not scoring_pass.applies_to(data) or scoring_pass.has_positions(data):
                continue
            (measure, *_) = scoring_pass.measures
            raise SettingError(
                f"evaluate.sets: {data.name} has {counted(data.num_sequences, 'sequence')} and not one position that "
                f"{in_a_sentence(measure.title)} scores: take a longer text, or models with a vocabulary of this "
                "language"
            )


def exp(mean: float) -> float:
    """The exponential; inf for a hopeless model's value, where `math.exp` would end the run with OverflowError."""
    with np.errstate(over="ignore"):
        return float(np.exp(mean))


def chunk_rows(vocab: int) -> int:
    """Head rows whose logits in float64 may exist at once."""
    return max(1, LOGITS_BYTES // (8 * vocab))


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each token in nats: logits [n, V], targets [n] -> [n] float64, in chunks of bounded memory."""
    size = chunk_rows(logits.shape[1])
    chunks = zip(logits.split(size), targets.split(size), strict=True)
    return torch.cat([cross_entropy(part.double(), labels, reduction="none") for part, labels in chunks])


def token_losses(model: LanguageModel, rows: Tensor | None, targets: Tensor, vocab: int) -> Tensor:
    """Cross-entropy of each token in nats, float64: rows [N, E], targets [N] -> [N], in chunks of bounded memory.

    Over all rows of the model's output embedding, padded ones too: the model's own log-probability. `vocab`, the number
    of tokens, is what chunks are sized by.
    """
    assert rows is not None
    chunks = zip(rows.split(chunk_rows(vocab)), targets.split(chunk_rows(vocab)), strict=True)
    return torch.cat([losses_of(model.logits(row_chunk), labels) for row_chunk, labels in chunks])
