"""Labelled examples: sequences of one text or two with classes or values, and windows of contexts with answers.

Shapes: B sequences, S positions.
"""

from dataclasses import dataclass

import numpy as np
import torch

from distill.data.batch import PADDING, Batch, Labels
from distill.data.span_windows import SpanWindows
from distill.data.text_pairs import ClassSequences

WIDTHS = 32  # batches are cut to a multiple of this, so that compiled graphs meet few shapes


@dataclass(frozen=True)
class Classes:
    """The batches of a set of texts.

    `class` has a target for each sequence with a label, L of them: `positions` are these sequences [L] of the batch,
    `targets` [L] the numbers of the classes as int64, or values as float32.
    """

    texts: ClassSequences

    @property
    def pad_id(self) -> int:
        return self.texts.pad_id

    @property
    def identity(self) -> str:
        return f"classes {self.texts.digest}"

    def collate(self, ids: np.ndarray, row_keys: np.ndarray, row_ids: np.ndarray) -> Batch:
        """A micro-batch of the texts of these numbers, ids [B, S]; nothing in it is random."""
        labelled = np.flatnonzero(row_ids < len(self.texts.labels))
        targets = torch.from_numpy(self.texts.labels[row_ids[labelled]])
        targets = targets if targets.dtype == torch.int64 else targets.float()
        labels = {"class": Labels(torch.from_numpy(labelled), targets)}
        return text_batch(ids, self.texts.segments[row_ids], self.pad_id, labels, row_ids)


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
        """A micro-batch of the windows of these numbers, ids [B, S]; nothing in it is random."""
        labelled = np.flatnonzero(row_ids < len(self.windows.starts))
        positions, numbers = torch.from_numpy(labelled), row_ids[labelled]
        labels = {
            "span_start": Labels(positions, torch.from_numpy(self.windows.starts[numbers])),
            "span_end": Labels(positions, torch.from_numpy(self.windows.ends[numbers])),
        }
        return text_batch(ids, self.windows.segments[row_ids], self.pad_id, labels, row_ids)


def text_batch(
    ids: np.ndarray, segments: np.ndarray, pad_id: int, labels: dict[str, Labels], row_ids: np.ndarray
) -> Batch:
    """A batch of sequences [B, S], cut to the longest of them: most texts are far shorter than a sequence.

    Args:
        segments: [B, S or more] token_type_ids.
    """
    # Up to the last token that is no padding: of a decoder padding may be the token that begins or ends a text.
    valid = np.maximum.accumulate((ids != pad_id)[:, ::-1], axis=1)[:, ::-1].copy()
    valid[:, 0] = True  # an empty text, around which a decoder's tokenizer puts nothing
    longest = max(int(valid.sum(1).max(initial=1)), 1)
    width = min(-(-longest // WIDTHS) * WIDTHS, ids.shape[1])
    ids, valid = np.ascontiguousarray(ids[:, :width], np.int64), np.ascontiguousarray(valid[:, :width])
    types = torch.from_numpy(segments[:, :width].astype(np.int64))
    full = valid.all()
    return Batch(
        inputs={"input_ids": torch.from_numpy(ids), "token_type_ids": types},
        documents=None if full else torch.from_numpy(np.where(valid, 0, PADDING)),
        labels=labels,
        valid_positions=None if full else torch.from_numpy(np.flatnonzero(valid)),
        row_ids=row_ids,
    )
