"""Loss terms: one file each, found by its name. A term is a sum over its own positions; `Objective` divides it.

A term of your own is a class that inherits from `Term` or `VocabularyTerm`, named as `objective.NAME._target_`; its
constructor takes the settings beside that.

Shapes: B rows, S positions, H hidden size, n rows of a chunk, V vocabulary, K kept entries.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from distill.data.batch import Batch
from distill.models.language_model import Outputs
from distill.teacher.signal import Signal, TopK

ALL = "all"  # the rows of a vocabulary term that acts at every non-padding position


class Term(ABC):
    """One loss: what it reads, how many positions it has, and its sum over them.

    Attributes:
        title: what the report calls it; empty: its name.
        needs_teacher: whether there has to be one.
        student_layers, teacher_layers: hidden states that it reads, numbered as in `OutputSpec.layers`.
        module: what is trained with the student and never exported, such as a projection; made by `build`.
    """

    title: ClassVar[str] = ""
    needs_teacher: ClassVar[bool] = True
    student_layers: tuple[int, ...] = ()
    teacher_layers: tuple[int, ...] = ()
    module: nn.Module | None = None

    def build(self, student: Any, teacher: Any | None) -> None:
        """Make `module` for these two models (transformers models, or whatever the pair consists of), or refuse them.

        Raises:
            ValueError: the pair does not fit; the message says what would.
        """
        return None

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """How many positions of the batch carry the term."""

    @abstractmethod
    def loss_sum(self, student: Outputs, teacher: Signal, batch: Batch) -> Tensor:
        """Scalar, summed over those positions."""


class VocabularyTerm(Term):
    """A loss on logits. All of them are visited together, in chunks of rows, without a [rows, V] tensor that is kept.

    Attributes:
        rows: `all` non-padding positions, or the name of labels (such as `mlm`): those that have a target.
        top_k_temperature: of the teacher's K largest probabilities, where the term can do with those of a cache; None:
            it needs the teacher's logits.
    """

    rows: str = ALL
    top_k_temperature: float | None = None

    def count(self, batch: Batch) -> int:
        return batch.num_valid if self.rows == ALL else len(batch.labels[self.rows].positions)

    @abstractmethod
    def losses(self, student: Tensor, teacher: Tensor | TopK | None, targets: Tensor) -> Tensor:
        """One value per row, in at least fp32: student logits [n, V] -> [n]; gradients come from autograd.

        Args:
            teacher: its logits [n, V], its K largest entries (ids [n, K], log_probs [n, K + 1]) where it is read from a
                cache, or None where no term of the objective needs one.
            targets: [n] int64, the token to predict, or -100 in a row without one.
        """

    def loss_sum(self, student: Outputs, teacher: Signal, batch: Batch) -> Tensor:
        raise TypeError("terms over the vocabulary are visited together: see distill.objective.vocabulary")
