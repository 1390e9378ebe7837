"""Perplexity of causal language models by a sliding window, and bits per byte, which compare across vocabularies.

Shapes: B windows, S positions of a window, N scored tokens, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from distill.data.batch import Batch
from distill.data.collate.clm import CausalLM
from distill.data.sequence_store import outer_ids, padded
from distill.evaluation.measures import Measure, ProgressCallback, Scoring, exp
from distill.evaluation.measures.over_ranks import sum_exchange
from distill.evaluation.measures.perplexity import Part, TokenPass
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.text_bytes import TextBytes
from distill.models.language_model import LanguageModel, OutputSpec


class Window(NamedTuple):
    """A stretch of text that a model sees at once, of which the tokens from `first` on are scored."""

    tokens: np.ndarray
    first: int
    row: int = 0  # of the set, whose tokens are scored


class TextInformation(Metric):
    """Perplexity, and the information of the text in bits, as the model sees it, for each of its UTF-8 bytes.

    Bits per byte are over the tokens that perplexity scores, without special ones, which are no text. Unlike perplexity
    they do not depend on how a vocabulary cuts the text up. `text_bytes` says which text it is.
    """

    is_differentiable, higher_is_better, full_state_update = False, False, False
    # [4] float64: losses of all tokens in nats, their number, losses of those that are text, and bytes of these.
    sums: Tensor

    def __init__(self, **exchange: Any) -> None:
        super().__init__(**exchange)
        self.add_state("sums", torch.zeros(4, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, num_bytes: Tensor, is_text: Tensor) -> None:
        """Add the losses [N] float64, in nats, of tokens that stand for so many bytes [N], and are text or not [N]."""
        self.sums[:2] += torch.stack([losses.sum(), losses.new_full((), len(losses))])
        self.sums[2:] += torch.stack([(losses * is_text).sum(), (num_bytes * is_text).sum()])

    def compute(self) -> dict[str, float]:
        """`perplexity`, and `bits_per_byte` in bits; not numbers without tokens or bytes."""
        loss, tokens, text_loss, text_bytes = self.sums.tolist()
        return {
            "perplexity": exp(loss / tokens) if tokens else float("nan"),
            "bits_per_byte": float(text_loss / np.log(2) / text_bytes) if text_bytes else float("nan"),
        }


class WindowPass(TokenPass):
    """The tokens of a text, each with a stretch of it before.

    Every token is scored once, except those of prompts and the first one of a document where no token marks its
    beginning. A window is as long as a sequence; it moves on by `evaluate.stride` tokens (half a sequence by default),
    and only those that it has not scored before count. So each of them has at least a window less a stride of its
    document before it, as far as the document goes back.
    """

    chunked = True

    def __init__(self, scoring: Scoring) -> None:
        assert isinstance(scoring.collator, CausalLM)
        self.collator: CausalLM = scoring.collator
        self.stride = scoring.settings.stride
        measures = (
            Measure("perplexity", "Perplexity", self._explanation(any(data.prompts for data in scoring.sets))),
            Measure(
                "bits_per_byte",
                "Bits per byte",
                "the same in bits for each byte of the text, which compares models of different vocabularies",
            ),
        )
        self.text_bytes = TextBytes(scoring.tokenizer)
        metric = TextInformation(**sum_exchange(scoring.ranks))
        super().__init__(scoring, metric, measures, scoring.settings.own_measures)

    def num_positions(self, data: EvaluationSet) -> int:
        batches = self._batches(data, lambda _: None)
        count = sum(int(_scored(self._collate(windows), windows).sum()) for windows in batches)
        return int(self.scoring.ranks.sum(torch.tensor(count)))

    def has_positions(self, data: EvaluationSet) -> bool:
        windows = (window for row in range(data.num_sequences) for window in self.windows(data, row))
        return any(_scored(self._collate([window]), [window]).any() for window in windows)

    def parts(self, model: LanguageModel, data: EvaluationSet, on_progress: ProgressCallback) -> Iterator[Part]:
        device = self.scoring.ranks.device
        for windows in self._batches(data, on_progress):
            batch = self._collate(windows)
            scored = torch.from_numpy(_scored(batch, windows))  # chosen here: a device would have to be waited for
            positions, targets = (part[scored] for part in batch.targets)
            text = [torch.from_numpy(part.reshape(-1))[positions + 1] for part in self.text_bytes(batch.ids.numpy())]
            is_text, num_bytes, positions, targets = (part.to(device) for part in (*text, positions, targets))
            batch = batch.to(device)
            rows = model(batch.inputs, batch.documents, OutputSpec(True, positions)).head_rows
            assert rows is not None
            numbers = self.scoring.tensor(np.array([window.row for window in windows], np.int64))
            yield Part(rows, targets, numbers[positions // batch.ids.shape[1]], num_bytes, is_text)

    def _explanation(self, prompts: bool) -> str:
        moves = "half a sequence" if self.stride is None else f"{self.stride} tokens"
        return (
            "the exponential of the mean cross-entropy of the next token, by a window of sequence length that moves by "
            + moves
            + ", by the model's own probabilities, which are over all rows of its output embedding"
            + ("; prompts are read and not scored" if prompts else "")
        )

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
        lengths = (outer_ids(data.sequences) != self.collator.pad_id).sum(1)
        order = np.argsort(-lengths, kind="stable")[self.scoring.ranks.rank :: self.scoring.ranks.size]
        pending: list[Window] = []
        for number, row in enumerate(order):
            pending += self.windows(data, row)
            while len(pending) >= self.scoring.settings.batch_size or (pending and number == len(order) - 1):
                yield pending[: self.scoring.settings.batch_size]
                pending = pending[self.scoring.settings.batch_size :]
            on_progress(1)

    def _collate(self, windows: list[Window]) -> Batch:
        numbers, longest = np.arange(len(windows)), max(len(window.tokens) for window in windows)
        tokens = padded([window.tokens for window in windows], longest, self.collator.pad_id)
        return self.collator.collate(tokens, numbers.astype(np.uint64), numbers)


def _scored(batch: Batch, windows: list[Window]) -> np.ndarray:
    """Which of the batch's targets are scored, [N] bool: those that are at `first` or behind it in their window."""
    positions = batch.targets.positions.numpy()
    row, column = np.divmod(positions, batch.ids.shape[1])
    return column + 1 >= np.array([window.first for window in windows])[row]
