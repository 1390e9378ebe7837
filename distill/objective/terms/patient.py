"""Patient knowledge distillation: the first position's hidden states of inner layers, normalised."""

import torch.nn.functional as F
from torch import Tensor

from distill.data.batch import Batch
from distill.objective.terms._pairs import Hidden


class Patient(Hidden):
    """Sum over pairs of layers of |h / |h| - t / |t||^2 at the first position ([CLS]) of every sequence.

    Sun et al., "Patient Knowledge Distillation for BERT Model Compression" (2019), section 3.2. Without `pairs` it is
    their PKD-Skip: all blocks of the student but the last, whose output the other losses see. Layer 0 is the
    embeddings.
    """

    title = "First position (patient)"
    reads_first_position = True
    projects = False
    spread = (1, 1)

    def rows(self, hidden: Tensor, batch: Batch) -> Tensor:
        return hidden[:, 0]

    def count(self, batch: Batch) -> int:
        return len(batch.ids)

    def losses(self, student: Tensor, teacher: Tensor) -> Tensor:
        return (F.normalize(student, dim=-1) - F.normalize(teacher, dim=-1)).square()
