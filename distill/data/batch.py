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
    """One micro-batch of sequences of tokens, with its targets."""

    inputs: dict[str, torch.Tensor]  # what the models take besides masks: input_ids [B, S]
    documents: torch.Tensor | None  # [B, S] int64, PADDING at padding, else 0 (one a sequence); None: no padding
    labels: dict[str, Labels]  # by task, such as mlm; the tokens to predict come first
    valid_positions: torch.Tensor | None  # [num_valid] int64, flat non-padding positions; None: all of them
    row_ids: np.ndarray  # [B] int64, number of each sequence in the corpus
    # [B]: names the stream of dropout of each sequence, another one in each pass over the corpus; empty: torch's own
    # stream.
    dropout_keys: tuple[int, ...] = ()
    # What `Teacher.read_ahead` has put here, such as cached entries of these sequences; only the teacher reads it.
    teacher_data: dict[str, torch.Tensor] = field(default_factory=dict)
    # Whether it only fills up a window, so that all ranks make as many forward passes: then no term counts its
    # sequences.
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

    def with_teacher_data(self, **tensors: torch.Tensor) -> "Batch":
        return replace(self, teacher_data=tensors)

    def to(self, device: torch.device) -> "Batch":
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
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
