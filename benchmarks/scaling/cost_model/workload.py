"""What a run has to compute, hold, send and read: numbers alone, for any machine."""

import math
from dataclasses import dataclass

from benchmarks.scaling.cost_model.model_shape import ModelShape

# Streams through memory of a step for each parameter, 4 bytes each: the gradient is measured and visited, the weight
# and two moments are read and written. LAMB visits weights and updates twice (docs/explanation/benchmarks/step.md).
STREAMS = {"adamw": 8, "lamb": 11}


@dataclass(frozen=True)
class Frozen:
    """A teacher in training."""

    shape: ModelShape
    precision: str
    micro_batches: int = 1  # that one forward takes


@dataclass(frozen=True)
class Workload:
    """A run of steps of the same rows, whatever computes it."""

    student: ModelShape
    precision: str  # of the student
    length: int  # positions of a row
    positions: float  # of a row that reach the head
    batch_size: int  # rows of a rank and micro-batch, at most
    rows_per_step: int  # of all ranks
    steps: int
    teachers: tuple[Frozen, ...] = ()
    sharded: bool = False  # whether ranks hold parts of the student and its teachers
    sync: str = "window"  # or every: an exchange after each micro-batch
    wire: str = "fp32"  # the number format of gradients on their way
    overlaps: bool = True  # whether an exchange may begin during backward
    optimizer: str = "adamw"
    save_every: int = 1000
    evaluations: int = 1  # of the student; each teacher is evaluated once
    evaluation_rows: int = 0  # of all sets
    evaluation_copies: float = 0.0  # forwards of a row for each of these: pseudo-perplexity's

    @property
    def save_bytes(self) -> float:
        """Of a checkpoint: weights and two moments, in fp32."""
        return 12.0 * self.student.parameters

    @property
    def row_bytes(self) -> float:
        """That are read for a row: ids of 2 bytes where the vocabulary is small enough for them."""
        return (2 if self.student.vocabulary < 2**16 else 4) * self.length

    def window(self, ranks: int) -> tuple[int, int]:
        """Micro-batches of a rank between two exchanges, and the rows of each, where ranks have equal shares."""
        rows = math.ceil(self.rows_per_step / ranks)
        micro_batches = math.ceil(rows / self.batch_size)
        return micro_batches, math.ceil(rows / micro_batches)
