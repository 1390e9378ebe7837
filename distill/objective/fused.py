"""Losses over the vocabulary chunk by chunk: loss and gradients together, no [N, V] tensor kept.

Shapes: N rows, n rows of one chunk or block, E width of a head's input, V vocabulary, M terms. The plain path that this
agrees with, in value and gradient, is `losses` on full logits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.models.language_model import Head
from distill.objective.blocks import Block, averaged, pieces, rows_at_once
from distill.objective.kernel import NO_TARGET
from distill.teacher.distributions import Distribution, Logits, Mixture, Single

BUDGET = 64 << 20  # bytes of logits that exist at once
# On the CPU products with the vocabulary are made in pieces of it.
COLUMNS = 512  # of fp32 logits: wider pieces were up to a third slower (MKL)
GRADIENT_ROWS = 1024  # of the weight's gradient: a piece in bf16 is widened while it is in the cache


@dataclass(frozen=True)
class Plan:
    """What one visit needs besides the student.

    Attributes:
        teacher: without members where no term reads one.
        targets: [N]; None: no row has one.
        scales: [M]; its dtype is that of the elementwise part.
        vocab: how many of the first entries of either head count.
        budget: bounds, in bytes, the logits that exist at once.
        with_gradient: whether there will be a backward pass.
    """

    teacher: Mixture
    targets: Tensor | None
    block: Block
    scales: Tensor
    vocab: int
    budget: int
    with_gradient: bool


def chunked_loss(
    student: Head,
    teacher: Distribution | None,
    targets: Tensor | None,
    block: Block,
    scales: Tensor,
    *,
    vocab: int | None = None,
    budget: int = BUDGET,
) -> tuple[Tensor, Tensor]:
    """Sum over the terms of scale * sum over the rows, and the unscaled sums [M], for the terms that `block` computes.

    Only the first `vocab` entries of either head count. Elementwise work is done in the format of `scales` [M], fp32 or
    float64, whatever the format of the matrix operations. Rows without a target are visited where there is a teacher
    or a term that acts on every row, and else left out.

    Returns:
        The loss (scalar, differentiable in the student's rows, weight and bias and in the parameters of the terms'
        modules), and the sums, detached.
    """
    mixture = Mixture.of(teacher)
    # Autocast is off while chunks are visited: the formats that it would choose are taken down here.
    mixture = mixture._replace(members=tuple(_with_dtype(member) for member in mixture.members))
    plan = Plan(mixture, targets, block, scales, vocab or len(student.weight), budget, torch.is_grad_enabled())
    return _ChunkedLoss.apply(*student[:3], _with_dtype(student), plan, *block.parameters)


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are made in forward, while the logits are there; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, student: Head, plan: Plan, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        plan.block.begin()
        with torch.autocast(rows.device.type, enabled=False):
            sums, gradients = _visit(student, plan, [need and plan.with_gradient for need in ctx.needs_input_grad[:3]])
        ctx.save_for_backward(*gradients, *plan.block.gradients)
        ctx.mark_non_differentiable(sums)
        return (sums * plan.scales).sum(), sums

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients: Sequence[Tensor | None] = ctx.saved_tensors
        # 1 is the usual case; elsewhere asking means waiting.
        if upstream.device.type != "cpu" or upstream.item() != 1:
            gradients = [None if gradient is None else gradient * upstream for gradient in gradients]
        return *gradients[:3], None, None, *gradients[3:]


def _visit(student: Head, plan: Plan, needs_gradient: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
    """Visit all chunks: sums [M], and the gradients of the scaled loss for rows, weight and bias (None: not wanted)."""
    order, num_rows, num_targets = _arrange(student.rows, plan)
    chunk, piece = _chunk_rows(num_rows, student, plan), rows_at_once(plan.block.num_bytes, plan.vocab, plan.scales)
    products = _Products(student, order, plan, chunk)
    teachers = [_chunks_of(member, order, plan, chunk) for member in plan.teacher.members]
    targets = plan.targets if plan.targets is None or order is None else plan.targets[order]
    gradients = _Gradients(student, products, plan.scales.dtype, needs_gradient)
    sums = plan.scales.new_zeros(len(plan.scales))
    for start, stop in pieces(0, num_rows, chunk):
        logits, members = products(start, stop), [chunk_of(start, stop) for chunk_of in teachers]
        for low, high in pieces(start, stop, piece):
            here = slice(low - start, high - start)
            capped = None if student.softcap is None else logits[here].clone()
            parts = plan.teacher.combined([member.rows(here) for member in members], plan.scales.dtype)
            on = targets[low:high] if targets is not None and low < num_targets else None
            sums += averaged(plan.block, logits[here], products.bias, parts, on, plan.scales).sum(1)
            if capped is not None and student.softcap is not None:  # the gradient passes through the cap
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
    has_target = torch.zeros(num_rows, dtype=torch.bool) if plan.targets is None else plan.targets != NO_TARGET
    with_target, without = has_target.nonzero()[:, 0], (~has_target).nonzero()[:, 0]
    if not plan.teacher.members and not plan.block.every_row:
        without = without[:0]
    return torch.cat([with_target, without]), len(with_target) + len(without), len(with_target)


def _chunk_rows(num_rows: int, student: Head, plan: Plan) -> int:
    """Rows per chunk: as many as the budget allows, but the chunks all alike."""
    members = plan.teacher.members
    formats = [_matrix_dtype(head) for head in (student, *members) if isinstance(head, Head)]
    formats += [plan.scales.dtype] * (len(members) > 1)  # of the mean of several
    row_bytes = plan.vocab * sum(dtype.itemsize for dtype in formats)
    num_chunks = min(num_rows, math.ceil(num_rows * row_bytes / plan.budget))
    return math.ceil(num_rows / max(1, num_chunks)) or 1


def _chunks_of(teacher: Head | Single, order: Tensor | None, plan: Plan, chunk: int) -> Callable[[int, int], Single]:
    """What gives the distribution of a teacher for the rows [start, stop) of the order."""
    if isinstance(teacher, Head):
        products = _Products(teacher, order, plan, chunk)
        return lambda start, stop: Logits(products(start, stop), products.bias)
    ordered = teacher if order is None else teacher.rows(order)
    return lambda start, stop: ordered.rows(slice(start, stop))


class _Products:
    """Applies a head's weight to chunks of its rows, into one buffer that every chunk uses again."""

    def __init__(self, head: Head, order: Tensor | None, plan: Plan, chunk: int) -> None:
        dtype = _matrix_dtype(head)
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


class _Gradients:
    """Sums over the chunks, for rows, weight and bias; weight and bias in fp32 or better where chunks are added up."""

    def __init__(self, student: Head, products: _Products, accurate: torch.dtype, wanted: list[bool]) -> None:
        self.student, self.products, self.accurate, self.wanted = student, products, accurate, wanted
        self.rows = torch.empty_like(products.rows)
        self.weight = self.bias = self.product = torch.empty(0)
        num_columns, width = products.weight.shape
        on_cpu = products.rows.device.type == "cpu"
        piece = min(GRADIENT_ROWS, num_columns) if on_cpu else num_columns
        self.pieces = list(pieces(0, num_columns, piece))
        if wanted[1]:
            make = torch.empty if len(products.rows) else torch.zeros  # the first chunk writes all of it
            self.weight = make(num_columns, width, dtype=accurate, device=products.rows.device)
            self.product = products.rows.new_empty(piece, width)

    def add(self, start: int, stop: int, gradient: Tensor) -> None:
        """Take in the gradient [n, V] with respect to the logits of rows [start, stop); chunks come in order."""
        if self.wanted[0]:
            torch.mm(gradient, self.products.weight, out=self.rows[start:stop])
        if self.wanted[1]:
            self._add_weight(gradient, self.products.rows[start:stop], first=start == 0)
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
        gradients = zip((rows, self.weight, self.bias), self.student[:3], self.wanted, strict=True)
        return [_fit(value, like) if like is not None and is_needed else None for value, like, is_needed in gradients]


def _fit(value: Tensor, like: Tensor) -> Tensor:
    """`value` in the format of `like`, with zeros for the entries of a padded vocabulary."""
    if value.shape == like.shape:
        return value.to(like.dtype)
    padded = torch.zeros_like(like)
    padded[: len(value)] = value.view(-1, *like.shape[1:])
    return padded


def _with_dtype(teacher: Any) -> Any:
    """A head in the number format of the matrix product; anything else as it is."""
    return teacher._replace(dtype=_matrix_dtype(teacher)) if isinstance(teacher, Head) else teacher


def _matrix_dtype(head: Head) -> torch.dtype:
    device = head.rows.device.type
    if head.dtype is not None:
        return head.dtype
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(head.rows.dtype, head.weight.dtype)
