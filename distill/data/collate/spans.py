"""Answers in a context: sequences of a question and a window, with the positions where the answer begins and ends.

Shapes: B sequences, S positions.
"""

from dataclasses import dataclass

import numpy as np
import torch

from distill.data.batch import Batch, Labels
from distill.data.collate.classes import text_batch
from distill.data.span_windows import SpanWindows


@dataclass(frozen=True)
class Spans:
    """The batches of a set of windows.

    `span_start` and `span_end` have a target for each sequence whose answer is given, L of them: `positions` are these
    sequences [L] of the batch, `targets` [L] the positions in the sequence, that of [CLS] where the window has no
    answer.
    """

    windows: SpanWindows

    @property
    def pad_id(self) -> int:
        return self.windows.pad_id

    @property
    def identity(self) -> str:
        return f"spans {self.windows.digest}"

    def collate(self, ids: np.ndarray, row_keys: np.ndarray, row_ids: np.ndarray) -> Batch:
        """A micro-batch of the windows of these numbers, ids [B, S] int64; nothing in it is random."""
        labelled = np.flatnonzero(row_ids < len(self.windows.starts))
        positions, numbers = torch.from_numpy(labelled), row_ids[labelled]
        labels = {
            "span_start": Labels(positions, torch.from_numpy(self.windows.starts[numbers])),
            "span_end": Labels(positions, torch.from_numpy(self.windows.ends[numbers])),
        }
        return text_batch(ids, self.windows.segments[row_ids], self.pad_id, labels, row_ids)
