"""Which layers of a student are compared with which of its teacher, projections, and losses of hidden states."""

from abc import abstractmethod
from typing import Any

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
    """A loss that is summed over pairs of layers.

    Attributes:
        requested: the pairs that are set; None: the default of the loss.
        pairs: the layers as set until `build`, then as the models number them.
    """

    def __init__(self, pairs: list[list[int]] | None = None) -> None:
        """`pairs`: [student layer, teacher layer], -1 the last; null: the default of the loss."""
        self.requested = checked_pairs(pairs)
        self.pairs: list[Pair] = self.requested or []

    def build(self, student: Any, teacher: Any | None) -> None:
        if teacher is not None:
            self.build_pairs(student, teacher)

    @abstractmethod
    def build_pairs(self, student: Any, teacher: Any) -> None:
        """`build` for two models: number `pairs`, and set what is read of each."""


class HiddenPairs(PairsTerm):
    """A loss at every non-padding position, summed over pairs of layers, with a projection where widths differ.

    Layer 0 is the embeddings, i the output of block i; without `pairs` all layers of the student count, evenly spread.
    """

    def build_pairs(self, student: Any, teacher: Any) -> None:
        self.pairs = layer_pairs(self.requested, student, teacher, first=0)
        layers, teacher_layers = sides(self.pairs)
        self.student_reads, self.teacher_reads = OutputSpec(layers=layers), OutputSpec(layers=teacher_layers)
        self.module = projections(hidden_widths(student, layers), hidden_widths(teacher, teacher_layers))

    def count(self, batch: Batch) -> int:
        return batch.num_valid

    @abstractmethod
    def losses(self, student: Tensor, teacher: Tensor) -> Tensor:
        """One pair's loss per position, in at least fp32: [N, H], [N, H] -> [N]."""

    def loss_sum(self, student: Outputs, teacher: TeacherOutput, batch: Batch) -> Tensor:
        sums = []
        for number, (layer, teacher_layer) in enumerate(self.pairs):
            states = projected(self.module, number, at_least_fp32(batch.valid(student.hidden[layer])))
            teacher_states = at_least_fp32(batch.valid(teacher.outputs.hidden[teacher_layer]))
            sums.append(self.losses(states, teacher_states).sum())
        return torch.stack(sums).sum()


def checked_pairs(pairs: list[list[int]] | None) -> list[Pair] | None:
    """The setting `pairs` of a term. Raises ValueError for anything but pairs of two numbers."""
    if pairs is None:
        return None
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"pairs={pairs} has to be a list of [student layer, teacher layer], such as [[1,2],[2,4]]")
    return [(student, teacher) for student, teacher in pairs]


def layer_pairs(pairs: list[Pair] | None, student: Any, teacher: Any, first: int, skipped: int = 0) -> list[Pair]:
    """The pairs that are set, by the numbers of both models; None: every layer of the student, evenly spread.

    With M blocks in the student and N in the teacher, layer m has the teacher's m * N / M beside it, rounded.

    Args:
        first: the lowest layer that there is: 0 the embeddings, 1 the first block.
        skipped: how many of the student's last layers the even spread leaves out.

    Raises:
        ValueError: there is no such layer, or no number of layers to spread.
    """
    depth, teacher_depth = depth_of(student), depth_of(teacher)
    if pairs is not None:
        return [
            (_layer("student", layer, depth, first), _layer("teacher", teacher_layer, teacher_depth, first))
            for layer, teacher_layer in pairs
        ]
    if depth is None or teacher_depth is None:
        raise ValueError("pairs=null, but a model has no number of layers in its configuration: name the pairs")
    layers = range(first, depth + 1 - skipped)
    if not layers:
        raise ValueError(f"pairs=null leaves no layer of a student of {depth} blocks: name the pairs")
    return [(layer, max(first, (2 * layer * teacher_depth + depth) // (2 * depth))) for layer in layers]


def _layer(which: str, number: int, blocks: int | None, first: int) -> int:
    """A layer by its own number; LAST stays only where the number of a model's layers is unknown."""
    if number == LAST:
        return LAST if blocks is None else blocks
    if number < first or (blocks is not None and number > blocks):
        largest = "its number of blocks" if blocks is None else blocks
        raise ValueError(
            f"pairs names layer {number} of the {which}: give {first} to {largest}, or {LAST} for the last"
        )
    return number


def block_number(setting: str, number: int, model: Any) -> int:
    """A block from 1, where LAST is the last. Raises ValueError, which names the setting, where there is none."""
    blocks = depth_of(model)
    block = blocks if number == LAST else number
    if block is None or block < 1 or (blocks is not None and block > blocks):
        largest = "its number of blocks" if blocks is None else f"{blocks}, or {LAST} for the last"
        raise ValueError(f"{setting}={number} is no block of {type(model).__name__}: give 1 to {largest}")
    return block


def sides(pairs: list[Pair]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The student's layers and the teacher's, in the order of the pairs."""
    return tuple(layer for layer, _ in pairs), tuple(teacher_layer for _, teacher_layer in pairs)


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
