"""What losses between hidden states of several layers have in common: pairs, projections, rows."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from distill.data.batch import Batch
from distill.models.kernels.precision import at_least_fp32
from distill.models.language_model import Outputs, OutputSpec
from distill.models.shapes import hidden_widths
from distill.objective.terms._pairs import PairsTerm, layer_pairs, projected, projections, sides
from distill.objective.terms.cosine import valid_rows
from distill.teacher.output import TeacherOutput


class HiddenPairs(PairsTerm):
    """A loss at every non-padding position, summed over pairs of layers, with a projection where widths differ.

    Layer 0 is the embeddings, i the output of block i; without `pairs` all layers of the student count, evenly spread.
    """

    def build_pairs(self, student: Any, teacher: Any) -> None:
        self.pairs = layer_pairs(self._given, student, teacher, first=0)
        own, other = sides(self.pairs)
        self.student_reads, self.teacher_reads = OutputSpec(layers=own), OutputSpec(layers=other)
        self.module = projections(hidden_widths(student, own), hidden_widths(teacher, other))

    def count(self, batch: Batch) -> int:
        return batch.num_valid

    @abstractmethod
    def losses(self, student: Tensor, teacher: Tensor) -> Tensor:
        """One pair's loss per position, in at least fp32: [N, H], [N, H] -> [N]."""

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        sums = []
        for number, (own, other) in enumerate(self.pairs):
            rows = projected(self.module, number, at_least_fp32(valid_rows(student.hidden[own], batch)))
            known = at_least_fp32(valid_rows(teacher.outputs.hidden[other], batch))
            sums.append(self.losses(rows, known).sum())
        return torch.stack(sums).sum()
