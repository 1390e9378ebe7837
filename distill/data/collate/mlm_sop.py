"""Masked tokens and the order of two segments: sequences as `paired_format` makes them, half of them swapped.

Shapes: B sequences, S positions.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from distill.data.batch import Batch, Labels
from distill.data.collate.mlm import MaskedLM
from distill.runtime.seed import key, uniform


@dataclass(frozen=True)
class MaskedLMAndOrder:
    """Swaps the segments of a sequence with probability 1/2, each sequence by its own key, then masks tokens.

    Lan et al., "ALBERT: A Lite BERT" (2020), section 3.1: both segments are of one document and follow each other, and
    the model learns whether they are in their order (0) or swapped (1).
    """

    masking: MaskedLM
    separator: int
    swaps: bool  # false: segments stay in their order, which is not predicted

    @property
    def pad_id(self) -> int:
        return self.masking.pad_id

    @property
    def identity(self) -> str:
        return f"{self.masking.identity} separator={self.separator} swaps={self.swaps}"

    def collate(self, ids: np.ndarray, row_keys: np.ndarray, row_ids: np.ndarray) -> Batch:
        """A micro-batch of the sequences ids [B, S] with their segment numbers, [B, S], as `token_type_ids`."""
        swapped = uniform(key(0, "order of segments", row_keys)) < 0.5
        if not self.swaps:
            swapped = np.zeros_like(swapped)
        ids, segments = arrange(ids, self.separator, swapped)
        batch = self.masking.collate(ids, row_keys, row_ids)
        labels = dict(batch.labels)
        if self.swaps:
            labels["sop"] = Labels(torch.arange(len(ids)), torch.from_numpy(swapped.astype(np.int64)))
        return replace(batch, inputs=batch.inputs | {"token_type_ids": torch.from_numpy(segments)}, labels=labels)

    def segments(self, ids: np.ndarray) -> np.ndarray:
        """The segment numbers of sequences that are not swapped, [B, S]."""
        return arrange(ids, self.separator, np.zeros(len(ids), bool))[1]


def arrange(ids: np.ndarray, separator: int, swapped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sequences [CLS] A [SEP] B [SEP], or [CLS] B [SEP] A [SEP] where `swapped` [B] is true, and the segment numbers.

    Args:
        ids: [B, S], each sequence with two `separator` and perhaps padding behind them.

    Returns:
        ids [B, S], and 0 up to the first separator, 1 from there up to the second, 0 at padding, [B, S].
    """
    is_separator = ids == separator
    middle = is_separator.argmax(1)[:, None]
    end = ids.shape[1] - 1 - is_separator[:, ::-1].argmax(1)[:, None]
    column = np.arange(ids.shape[1])[None]
    length = end - middle - 1  # of B, with which a swapped sequence begins
    source = np.where(column <= length, column + middle, column - length - 1)
    source = np.where(column == length + 1, middle, source)
    source = np.where((column == 0) | (column >= end), column, source)
    source = np.where(swapped[:, None], source, column)
    first = np.where(swapped[:, None], length + 1, middle)  # where the first separator then stands
    return np.take_along_axis(ids, source, 1), ((column > first) & (column <= end)).astype(np.int64)
