"""Losses over a vocabulary whose output embedding lies in slices on the ranks of a group, chunk by chunk.

Shapes: T ranks in the group, N_r rows of rank r, E width of a head's input, V vocabulary, V_t entries of one rank's
slice, M terms. What each rank gets is what `fused.chunked_loss` would give for its rows with the whole embedding.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from distill.distributed.row_exchange import RowExchange
from distill.models.language_model import Head
from distill.objective.blocks import Block, SoftMlmBlock, of_several
from distill.objective.fused import BUDGET, Plan, differentiable, fit, visit_chunks, with_dtype
from distill.objective.sliced_blocks import SlicedPair, Slices, WholeRows
from distill.teacher.signal import Mixture, Samples, Sparse, TopK


def sliced_loss(
    student: Head,
    teacher: Head | Sparse | Mixture | None,
    targets: Tensor | None,
    block: Block,
    scales: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab: int,
    budget: int = BUDGET,
) -> tuple[Tensor, Tensor]:
    """`fused.chunked_loss` of this rank's rows, where the weight and bias of either head are this rank's slices.

    All ranks of the group call it together, each with its own rows; `scales`, `block`, `vocab` and `budget` are the
    same on all of them. So a rank whose batch does not count gives no rows, not scales of 0. The heads' inputs, targets
    and kept entries of all are gathered, each rank visits all these rows with its slice, and the gradient of the rows
    goes back to their owners. The slices are consecutive in the order of the ranks and of any length, also 0, as
    torch's `Shard(0)` cuts; entries beyond `vocab` do not count.

    Soft targets without a cut-off and masked or next words need one small all-gather for each chunk (`SlicedPair`).
    Everything else, several teachers, and a teacher whose vocabulary is cut at other places than the student's, as it
    is padded to another size, go by whole rows (`WholeRows`), at the cost of sending all logits once and their
    gradients once.

    Returns:
        The loss of this rank's rows, and their unscaled sums [M], detached. Its gradient for the weight and bias slices
        is that of the loss of all ranks, so every rank has to go backward from the same upstream gradient; that for
        the rows is of this rank's loss. All exchanges are done when this returns: backward has none.

    Raises:
        ValueError: the slices of a head hold less than `vocab` entries; or scales differ, which is noticed on the CPU,
            where looking at them costs nothing.
    """
    student = with_dtype(student)
    own = Plan(with_dtype(teacher), targets, block, scales, vocab, budget)
    return differentiable(student, scales, lambda wanted: _visit(student, own, group, wanted))


def _visit(
    student: Head, own: Plan, group: dist.ProcessGroup, wanted: list[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """`fused.Visit` of the rows of all ranks, and of what it gives that which belongs to this rank."""
    heads = [student, *(member for member in _members(own.teacher) if isinstance(member, Head))]
    exchange = RowExchange(
        len(student.rows), [wanted[0], *(len(head.weight) for head in heads), *_bits(own.scales)], group
    )
    wants_rows, *others = zip(*exchange.numbers, strict=True)
    lengths, bits = others[: len(heads)], others[len(heads) :]
    if any(len(set(each)) > 1 for each in bits):
        raise ValueError("ranks scale their losses differently: one whose batch does not count has to give no rows")
    slices = [Slices(exchange, each, own.vocab) for each in lengths]
    everyones = [_gathered_head(head, cut.width, exchange) for head, cut in zip(heads, slices, strict=True)]
    plan = replace(
        _sliced(own, heads, slices),
        teacher=_gathered(own.teacher, everyones[1:], exchange),
        targets=None if own.targets is None else exchange.gathered(own.targets),
        vocab=max(width for cut in slices for width in cut.widths),
        foreign=_foreign(exchange, student.rows.device),
    )
    # A rank without rows may want no gradient for them; it takes part for the sake of the others.
    sums, (rows, *rest) = visit_chunks(everyones[0], plan, [any(wants_rows), *wanted[1:]])
    gradients = (None if rows is None else exchange.given_back(rows), *rest)
    return sums, [
        fit(gradient, tensor) if gradient is not None and tensor is not None and need else None
        for gradient, tensor, need in zip(gradients, student[:3], wanted, strict=True)
    ]


def _bits(scales: Tensor) -> list[int]:
    """Numbers to be compared; none on a GPU, which would have to be waited for."""
    return scales.double().view(torch.int64).tolist() if scales.device.type == "cpu" else []


def _members(teacher: Head | Sparse | Mixture | None) -> tuple[Head | Sparse | None, ...]:
    return teacher.members if isinstance(teacher, Mixture) else (teacher,)


def _sliced(own: Plan, heads: Sequence[Head], slices: Sequence[Slices]) -> Plan:
    """The plan with a block that works on slices."""
    several, alike = isinstance(own.teacher, Mixture), all(cut.widths == slices[0].widths for cut in slices)
    if isinstance(own.block, SoftMlmBlock) and own.block.cutoff <= 0 and alike and not several:
        return replace(own, block=SlicedPair(own.block.temperature, slices[0], own.block.compiled))
    block = of_several(own.block, own.teacher) if isinstance(own.teacher, Mixture) else own.block
    biases = [
        None if head.bias is None else cut.joined(head.bias.to(own.scales.dtype))
        for head, cut in zip(heads, slices, strict=True)
    ]
    # Slices of all rows and whole rows of a share of them exist at once.
    return replace(own, block=WholeRows(block, slices, biases), budget=own.budget // 2)


def _gathered_head(head: Head, width: int, exchange: RowExchange) -> Head:
    """The head with the rows of all ranks, in the format of its products, and the entries that count alone."""
    weight, bias, rounded = (None if each is None else each[:width] for each in (head.weight, head.bias, head.rounded))
    assert weight is not None
    rows = exchange.gathered(head.rows.to(head.dtype))
    return head._replace(rows=rows, weight=weight, bias=bias, rounded=rounded)


def _gathered(
    teacher: Head | Sparse | Mixture | None, heads: Sequence[Head], exchange: RowExchange
) -> Head | Sparse | Mixture | None:
    """What the teachers say of the rows of all ranks; `heads`: of the live ones, with these rows."""
    live = iter(heads)

    def one(each: Head | Sparse) -> Head | Sparse:
        if isinstance(each, Head):
            return next(live)
        ids, *numbers = exchange.gathered(each.ids.int()), *map(exchange.gathered, each[1:])  # NCCL: no 16-bit integers
        return TopK(ids, *numbers) if isinstance(each, TopK) else Samples(ids, *numbers)

    if isinstance(teacher, Mixture):
        return teacher._replace(members=tuple(one(each) for each in teacher.members))
    return None if teacher is None else one(teacher)


def _foreign(exchange: RowExchange, device: torch.device) -> Tensor:
    """bool [N], the rows of other ranks."""
    foreign = torch.ones(sum(exchange.counts), dtype=torch.bool, device=device)
    foreign[exchange.own] = False
    return foreign
