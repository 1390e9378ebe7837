"""Loss terms: one file each, found by its name. A term is a sum over its own positions; `Objective` divides it.

A term of your own is a class that inherits from `Term` or `VocabularyTerm`, named as `objective.NAME._target_`; its
constructor takes the settings beside that.

Shapes: B sequences, S positions, H hidden size, n rows of a chunk of logits, V vocabulary, K kept entries.
"""

import copy
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from distill.data.batch import Batch
from distill.models.language_model import Outputs, OutputSpec
from distill.teacher.distributions import Sparse
from distill.teacher.output import TeacherOutput

# The positions of a vocabulary term:
ALL = "all"  # every non-padding position
TARGETS = "targets"  # those with a token to predict, masked or next


class Term(ABC):
    """One loss: what it reads, how many positions it has, and its sum over them.

    Attributes:
        title: what the report calls it; empty: its name.
        task: the targets that it predicts, by their name in `Batch.labels`; empty: none, or whichever there are.
        needs_teacher: whether there has to be one.
        across_tokenizers: whether it needs no pair of token sequences, so that the teacher may have another tokenizer.
        student_reads, teacher_reads: what it reads of either model, such as `OutputSpec(layers=(1, 2))`; `build` may
            still change it. With `OutputSpec(head=True)` the student's head is `student.head`, whose `logits()` has a
            row for each non-padding position, and what the teacher gives there is `teacher.distribution`.
        reads_first_position: whether the first position stands for the whole sequence, as a [CLS] token does.
        module: what is trained with the student and never exported, such as a projection; made by `build`.
        temperature: of a loss that has one.
    """

    title: ClassVar[str] = ""
    task: ClassVar[str] = ""
    needs_teacher: ClassVar[bool] = True
    across_tokenizers: ClassVar[bool] = False
    student_reads: OutputSpec = OutputSpec()
    teacher_reads: OutputSpec = OutputSpec()
    reads_first_position: bool = False
    module: nn.Module | None = None
    temperature: float

    def build(self, student: Any, teacher: Any | None) -> None:
        """Make `module` for these two models (transformers models, or whatever the pair consists of), or refuse them.

        Raises:
            ValueError: the pair does not fit; the message names what would.
        """
        return None

    def at_temperature(self, temperature: float) -> Self:
        """A copy of this term at another temperature, for a step of a schedule."""
        changed = copy.copy(self)
        changed.temperature = temperature
        return changed

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """How many positions of the batch carry the term."""

    @abstractmethod
    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        """Scalar, summed over those positions."""


class VocabularyTerm(Term):
    """A loss on logits. All of them are visited together, in chunks of rows, without a [rows, V] tensor that is kept.

    Attributes:
        positions: ALL non-padding positions, or TARGETS: those that have a token to predict.
        reads_probabilities: whether it reads the teacher's probabilities, at its `temperature` or, without one, at 1:
            there they are averaged where there are several teachers. Else it can do with logits up to a constant.
        top_k_temperature: of the teacher's K largest probabilities, where the term can do with those of a cache; None:
            it needs the teacher's logits.
        reads_samples: whether such a term can do with an unbiased estimate of the probabilities, too, `Samples`: a loss
            that is linear in them can.
    """

    positions: str = ALL
    reads_probabilities: ClassVar[bool] = True
    top_k_temperature: float | None = None
    reads_samples: ClassVar[bool] = False

    def count(self, batch: Batch) -> int:
        return batch.num_valid if self.positions == ALL else len(batch.targets.positions)

    @abstractmethod
    def losses(self, student: Tensor, teacher: Tensor | Sparse | None, targets: Tensor) -> Tensor:
        """One value per row, in at least fp32: student logits [n, V] -> [n]; gradients come from autograd.

        Args:
            teacher: its logits [n, V], `TopK` or, with `reads_samples`, `Samples` where it is read from a cache, or
                None where no term of the objective needs one.
            targets: [n] int64, the token to predict, or -100 in a row without one.
        """

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        raise TypeError("terms over the vocabulary are visited together: see distill.objective.chunked")
