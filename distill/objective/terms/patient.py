"""Patient knowledge distillation: the first position's hidden states of inner layers, normalised."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.data.batch import Batch
from distill.models.language_model import Outputs, OutputSpec, hidden_widths
from distill.models.precision import at_least_fp32
from distill.objective.terms._pairs import PairsTerm, layer_pairs, sides
from distill.teacher.output import TeacherOutput


class Patient(PairsTerm):
    """Sum over pairs of layers of |h / |h| - t / |t||^2 at the first position ([CLS]) of every sequence.

    Sun et al., "Patient Knowledge Distillation for BERT Model Compression" (2019), section 3.2. Without `pairs` it is
    their PKD-Skip: all blocks of the student but the last, whose output the other losses see. Layer 0 is the
    embeddings.
    """

    title = "First position (patient)"
    reads_first_position = True

    def build_pairs(self, student: Any, teacher: Any) -> None:
        first = 1 if self.requested is None else 0
        self.pairs = layer_pairs(self.requested, student, teacher, first, skipped=1)
        layers, teacher_layers = sides(self.pairs)
        widths, teacher_widths = hidden_widths(student, layers), hidden_widths(teacher, teacher_layers)
        if widths != teacher_widths:
            raise ValueError(
                f"weight: teacher and student have hidden sizes {teacher_widths[0]} and {widths[0]}, and patient "
                "distillation has no projection; use objective.hidden_mse or objective.hidden_cosine"
            )
        self.student_reads, self.teacher_reads = OutputSpec(layers=layers), OutputSpec(layers=teacher_layers)

    def count(self, batch: Batch) -> int:
        return len(batch.ids)

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        distances = [
            (_direction(student.hidden[layer]) - _direction(teacher.outputs.hidden[teacher_layer])).square().sum()
            for layer, teacher_layer in self.pairs
        ]
        return torch.stack(distances).sum()


def _direction(hidden: Tensor) -> Tensor:
    """[B, S, H] -> [B, H], of length 1."""
    return F.normalize(at_least_fp32(hidden[:, 0]), dim=-1)
