"""What one micro-batch is: token ids, which positions are text, and the targets of each task.

Shapes: B sequences, S positions, N positions with a target.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

PADDING = -1  # the document number of positions that are padding


class Labels(NamedTuple):
    """The targets of one task. Positions are found on the CPU, so that no step waits for a device to search."""

    positions: torch.Tensor  # [N] int64, flat positions in B * S
    targets: torch.Tensor  # [N] int64, the token to predict at each


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B sequences of S tokens, with its targets.

    Attributes:
        inputs: what the models take besides masks, such as `input_ids` [B, S]; of a causal model also
            `document_lengths` [D], of all documents of the sequences one after the other, padding among them.
        documents: [B, S] int64, the number of the document that a position belongs to in its sequence, -1 at padding;
            None: no padding, and one document a sequence.
        labels: the targets, with `positions` and `targets`, by task, such as `mlm`; the tokens to predict come first.
        valid_positions: [num_valid] int64, flat non-padding positions; None: all of them.
        row_ids: [B] int64, the number of each sequence in the corpus.
        dropout_keys: [B], the stream of dropout of each sequence, another one in each pass over the corpus; empty:
            torch's own stream.
        teacher_data: what `Teacher.read_ahead` has put here, such as cached entries of these sequences; only the
            teacher reads it.
        is_dummy: whether it only fills up a window, so that all ranks make as many forward passes: no term counts its
            sequences.
    """

    inputs: dict[str, torch.Tensor]
    documents: torch.Tensor | None
    labels: dict[str, Labels]
    valid_positions: torch.Tensor | None
    row_ids: np.ndarray
    dropout_keys: tuple[int, ...] = ()
    teacher_data: dict[str, torch.Tensor] = field(default_factory=dict)
    is_dummy: bool = False

    @property
    def ids(self) -> torch.Tensor:
        """[B, S] int64, token ids as the models see them."""
        return self.inputs["input_ids"]

    @property
    def targets(self) -> Labels:
        """The tokens to predict, of whichever task the batch is of."""
        return next(iter(self.labels.values()))

    @property
    def num_valid(self) -> int:
        """Non-padding positions."""
        return self.ids.numel() if self.valid_positions is None else len(self.valid_positions)

    def valid(self, values: torch.Tensor) -> torch.Tensor:
        """Values of all positions [B, S, ...], such as hidden states -> [num_valid, ...], without padding."""
        rows = values.flatten(0, 1)
        return rows if self.valid_positions is None else rows.index_select(0, self.valid_positions)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the non-padding positions [num_valid, H] -> values of all positions [B, S, H], 0 at padding."""
        if self.valid_positions is not None:
            rows = rows.new_zeros(self.ids.numel(), rows.shape[1]).index_copy_(0, self.valid_positions, rows)
        return rows.view(*self.ids.shape, -1)

    def rows_at(self, rows: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Rows of the non-padding positions, or of `positions` alone -> those at these flat positions; None: all."""
        if positions is None or len(rows) == len(positions):
            return rows
        if self.valid_positions is not None:
            positions = torch.searchsorted(self.valid_positions, positions)
        return rows.index_select(0, positions)

    def with_teacher_data(self, **tensors: torch.Tensor) -> "Batch":
        """A copy with this, too, in its `teacher_data`."""
        return replace(self, teacher_data=self.teacher_data | tensors)

    def to(self, device: torch.device) -> "Batch":
        """A copy with all tensors on a device."""
        # A copy to the host is read at once; one to a GPU is waited for by what computes there.
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))

    def pinned(self) -> "Batch":
        """A copy in page-locked memory, from which a GPU copies without the processor."""
        return self._mapped(torch.Tensor.pin_memory)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        def mapped(value: Any) -> Any:
            return None if value is None else change(value)

        return replace(
            self,
            inputs={name: change(value) for name, value in self.inputs.items()},
            documents=mapped(self.documents),
            labels={name: Labels(*map(change, labels)) for name, labels in self.labels.items()},
            valid_positions=mapped(self.valid_positions),
            teacher_data={name: change(value) for name, value in self.teacher_data.items()},
        )


def as_dummy(batch: Batch) -> Batch:
    """The batch without a target or a valid position: for a rank that has no more sequences in a window."""
    labels = {name: Labels(*(part[:0] for part in labels)) for name, labels in batch.labels.items()}
    none = torch.empty(0, dtype=torch.int64)
    return replace(batch, labels=labels, valid_positions=none, is_dummy=True)
