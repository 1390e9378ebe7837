"""Labelled examples: sequences of one text or two with classes or values, and windows of contexts with answers.

Shapes: B sequences, S positions.
"""

from dataclasses import dataclass

import numpy as np
import torch

from distill.data.batch import PADDING, Batch, Labels
from distill.data.text_pairs import LabelledSequences

WIDTHS = 32  # batches are cut to a multiple of this, so that compiled graphs meet few shapes


@dataclass(frozen=True)
class Labelled:
    """The batches of labelled sequences.

    Each task has a target for each sequence with one, L of them: `positions` are these sequences [L] of the batch,
    `targets` [L] the numbers of classes or the positions of tokens as int64, or values as float32.
    """

    examples: LabelledSequences

    @property
    def pad_id(self) -> int:
        return self.examples.pad_id

    @property
    def identity(self) -> str:
        """Everything that decides the targets of a sequence."""
        return f"{' '.join(self.examples.targets)} {self.examples.digest}"

    def collate(self, ids: np.ndarray, row_keys: np.ndarray, row_ids: np.ndarray) -> Batch:
        """A micro-batch of the sequences of these numbers, ids [B, S]; nothing in it is random.

        It is cut to the longest of them: most texts are far shorter than a sequence.
        """
        # Up to the last token that is no padding: of a decoder padding may be the token that begins or ends a text.
        valid = np.maximum.accumulate((ids != self.pad_id)[:, ::-1], axis=1)[:, ::-1].copy()
        valid[:, 0] = True  # an empty text, around which a decoder's tokenizer puts nothing
        longest = max(int(valid.sum(1).max(initial=1)), 1)
        width = min(-(-longest // WIDTHS) * WIDTHS, ids.shape[1])
        ids, valid = np.ascontiguousarray(ids[:, :width], np.int64), np.ascontiguousarray(valid[:, :width])
        segments = torch.from_numpy(self.examples.segments[row_ids, :width].astype(np.int64))
        full = valid.all()
        return Batch(
            inputs={"input_ids": torch.from_numpy(ids), "token_type_ids": segments},
            documents=None if full else torch.from_numpy(np.where(valid, 0, PADDING)),
            labels={task: _labels(targets, row_ids) for task, targets in self.examples.targets.items()},
            valid_positions=None if full else torch.from_numpy(np.flatnonzero(valid)),
            row_ids=row_ids,
        )


def _labels(targets: np.ndarray, row_ids: np.ndarray) -> Labels:
    labelled = np.flatnonzero(row_ids < len(targets))
    found = torch.from_numpy(targets[row_ids[labelled]])
    return Labels(torch.from_numpy(labelled), found if found.dtype == torch.int64 else found.float())
