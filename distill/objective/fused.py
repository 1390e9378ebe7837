"""Losses over the vocabulary chunk by chunk: loss and gradients together, no [N, V] tensor kept.

Shapes: N rows, n rows of one chunk or block, E width of a head's input, V vocabulary, K kept entries, T terms. The
plain path that this agrees with, in value and gradient, is `losses` on full logits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.models.language_model import Head
from distill.objective.blocks import NO_TARGET, Block, SoftMlmBlock, TeacherBlock, of_several, pieces, rows_at_once
from distill.teacher.signal import Mixture, Sparse, TopK, rows_of

BUDGET = 64 << 20  # bytes of logits that exist at once
# On the CPU products with the vocabulary are made in pieces of it.
COLUMNS = 512  # of fp32 logits: wider pieces were up to a third slower (MKL)
GRADIENT_ROWS = 1024  # of the weight's gradient: a piece in bf16 is widened while it is in the cache


def soft_and_mlm(
    student: Head,
    teacher: Head | Sparse | None,
    targets: Tensor | None,
    *,
    soft_scale: float | Tensor = 1.0,
    mlm_scale: float | Tensor = 1.0,
    temperature: float = 1.0,
    cutoff: float = 0.0,
    vocab: int | None = None,
    budget: int = BUDGET,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """soft_scale * sum of `losses.soft` + mlm_scale * sum of `losses.mlm`, and both unscaled sums.

    With a `TopK` teacher the soft term is `losses.soft_topk`, with `Samples` it is `losses.soft_sampled`; neither knows
    a cut-off. Without `teacher` there is no
    soft term, without `targets` (int64 [N], -100: no target) no mlm term.

    Args:
        budget: bounds, in bytes, the logits that exist at once.
        compiled: run the elementwise part through torch.compile, if a compiler is there.

    Returns:
        The loss (scalar, differentiable in the student's rows, weight and bias) and sums [2] (soft, mlm), detached.
    """
    accurate, device = torch.promote_types(matrix_dtype(student), torch.float32), student.rows.device
    scales = torch.stack([torch.as_tensor(value, dtype=accurate, device=device) for value in (soft_scale, mlm_scale)])
    block = SoftMlmBlock(temperature, cutoff, compiled)
    return chunked_loss(student, teacher, targets, block, scales, vocab=vocab, budget=budget)


def chunked_loss(
    student: Head,
    teacher: Head | Sparse | Mixture | None,
    targets: Tensor | None,
    block: Block,
    scales: Tensor,
    *,
    vocab: int | None = None,
    budget: int = BUDGET,
) -> tuple[Tensor, Tensor]:
    """Sum over the terms of scale * sum over the rows, and the unscaled sums [T], for the terms that `block` computes.

    Only the first `vocab` entries of either head count. Elementwise work is done in the format of `scales` [T], fp32 or
    float64, whatever the format of the matrix operations. Rows without a target are visited where there is a teacher
    or a term that acts on every row, and else left out.
    """
    vocab, student = vocab or len(student.weight), with_dtype(student)
    block = of_several(block, teacher) if isinstance(teacher, Mixture) else block
    plan = Plan(with_dtype(teacher), targets, block, scales, vocab, budget)
    return differentiable(student, scales, lambda wanted: visit_chunks(student, plan, wanted))


# Gives for what is wanted of rows, weight and bias: the sums [T], and the gradients of the scaled loss (None: not
# wanted).
Visit = Callable[[list[bool]], tuple[Tensor, list[Tensor | None]]]


def differentiable(student: Head, scales: Tensor, visit: Visit) -> tuple[Tensor, Tensor]:
    """The scaled loss (scalar), and the sums [T], of a visit that gives the gradients for the student as well."""
    return _ChunkedLoss.apply(*student[:3], scales, visit, torch.is_grad_enabled())


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are made in forward, while the logits are there; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor, visit: Visit, with_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(rows.device.type, enabled=False):
            sums, gradients = visit([need and with_gradient for need in ctx.needs_input_grad[:3]])
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums)
        return (sums * scales).sum(), sums

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if upstream.device.type == "cpu" and upstream.item() == 1:  # the usual case; elsewhere asking means waiting
            return *ctx.saved_tensors, None, None, None
        gradients = (None if gradient is None else gradient * upstream for gradient in ctx.saved_tensors)
        return *gradients, None, None, None


@dataclass(frozen=True)
class Plan:
    """What one visit needs besides the student.

    Attributes:
        targets: [N]; None: no row has one.
        scales: [T]; its dtype is that of the elementwise part.
        vocab: how many of the first entries of either head count.
    """

    teacher: Head | Sparse | Mixture | None
    targets: Tensor | None
    block: Block
    scales: Tensor
    vocab: int
    budget: int


def visit_chunks(student: Head, plan: Plan, wanted: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
    """Visit all chunks: sums [T], and the gradients of the scaled loss for rows, weight and bias (None: not wanted)."""
    order, num_rows, num_targets = _arrange(student.rows, plan)
    chunk, piece = _chunk_rows(num_rows, student, plan), rows_at_once(plan.block.num_bytes, plan.vocab, plan.scales)
    student_logits = _Logits(student, order, plan, chunk)
    members = plan.teacher.members if isinstance(plan.teacher, Mixture) else (plan.teacher,)
    teachers = [_TeacherChunks(member, order, plan, chunk) for member in members]
    targets = _pick(plan.targets, order)
    gradients = _Gradients(student, student_logits, plan.scales.dtype, wanted)
    sums = plan.scales.new_zeros(len(plan.scales))
    for start, stop in pieces(0, num_rows, chunk):
        logits, known = student_logits(start, stop), _together([teacher(start, stop) for teacher in teachers])
        for low, high in pieces(start, stop, piece):
            here = slice(low - start, high - start)
            has_targets = targets is not None and low < num_targets
            capped = None if student.softcap is None else logits[here].clone()
            losses = plan.block(
                logits[here],
                student_logits.bias,
                None if known is None else known.rows(here),
                targets[low:high] if targets is not None and has_targets else None,
                plan.scales,
            )
            sums += losses.sum(1)
            if capped is not None and student.softcap is not None:  # the gradient goes on through the cap
                logits[here].mul_(1 - (capped / student.softcap).square())
        gradients.add(start, stop, logits)
    return sums, gradients.result(order)


def _arrange(rows: Tensor, plan: Plan) -> tuple[Tensor | None, int, int]:
    """An order of the rows, those with a target first, how many there are, and how many of them have a target.

    Rows without a target are left out where no term acts on them. On a GPU the sizes would have to be waited for: all
    rows come there, in their own order.
    """
    num_rows = len(rows)
    if rows.device.type != "cpu":
        return None, num_rows, 0 if plan.targets is None else num_rows
    on = torch.zeros(num_rows, dtype=torch.bool) if plan.targets is None else plan.targets != NO_TARGET
    with_target, without = on.nonzero()[:, 0], (~on).nonzero()[:, 0]
    if plan.teacher is None and not plan.block.every_row:
        without = without[:0]
    return torch.cat([with_target, without]), len(with_target) + len(without), len(with_target)


def _chunk_rows(num_rows: int, student: Head, plan: Plan) -> int:
    """Rows per chunk: as many as the budget allows, but the chunks all alike."""
    mixed = isinstance(plan.teacher, Mixture)
    members = plan.teacher.members if isinstance(plan.teacher, Mixture) else (plan.teacher,)
    heads = [matrix_dtype(head) for head in (student, *members) if isinstance(head, Head)]
    row_bytes = plan.vocab * sum(dtype.itemsize for dtype in [*heads, *([plan.scales.dtype] if mixed else [])])
    num_chunks = min(num_rows, math.ceil(num_rows * row_bytes / plan.budget))
    return math.ceil(num_rows / max(1, num_chunks)) or 1


class _Logits:
    """Applies a head's weight to chunks of its rows, into one buffer that every chunk uses again."""

    def __init__(self, head: Head, order: Tensor | None, plan: Plan, chunk: int) -> None:
        dtype = matrix_dtype(head)
        self.rows = (head.rows if order is None else head.rows[order]).to(dtype)
        self.weight = (head.weight if head.rounded is None else head.rounded)[: plan.vocab].to(dtype)
        self.bias = None if head.bias is None else head.bias[: plan.vocab].detach().to(plan.scales.dtype)
        self.cap = head.cap
        vocab = len(self.weight)
        splits = dtype == torch.float32 and self.rows.device.type == "cpu"
        self.columns = list(pieces(0, vocab, COLUMNS if splits else vocab))
        self.buffer = torch.empty(chunk, vocab, dtype=dtype, device=self.rows.device)

    def __call__(self, start: int, stop: int) -> Tensor:
        """[stop - start, vocab], without the bias."""
        out = self.buffer[: stop - start]
        for low, high in self.columns:
            torch.mm(self.rows[start:stop], self.weight[low:high].t(), out=out[:, low:high])
        return self.cap(out)


class _TeacherChunks:
    """What a block wants to know of the teacher for a chunk of rows: logits, or some entries and their ids."""

    def __init__(self, teacher: Head | Sparse | None, order: Tensor | None, plan: Plan, chunk: int) -> None:
        self.logits = _Logits(teacher, order, plan, chunk) if isinstance(teacher, Head) else None
        self.sparse = None if teacher is None or isinstance(teacher, Head) else teacher
        if self.sparse is not None and order is not None:
            self.sparse = rows_of(self.sparse, order)

    def __call__(self, start: int, stop: int) -> TeacherBlock | None:
        if self.logits is not None:
            return TeacherBlock(self.logits(start, stop), self.logits.bias, None)
        if self.sparse is None:
            return None
        here = rows_of(self.sparse, slice(start, stop))
        if isinstance(here, TopK):
            return TeacherBlock(here.log_probs, None, here.ids)
        return TeacherBlock(here.weights, None, here.ids, here.neg_entropy)


def _together(teachers: list[TeacherBlock | None]) -> TeacherBlock | None:
    """What is known of one teacher or of several, the first with the others behind it."""
    first, *others = teachers
    return first and first._replace(others=tuple(other for other in others if other is not None))


class _Gradients:
    """Sums over the chunks, for rows, weight and bias; weight and bias in fp32 or better where chunks are added up."""

    def __init__(self, student: Head, logits: _Logits, accurate: torch.dtype, wanted: list[bool]) -> None:
        self.student, self.logits, self.accurate, self.wanted = student, logits, accurate, wanted
        self.rows = torch.empty_like(logits.rows)
        self.weight = self.bias = self.product = torch.empty(0)
        num_columns, width = logits.weight.shape
        on_cpu = logits.rows.device.type == "cpu"
        piece = min(GRADIENT_ROWS, num_columns) if on_cpu else num_columns
        self.pieces = list(pieces(0, num_columns, piece))
        if wanted[1]:
            make = torch.empty if len(logits.rows) else torch.zeros  # the first chunk writes all of it
            self.weight = make(num_columns, width, dtype=accurate, device=logits.rows.device)
            self.product = logits.rows.new_empty(piece, width)

    def add(self, start: int, stop: int, gradient: Tensor) -> None:
        """Take in the gradient [n, V] with respect to the logits of rows [start, stop); chunks come in order."""
        if self.wanted[0]:
            torch.mm(gradient, self.logits.weight, out=self.rows[start:stop])
        if self.wanted[1]:
            self._add_weight(gradient, self.logits.rows[start:stop], first=start == 0)
        if self.wanted[2]:
            bias = gradient.sum(0).to(self.accurate)  # in the format of the gradient: ten times as fast on the CPU
            self.bias = bias if start == 0 else self.bias.add_(bias)

    def _add_weight(self, gradient: Tensor, rows: Tensor, first: bool) -> None:
        """In pieces of the vocabulary: products in bf16 are widened while the processor's cache still holds them."""
        for low, high in self.pieces:
            part, columns = self.weight[low:high], gradient[:, low:high].t()
            if self.product.dtype == self.accurate:
                torch.mm(columns, rows, out=part) if first else part.addmm_(columns, rows)
            else:
                product = torch.mm(columns, rows, out=self.product[: high - low])
                part.copy_(product) if first else part.add_(product)

    def result(self, order: Tensor | None) -> list[Tensor | None]:
        """All three in the format, size and order of the tensors they belong to; None: not wanted."""
        rows = self.rows
        if order is not None:
            rows = rows.new_zeros(self.student.rows.shape).index_copy_(0, order, rows)
        found = zip((rows, self.weight, self.bias), self.student[:3], self.wanted, strict=True)
        return [fit(value, tensor) if tensor is not None and wanted else None for value, tensor, wanted in found]


def fit(value: Tensor, like: Tensor) -> Tensor:
    """`value` in the format of `like`, with zeros for the entries of a padded vocabulary."""
    if value.shape == like.shape:
        return value.to(like.dtype)
    fitted = torch.zeros_like(like)
    fitted[: len(value)] = value.view(-1, *like.shape[1:])
    return fitted


def _pick(values: Tensor | None, order: Tensor | None) -> Tensor | None:
    return values if values is None or order is None else values[order]


def with_dtype(teacher: Head | Sparse | Mixture | None) -> Any:
    """The same with the format of each matrix product in its head, as autocast is off while chunks are visited."""
    if isinstance(teacher, Mixture):
        return teacher._replace(members=tuple(map(with_dtype, teacher.members)))
    return teacher._replace(dtype=matrix_dtype(teacher)) if isinstance(teacher, Head) else teacher


def matrix_dtype(head: Head) -> torch.dtype:
    device = head.rows.device.type
    if head.dtype is not None:
        return head.dtype
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(head.rows.dtype, head.weight.dtype)
