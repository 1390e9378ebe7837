"""Perplexity of masked models at a fixed mask, and of causal ones by a sliding window, with bits per byte.

Shapes: N scored tokens, S positions of a window, E input size of the output embedding, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distill.config.component import Component
from distill.data.batch import Batch
from distill.data.collate.clm import CausalLM
from distill.data.sequence_store import outer_ids, padded
from distill.evaluation.measures import (
    Measure,
    Pass,
    ProgressCallback,
    Scoring,
    SequenceLosses,
    SetScores,
    Sums,
    exp,
    mean,
    token_losses,
)
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.text_bytes import TextBytes
from distill.evaluation.users import UserMeasures
from distill.models.language_model import LanguageModel, OutputSpec

OWN_PROBABILITIES = ", by the model's own probabilities, which are over all rows of its output embedding"
PERPLEXITY = Measure(
    "perplexity",
    "Perplexity",
    "the exponential of the mean cross-entropy at the masked positions of a fixed, seeded mask" + OWN_PROBABILITIES,
)


class Tokens(NamedTuple):
    """Tokens that are scored together."""

    head_rows: Tensor  # [N, E]
    targets: Tensor  # [N] int64
    sequences: Tensor  # [N] int64, the sequence of the set that each is in
    text_bytes: Tensor | None = None  # [N] int64, bytes of text that each stands for, where these are counted
    is_text: Tensor | None = None  # [N] bool, whether each is text at all


class TokenPass(Pass):
    """A pass whose measures read the losses of tokens; those of the user's get their logits."""

    def __init__(self, scoring: Scoring, measures: tuple[Measure, ...], components: dict[str, Component]) -> None:
        """`components`: the user's measures that read it too."""
        self.scoring, self.measures = scoring, measures
        self.users = UserMeasures(components, scoring.vocab, scoring.ranks)
        self.user_measures = self.users.measures

    @abstractmethod
    def tokens(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> Iterator[Tokens]:
        """This rank's tokens, batch by batch."""

    def score(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> SetScores:
        self.users.reset()
        sums = Sums(2 * len(self.measures), data.num_sequences, self.scoring.ranks)
        for some in self.tokens(model, data, on_progress):
            losses = token_losses(model, some.head_rows, some.targets, self.scoring.vocab, self.users.update)
            values = [losses, torch.ones_like(losses)]
            if some.text_bytes is not None and some.is_text is not None:
                values += [losses * some.is_text, some.text_bytes * some.is_text]
            sums.add(some.sequences, *values)
        loss, count, *of_text = sums.over_ranks()
        name = self.measures[0].name
        scores = {name: exp(mean(loss[-1], count[-1]))}
        if of_text:
            scores["bits_per_byte"] = mean(of_text[0][-1] / np.log(2), of_text[1][-1])
        losses_by_sequence = {name: SequenceLosses(loss[:-1], count[:-1])}
        return SetScores({**scores, **self.users.compute(data.name)}, int(count[-1]), losses_by_sequence)


class MaskPass(TokenPass):
    """The masked positions of a fixed mask.

    15 % of the maskable positions of each sequence, all alike; 80 % of them masked, 10 % random, 10 % kept (BERT's
    training task).
    """

    def __init__(self, scoring: Scoring) -> None:
        super().__init__(scoring, (PERPLEXITY,), scoring.settings.own_measures)

    def tokens(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> Iterator[Tokens]:
        for batch in self.scoring.batches(data, on_progress):
            positions, targets = batch.targets
            rows = model(batch.inputs, batch.documents, OutputSpec(True, positions)).head_rows
            assert rows is not None
            yield Tokens(rows, targets, self.scoring.tensor(batch.row_ids)[positions // batch.ids.shape[1]])


class Window(NamedTuple):
    """A stretch of text that a model sees at once, of which the tokens from `first` on are scored."""

    tokens: np.ndarray
    first: int
    row: int  # of the set, whose tokens are scored


class WindowPass(TokenPass):
    """The tokens of a text, each with a stretch of it before.

    Every token is scored once, except those of prompts and the first one of a document where no token marks its
    beginning. A window is as long as a sequence; it moves on by `evaluate.stride` tokens (half a sequence by default),
    and only those that it has not scored before count. So each of them has at least a window less a stride of its
    document before it, as far as the document goes back.

    Bits per byte are the information of the text in bits, as the model sees it, for each of its UTF-8 bytes: over the
    tokens that perplexity scores, without special ones, which are no text. They do not depend on how a vocabulary cuts
    the text up.
    """

    def __init__(self, scoring: Scoring) -> None:
        assert isinstance(scoring.collator, CausalLM)
        self.collator: CausalLM = scoring.collator
        self.stride = scoring.settings.stride
        self.text_bytes = TextBytes(scoring.tokenizer)
        moves = "half a sequence" if self.stride is None else f"{self.stride} tokens"
        explanation = "the exponential of the mean cross-entropy of the next token, by a window of sequence length "
        explanation += f"that moves by {moves}{OWN_PROBABILITIES}"
        if any(data.prompts for data in scoring.sets):
            explanation += "; prompts are read and not scored"
        bits = "the same in bits for each byte of the text, which compares models of different vocabularies"
        measures = [Measure("perplexity", "Perplexity", explanation), Measure("bits_per_byte", "Bits per byte", bits)]
        self.counts_bytes = bool(self.text_bytes.is_text.any())
        super().__init__(scoring, tuple(measures[: 1 + self.counts_bytes]), scoring.settings.own_measures)

    def tokens(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> Iterator[Tokens]:
        device = self.scoring.ranks.device
        for windows in self._batches(data, on_progress):
            batch = self._collate(windows)
            # Those at `first` or behind it in their window, chosen here: a device would have to be waited for.
            row, column = np.divmod(batch.targets.positions.numpy(), batch.ids.shape[1])
            scored = torch.from_numpy(column + 1 >= np.array([window.first for window in windows])[row])
            positions, targets = (part[scored] for part in batch.targets)
            text = [torch.from_numpy(part.reshape(-1))[positions + 1] for part in self.text_bytes(batch.ids.numpy())]
            numbers = torch.tensor([window.row for window in windows])[positions // batch.ids.shape[1]]
            is_text, text_bytes, positions, targets, numbers = (
                part.to(device) for part in (*text, positions, targets, numbers)
            )
            batch = batch.to(device)
            rows = model(batch.inputs, batch.documents, OutputSpec(True, positions)).head_rows
            assert rows is not None
            yield Tokens(rows, targets, numbers, *((text_bytes, is_text) if self.counts_bytes else ()))

    def windows(self, data: EvaluationSet, row: int) -> Iterator[Window]:
        """The windows of a sequence of the set, each with the text before it that belongs to the same document."""
        pad, width = self.collator.pad_id, data.sequences.shape[1]
        tokens, before = data.sequences[row], data.before(row)
        tokens = tokens[outer_ids(tokens) != pad]
        before = tokens[:0] if before is None else before[outer_ids(before) != pad]
        if len(before) and outer_ids(before)[-1] == self.collator.format.document_end:
            before = before[:0]
        text, stride = np.concatenate([before, tokens]), self.stride or max(width // 2, 1)
        for start in range(len(before), len(text), stride):
            end = min(start + stride, len(text))
            begin = max(0, end - width)
            yield Window(text[begin:end], start - begin, row)

    def _batches(self, data: EvaluationSet, on_progress: ProgressCallback) -> Iterator[list[Window]]:
        """This rank's windows, longest sequences first, as many at once as `evaluate.batch_size`."""
        ranks, size = self.scoring.ranks, self.scoring.settings.batch_size
        pending: list[Window] = []
        for row in self.scoring.longest_first(data)[ranks.rank :: ranks.size]:
            pending += self.windows(data, row)
            while len(pending) >= size:
                yield pending[:size]
                pending = pending[size:]
            on_progress(1)
        if pending:
            yield pending

    def _collate(self, windows: list[Window]) -> Batch:
        numbers, longest = np.arange(len(windows)), max(len(window.tokens) for window in windows)
        tokens = padded([window.tokens for window in windows], longest, self.collator.pad_id)
        return self.collator.collate(tokens, numbers.astype(np.uint64), numbers)
