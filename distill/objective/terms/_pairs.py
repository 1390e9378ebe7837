"""Which layers of a student are compared with which of its teacher, projections, and the loss of hidden states."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from distill.data.batch import Batch
from distill.models.blocks import depth_of
from distill.models.language_model import LAST, Outputs, OutputSpec, hidden_widths
from distill.models.precision import at_least_fp32
from distill.objective.terms import Term
from distill.teacher.output import TeacherOutput

Pair = tuple[int, int]  # a layer of the student, one of the teacher


class PairsTerm(Term):
    """A loss that is summed over pairs of layers; layer 0 is the embeddings, i the output of block i.

    Attributes:
        pairs: the layers as set until `build`, then as the models number them; None: evenly spread.
        lowest: the lowest layer that may be named.
        spread: the first layer of the student that counts without `pairs`, and how many of its last ones do not.
    """

    lowest: ClassVar[int] = 0
    spread: ClassVar[tuple[int, int]] = (0, 0)

    def __init__(self, pairs: list[list[int]] | None = None) -> None:
        """`pairs`: [student layer, teacher layer], -1 the last; null: the default of the loss."""
        if pairs is not None and (not pairs or any(len(pair) != 2 for pair in pairs)):
            raise ValueError(f"pairs={pairs} has to be a list of [student layer, teacher layer], such as [[1,2],[2,4]]")
        self.pairs: list[Pair] | None = None if pairs is None else [(layer, other) for layer, other in pairs]

    def build(self, student: Any, teacher: Any | None) -> None:
        if teacher is not None:
            depths = depth_of(student), depth_of(teacher)
            self.pairs = _spread(depths, *self.spread) if self.pairs is None else self._numbered(self.pairs, depths)
            layers, teacher_layers = zip(*self.pairs, strict=True)
            self.build_pairs(student, layers, teacher, teacher_layers)

    @abstractmethod
    def build_pairs(self, student: Any, layers: tuple[int, ...], teacher: Any, teacher_layers: tuple[int, ...]) -> None:
        """Set what is read of each model, and make `module`; ValueError where the pair does not fit."""

    def _numbered(self, pairs: list[Pair], depths: tuple[int | None, int | None]) -> list[Pair]:
        """The pairs by the numbers of both models. Raises ValueError where there is no such layer."""
        found = [
            [layer_number(f"pairs names layer {one} of the {which}", one, depth, self.lowest) for one in layers]
            for which, layers, depth in zip(("student", "teacher"), zip(*pairs, strict=True), depths, strict=True)
        ]
        return list(zip(*found, strict=True))


class Hidden(PairsTerm):
    """A loss of hidden states, with a projection where widths differ; at every non-padding position."""

    projects: ClassVar[bool] = True

    def build_pairs(self, student: Any, layers: tuple[int, ...], teacher: Any, teacher_layers: tuple[int, ...]) -> None:
        self.student_reads, self.teacher_reads = OutputSpec(layers=layers), OutputSpec(layers=teacher_layers)
        widths, teacher_widths = hidden_widths(student, layers), hidden_widths(teacher, teacher_layers)
        if self.projects:
            self.module = projections(widths, teacher_widths)
        elif widths != teacher_widths:
            raise ValueError(
                f"weight: teacher and student have hidden sizes {teacher_widths[0]} and {widths[0]}, and patient "
                "distillation has no projection; use objective.hidden_mse or objective.hidden_cosine"
            )

    def rows(self, hidden: Tensor, batch: Batch) -> Tensor:
        """[B, S, H] -> those of the positions that count."""
        return batch.valid(hidden)

    def count(self, batch: Batch) -> int:
        return batch.num_valid

    @abstractmethod
    def losses(self, student: Tensor, teacher: Tensor) -> Tensor:
        """One pair's loss per position, or what adds up to it, in at least fp32."""

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        sums = []
        for number, (layer, teacher_layer) in enumerate(self.pairs or ()):
            states = projected(self.module, number, at_least_fp32(self.rows(student.hidden[layer], batch)))
            teacher_states = at_least_fp32(self.rows(teacher.outputs.hidden[teacher_layer], batch))
            sums.append(self.losses(states, teacher_states).sum())
        return torch.stack(sums).sum()


def _spread(depths: tuple[int | None, int | None], first: int, skipped: int) -> list[Pair]:
    """Every layer of the student from `first` but the `skipped` last, evenly spread over the teacher's.

    With M blocks in the student and N in the teacher, layer m has the teacher's m * N / M beside it, rounded.
    """
    depth, teacher_depth = depths
    if depth is None or teacher_depth is None:
        raise ValueError("pairs=null, but a model has no number of layers in its configuration: name the pairs")
    layers = range(first, depth + 1 - skipped)
    if not layers:
        raise ValueError(f"pairs=null leaves no layer of a student of {depth} blocks: name the pairs")
    return [(layer, max(first, (2 * layer * teacher_depth + depth) // (2 * depth))) for layer in layers]


def layer_number(named: str, number: int, depth: int | None, lowest: int) -> int:
    """A layer by its own number; LAST stays only where the number of a model's layers is unknown.

    Raises:
        ValueError: there is no such layer; `named`: how the line begins.
    """
    if number == LAST:
        return LAST if depth is None else depth
    if number < lowest or (depth is not None and number > depth):
        largest = "its number of blocks" if depth is None else depth
        raise ValueError(f"{named}: give {lowest} to {largest}, or {LAST} for the last")
    return number


def projections(student_widths: list[int], teacher_widths: list[int]) -> nn.ModuleList | None:
    """For every pair a linear layer without bias from the student's to the teacher's width, where these differ.

    As in TinyBERT (Jiao et al. 2020, equation 8), but with one layer for each pair. None where no widths differ.
    """
    if student_widths == teacher_widths:
        return None
    return nn.ModuleList(
        nn.Identity() if width == teacher_width else nn.Linear(width, teacher_width, bias=False)
        for width, teacher_width in zip(student_widths, teacher_widths, strict=True)
    )


def projected(module: nn.Module | None, number: int, hidden: Tensor) -> Tensor:
    """The student's hidden state of pair `number` in the teacher's width."""
    if module is None:
        return hidden
    assert isinstance(module, nn.ModuleList)
    layer: Any = module[number]
    return hidden if isinstance(layer, nn.Identity) else layer(hidden.to(layer.weight.dtype))
