"""Perplexity of causal language models by a sliding window, and bits per byte, which compare across vocabularies.

Shapes: B windows, S positions of a window, N scored tokens, V vocabulary.
"""

import re
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerBase

from distill.data.batch import Batch
from distill.data.collate.clm import CausalLM
from distill.data.row_format import PROMPT
from distill.evaluation.measures import ProgressCallback, Scoring, exp, token_losses
from distill.evaluation.row_losses import RowLosses, RowMeter
from distill.evaluation.sets import EvaluationSet
from distill.models.language_model import LanguageModel, OutputSpec


class Totals(NamedTuple):
    """Sums over all scored tokens of a set and all ranks."""

    loss: float  # nats
    tokens: float
    text_loss: float  # nats, without special tokens
    text_bytes: float  # UTF-8


class Window(NamedTuple):
    """A stretch of text that a model sees at once, of which the tokens from `first` on are scored."""

    ids: np.ndarray
    first: int
    row: int = 0  # of the set, whose tokens are scored


class SlidingPerplexity:
    """exp of the mean cross-entropy of the next token.

    Every token is scored once, except those of prompts and the first one of a document where no token marks its
    beginning. A window is as
    long as a row; it moves on by `stride` tokens, and only those that it has not scored before count. So each of them
    has at least a window less a stride of its document before it, as far as the document goes back.
    """

    name = "perplexity"
    title = "Perplexity"
    lower_is_better = True
    unit = "rows"

    def __init__(self, scoring: Scoring, stride: int | None, token_bytes: np.ndarray) -> None:
        """`stride` None: half a row; `token_bytes` [V]: UTF-8 bytes of each token, 0 of special ones."""
        assert isinstance(scoring.collator, CausalLM)
        self.scoring, self.stride = scoring, stride
        self.collator: CausalLM = scoring.collator
        self.token_bytes = torch.from_numpy(token_bytes).to(scoring.backend.device)
        moves = "half a row" if stride is None else f"{stride} tokens"
        self.explanation = (
            "the exponential of the mean cross-entropy of the next token, by a window of a row that moves on by "
            + moves
            + (", over what counts: prompts are read and not scored" if scoring.prompts else "")
        )
        # The model is referred to weakly, so that it leaves memory before the next one is loaded.
        self._last: tuple[weakref.ref[LanguageModel], EvaluationSet, Totals, RowLosses | None] | None = None

    def size(self, data: EvaluationSet) -> int:
        return data.num_rows

    def num_positions(self, data: EvaluationSet) -> int:
        """Tokens that are scored, on all ranks."""
        windows = [window for row in range(data.num_rows) for window in self.windows(data, row)]
        return sum(int(_scored(self._collate(data, [window]), [window]).sum()) for window in windows)

    def score(self, model: LanguageModel, data: EvaluationSet, done: ProgressCallback) -> float:
        totals = self.totals(model, data, done)
        by_row = self._last[3] if self._last is not None else None
        if self.scoring.row_losses is not None and by_row is not None:
            self.scoring.row_losses[self.name, data.name] = by_row
        return exp(totals.loss / totals.tokens) if totals.tokens else float("nan")

    def scores_any(self, data: EvaluationSet) -> bool:
        windows = (window for row in range(data.num_rows) for window in self.windows(data, row))
        return any(_scored(self._collate(data, [window]), [window]).any() for window in windows)

    def totals(self, model: LanguageModel, data: EvaluationSet, done: ProgressCallback) -> Totals:
        """The sums for a model on a set; asked again for the same, they are not computed again."""
        if self._last is not None and self._last[0]() is model and self._last[1] is data:
            done(-(-data.num_rows // self.scoring.backend.size))
            return self._last[2]
        sums = torch.zeros(4, dtype=torch.float64, device=self.scoring.backend.device)
        by_row = None if self.scoring.row_losses is None else RowMeter(self.scoring.backend, data.num_rows)
        for windows in self._batches(data, done):
            batch = self._collate(data, windows)
            scored = torch.from_numpy(_scored(batch, windows))  # chosen here: a device would have to be waited for
            positions, targets = (each[scored].to(sums.device) for each in batch.targets)
            batch = batch.to(sums.device)
            rows = model(batch.inputs, batch.documents, OutputSpec(True, positions)).head_rows
            losses = token_losses(model, rows, targets, self.scoring.vocab)
            lengths = self.token_bytes[targets]
            counts = torch.stack(
                [losses.sum(), losses.new_tensor(len(losses)), (losses * (lengths > 0)).sum(), lengths.sum()]
            )
            sums += counts
            if by_row is not None:
                numbers = self.scoring.tensor(np.array([window.row for window in windows], np.int64))
                by_row.update(losses, numbers[positions // batch.ids.shape[1]])
        totals = Totals(*self.scoring.backend.sum(sums).tolist())
        self._last = (weakref.ref(model), data, totals, None if by_row is None else by_row.compute())
        return totals

    def windows(self, data: EvaluationSet, row: int) -> Iterator[Window]:
        """The windows of a row of the set, each with the text before it that belongs to the same document."""
        pad, width = self.collator.pad_id, data.rows.shape[1]
        own, before = data.rows[row], data.before(row)
        own = own[own != pad]
        before = own[:0] if before is None else before[before != pad]
        if len(before) and int(before[-1]) & ~PROMPT == self.collator.format.document_end:
            before = before[:0]
        text, stride = np.concatenate([before, own]).astype(np.int64), self.stride or max(width // 2, 1)
        for start in range(len(before), len(text), stride):
            end = min(start + stride, len(text))
            begin = max(0, end - width)
            yield Window(text[begin:end], start - begin, row)

    def _batches(self, data: EvaluationSet, done: ProgressCallback) -> Iterator[list[Window]]:
        """This rank's windows, longest rows first, as many at once as `evaluate.batch_size` says."""
        lengths = (data.rows != self.collator.pad_id).sum(1)
        rows = np.argsort(-lengths, kind="stable")[self.scoring.backend.rank :: self.scoring.backend.size]
        waiting: list[Window] = []
        for number, row in enumerate(rows):
            waiting += self.windows(data, row)
            while len(waiting) >= self.scoring.batch_size or (waiting and number == len(rows) - 1):
                yield waiting[: self.scoring.batch_size]
                waiting = waiting[self.scoring.batch_size :]
            done(1)

    def _collate(self, data: EvaluationSet, windows: list[Window]) -> Batch:
        ids = np.full((len(windows), max(len(window.ids) for window in windows)), self.collator.pad_id, np.int64)
        for row, window in zip(ids, windows, strict=True):
            row[: len(window.ids)] = window.ids
        numbers = np.arange(len(windows))
        return self.collator.collate(ids, numbers.astype(np.uint64), numbers)


class BitsPerByte:
    """The information of the text in bits, as the model sees it, for each of its UTF-8 bytes.

    Over the tokens that perplexity scores, without special ones, which are no text. Unlike perplexity it does not
    depend on how a vocabulary cuts the text up.
    """

    name = "bits_per_byte"
    title = "Bits per byte"
    explanation = "the same in bits for each byte of the text, which compares models of different vocabularies"
    lower_is_better = True
    unit = "rows"

    def __init__(self, perplexity: SlidingPerplexity) -> None:
        self.perplexity = perplexity

    def size(self, data: EvaluationSet) -> int:
        return data.num_rows

    def num_positions(self, data: EvaluationSet) -> int:
        return self.perplexity.num_positions(data)

    def scores_any(self, data: EvaluationSet) -> bool:
        return self.perplexity.scores_any(data)

    def score(self, model: LanguageModel, data: EvaluationSet, done: ProgressCallback) -> float:
        totals = self.perplexity.totals(model, data, done)
        return totals.text_loss / np.log(2) / totals.text_bytes if totals.text_bytes else float("nan")


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """How many UTF-8 bytes of text each token stands for, [V] int64; 0 for special tokens.

    Exact for byte-level BPE and for SentencePiece, where \u2581 is a space; for WordPiece, which drops spaces, a space
    before every token that does not go on a word.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = "ByteLevel" in str(getattr(backend, "decoder", ""))
    # Not by its tokens: vocabularies of SentencePiece hold ## too, which marks headings.
    continues = isinstance(getattr(backend, "model", None), WordPiece)

    def length(token: str) -> int:
        if byte_level:
            return len(token)  # one character stands for one byte
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return 1
        if continues:
            return len(token.removeprefix("##").encode()) + (not token.startswith("##"))
        return len(token.replace("\u2581", " ").encode())

    return np.array(
        [0 if number in special or not token else length(token) for number, token in enumerate(tokens)], np.int64
    )


def _scored(batch: Batch, windows: list[Window]) -> np.ndarray:
    """Which of the batch's targets are scored, [N] bool: those that stand at `first` or behind it in their window."""
    positions = batch.targets.positions.numpy()
    row, column = np.divmod(positions, batch.ids.shape[1])
    return column + 1 >= np.array([window.first for window in windows])[row]
