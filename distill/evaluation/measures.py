"""What a measure is, the passes over a set that measures read, and the sums that ranks share.

A pass runs a model over a set and adds up what comes out, over all ranks: a value depends neither on the batch size nor
on padding nor on the number of ranks. Shapes: R sequences of a set, N targets, K sums, E input size of the output
embedding, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

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

LOGITS_BYTES = 128 << 20  # in float64, that exist at once

# Called with the number of sequences or positions that were scored since the last call.
ProgressCallback = Callable[[int], None]


@dataclass(frozen=True)
class Measure:
    """One number for a model on a set, as results, report, comparison and plots call it."""

    name: str  # its key in results.json
    title: str
    explanation: str  # half a sentence that follows the title
    lower_is_better: bool = True


@dataclass(frozen=True)
class SequenceLosses:
    """What each sequence or question contributes to a perplexity, exp(losses.sum() / counts.sum()), or to an error."""

    losses: np.ndarray  # [R] float64, nats of the sequence's scored tokens; or 1 where its class is wrong, else 0
    counts: np.ndarray  # [R] float64, how many tokens these are; or 1


class SetScores(NamedTuple):
    """What a pass finds out about a model on one set, the same on all ranks."""

    values: dict[str, float]  # by measure
    positions: int  # that were scored
    # By measure: losses, or what is predicted, [R], where it is no mean over sequences.
    losses: Mapping[str, SequenceLosses | np.ndarray] = MappingProxyType({})


class Sums:
    """K sums over the tokens of a set, of all sequences together and of each, in float64 and over all ranks."""

    def __init__(self, count: int, num_sequences: int, ranks: Ranks) -> None:
        self.ranks = ranks
        self._sums = torch.zeros(count, num_sequences + 1, dtype=torch.float64, device=ranks.device)

    def add(self, sequences: Tensor, *values: Tensor) -> None:
        """Add the K values [N] of tokens in the sequences of these numbers [N]."""
        for sums, of_tokens in zip(self._sums, values, strict=True):
            sums[-1] += of_tokens.sum()
            sums.index_add_(0, sequences, of_tokens.double())

    def over_ranks(self) -> np.ndarray:
        """[K, R + 1]: of each sequence, and last of all of them. All ranks call it once."""
        self.ranks.barrier()  # one may score for longer than the others wait in an exchange
        return self.ranks.sum(self._sums).cpu().numpy()


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

    def longest_first(self, data: EvaluationSet) -> np.ndarray:
        """The numbers of all sequences of a set."""
        return np.argsort(-_lengths(data.sequences, self.collator_of(data).pad_id), kind="stable")

    def batch(self, data: EvaluationSet, numbers: np.ndarray) -> Batch:
        """These sequences, masked as evaluation always does, cut to the longest of them, on this rank's device."""
        return self._collated(data, numbers).to(self.ranks.device)

    def batches(self, data: EvaluationSet, on_progress: ProgressCallback) -> Iterator[Batch]:
        """This rank's sequences, longest first; a thread makes the next batch while one is scored."""
        order, size = self.longest_first(data)[self.ranks.rank :: self.ranks.size], self.settings.batch_size
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        with ThreadPoolExecutor(1, thread_name_prefix="scoring") as pool:
            ahead = [pool.submit(self._collated, data, numbers) for numbers in parts[:1]]
            for place, numbers in enumerate(parts, start=1):
                batch = ahead.pop().result()
                ahead = [pool.submit(self._collated, data, following) for following in parts[place : place + 1]]
                yield batch.to(self.ranks.device)
                on_progress(len(numbers))

    def _collated(self, data: EvaluationSet, numbers: np.ndarray) -> Batch:
        """The batch of these sequences on the host, in pinned memory for a GPU."""
        collator, sequences = self.collator_of(data), data.sequences[numbers]
        longest = int(_lengths(sequences, collator.pad_id).max())
        keys = key(SEED, "evaluation mask", numbers)
        batch = collator.collate(sequences[:, : max(longest, 1)], keys, numbers)
        return batch.pinned() if self.ranks.device.type == "cuda" else batch

    def whole_forward(self, model: LanguageModel, batch: Batch) -> None:
        """Everything that a model computes for a batch: its heads at every position, chunk by chunk."""
        if self.heads:
            model(batch.inputs, batch.documents, OutputSpec(extra=self.heads))
            return
        rows = model(batch.inputs, batch.documents, OutputSpec(True)).head_rows
        assert rows is not None
        for chunk in rows.split(chunk_rows(self.vocab)):
            model.logits(chunk, self.vocab)

    def tensor(self, array: np.ndarray) -> Tensor:
        """An array on the device of this rank."""
        return torch.from_numpy(array).to(self.ranks.device, non_blocking=True)


def _lengths(sequences: np.ndarray, pad_id: int) -> np.ndarray:
    """Positions of each sequence up to the last without padding; of a decoder padding may begin or part texts, too."""
    is_token = outer_ids(sequences) != pad_id
    return np.where(is_token.any(1), is_token.shape[1] - is_token[:, ::-1].argmax(1), 0)


class Pass(ABC):
    """One way to run models over a set, and the measures that read what they give.

    Attributes:
        measures: what it gives a value of; none where no set has such a value.
        user_measures: those of `evaluate.measures` that read it too.
        unit: of what `size` counts.
        batch_setting: of the settings of evaluation, how large its batches are.
    """

    scoring: Scoring
    measures: tuple[Measure, ...]
    user_measures: tuple[Measure, ...] = ()
    unit = "sequences"
    batch_setting = "batch_size"

    def size(self, data: EvaluationSet) -> int:
        """The work of scoring a set, in `unit`, over all ranks; 0 where the settings select no value for it."""
        return data.num_sequences

    def largest_batch(self, data: EvaluationSet) -> tuple[int, Callable[[LanguageModel], object]]:
        """The positions of its largest batch, and what computes it with a model."""
        batch = self.scoring.batch(data, self.scoring.longest_first(data)[: self.scoring.settings.batch_size])
        return batch.ids.numel(), lambda model: self.scoring.whole_forward(model, batch)

    @abstractmethod
    def score(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> SetScores:
        """The scores of a model in evaluation mode; all ranks call it.

        A model that lacks what is measured, such as a head for the order of segments, has no value.

        Args:
            on_progress: gets how much of the set was scored since its last call, in `unit`.
        """


def require_positions(measure: Measure, scoring: Scoring) -> None:
    """Refuse sets without any token to predict: their scores would be no numbers."""
    for data in scoring.sets:
        order, size = scoring.longest_first(data), scoring.settings.batch_size
        batches = (scoring.batch(data, order[start : start + size]) for start in range(0, len(order), size))
        if not any(len(batch.targets.positions) for batch in batches):
            raise SettingError(
                f"evaluate.sets: {data.name} has {counted(data.num_sequences, 'sequence')} and not one position that "
                f"{in_a_sentence(measure.title)} scores: take a longer text, or models with a vocabulary of this "
                "language"
            )


def mean(total: float, count: float) -> float:
    """Their quotient; not a number where there is nothing."""
    return float(total / count) if count else float("nan")


def exp(value: float) -> float:
    """The exponential; inf for a hopeless model's value, where `math.exp` would end the run with OverflowError."""
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def chunk_rows(vocab: int) -> int:
    """Head rows whose logits in float64 may exist at once."""
    return max(1, LOGITS_BYTES // (8 * vocab))


def token_losses(
    model: LanguageModel,
    rows: Tensor,
    targets: Tensor,
    vocab: int,
    read: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """Cross-entropy of each token in nats, float64: rows [N, E], targets [N] -> [N], in chunks of bounded memory.

    Over all rows of the model's output embedding, padded ones too: the model's own log-probability.

    Args:
        vocab: the number of tokens, by which chunks are sized.
        read: gets the logits of the tokens [n, V] and the targets [n] of each chunk.
    """
    losses = []
    for part, labels in zip(rows.split(chunk_rows(vocab)), targets.split(chunk_rows(vocab)), strict=True):
        logits = model.logits(part)
        losses.append(cross_entropy(logits.double(), labels, reduction="none"))
        if read is not None:
            read(logits[:, :vocab], labels)
    return torch.cat(losses)
