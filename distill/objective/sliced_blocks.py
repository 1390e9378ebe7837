"""Losses on slices of the vocabulary: the ranks of a group have the same rows, each with the logits of its own slice.

Both blocks here do the same in the same order on all ranks of the group. Shapes: n rows of a chunk, V vocabulary, w
columns of one rank's slice, T ranks, K or J kept entries, M terms.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distill.distributed.row_exchange import RowExchange, starts_of
from distill.objective.blocks import (
    NO_TARGET,
    Block,
    Compiled,
    TeacherBlock,
    at_temperature_one,
    biased,
    pieces,
    rows_at_once,
)

WHOLE_CHUNK = 1 << 62  # bytes: these blocks cut chunks themselves, so that there is one exchange for each
PIECE = 1 << 20  # bytes of logits that are visited at once on a CPU: they stay in the processor's cache


class Slices:
    """One head's vocabulary, cut into consecutive slices for the ranks of a group.

    Attributes:
        widths: columns by rank; start: where that of this rank begins.
    """

    def __init__(self, exchange: RowExchange, lengths: Sequence[int], vocab: int) -> None:
        """`lengths`: entries of the slices, of which the first `vocab` of all count; raises ValueError for too few."""
        if sum(lengths) < vocab:
            raise ValueError(f"slices of {list(lengths)} entries hold no vocabulary of {vocab}")
        starts = starts_of(lengths)
        self.widths = [max(0, min(length, vocab - start)) for start, length in zip(starts, lengths, strict=True)]
        self.rank, self.group = exchange.rank, exchange.group
        self.start, self.width = min(starts[self.rank], vocab), self.widths[self.rank]

    def joined(self, bias: Tensor) -> Tensor:
        """A slice [w] of each rank -> [V] at all of them."""
        own = bias[: self.width]
        whole = own.new_empty(sum(self.widths))
        copies = own.detach().repeat(len(self.widths))
        dist.all_to_all_single(whole, copies, self.widths, [self.width] * len(self.widths), group=self.group)
        return whole

    def whole_rows(self, logits: Tensor, shares: Sequence[int]) -> Tensor:
        """[n, w] on each rank -> [shares[rank], V]: the rows are dealt out in order, `shares` to each."""
        own = shares[self.rank]
        found = logits.new_empty(own * sum(self.widths))
        received, sent = [own * width for width in self.widths], [share * self.width for share in shares]
        dist.all_to_all_single(found, logits.view(-1), received, sent, group=self.group)
        return torch.cat([part.view(own, -1) for part in found.split(received)], 1) if own else found.view(0, 0)

    def cut(self, rows: Tensor, shares: Sequence[int], out: Tensor) -> None:
        """The way back, [shares[rank], V] -> `out` [n, w]."""
        own = shares[self.rank]
        parts = torch.cat([part.reshape(-1) for part in rows.split(self.widths, 1)]) if own else rows.view(-1)
        received, sent = [share * self.width for share in shares], [own * width for width in self.widths]
        dist.all_to_all_single(out.view(-1), parts, received, sent, group=self.group)


class WholeRows:
    """Another block on whole rows, of which each rank takes its share of the chunk: so any formula can be sliced.

    What is sent is all of the chunk's logits, of the student and of every live teacher, and the gradient on its way
    back: n * w * (T - 1) / T values of each by each rank, where `SlicedPair` sends a few numbers for each row.
    """

    num_bytes = WHOLE_CHUNK

    def __init__(self, block: Block, heads: Sequence[Slices], biases: Sequence[Tensor | None]) -> None:
        """`heads`: of the student, then of the live teachers; `biases`: of the same, [V]."""
        self.block, self.heads, self.biases = block, heads, biases
        self.every_row = block.every_row

    def __call__(
        self, logits: Tensor, bias: Tensor | None, teacher: TeacherBlock | None, targets: Tensor | None, scales: Tensor
    ) -> Tensor:
        student, num_ranks = self.heads[0], len(self.heads[0].widths)
        shares = [len(logits) // num_ranks + (rank < len(logits) % num_ranks) for rank in range(num_ranks)]
        begin = sum(shares[: student.rank])
        own = slice(begin, begin + shares[student.rank])
        rows = student.whole_rows(logits, shares)
        known = None if teacher is None else self._whole_teacher(teacher, own, shares)
        targets = None if targets is None else targets[own]
        losses = scales.new_zeros(len(scales), len(logits))
        for low, high in pieces(0, len(rows), rows_at_once(self.block.num_bytes, rows.shape[1], scales)):
            here = slice(low, high)
            losses[:, begin + low : begin + high] = self.block(
                rows[here],
                self.biases[0],
                None if known is None else known.rows(here),
                None if targets is None else targets[here],
                scales,
            )
        student.cut(rows, shares, logits)
        dist.all_reduce(losses, group=student.group)
        return losses

    def _whole_teacher(self, teacher: TeacherBlock, own: slice, shares: Sequence[int]) -> TeacherBlock:
        """What is known of the teachers for this rank's share of the rows."""
        heads = zip(self.heads[1:], self.biases[1:], strict=True)
        found = []
        for member in (teacher, *teacher.others):
            if member.kept is not None:
                found.append(member.rows(own)._replace(others=()))
            else:
                head, bias = next(heads)
                found.append(TeacherBlock(head.whole_rows(member.values, shares), bias, None))
        return found[0]._replace(others=tuple(found[1:]))


class SlicedPair:
    """Soft targets, without a cut-off, and masked or next words, as `SoftMlmBlock`, on a slice of the vocabulary.

    Both losses and their gradient need a few numbers of a whole row: sums of exponentials, each with the largest logit
    that they are taken from, the teacher's sum of u * (y - z), and the logits at the target and at kept entries. Every
    rank finds those of its slice; one all-gather for a chunk brings them together.
    """

    every_row = False
    num_bytes = WHOLE_CHUNK

    def __init__(self, temperature: float, slices: Slices, compiled: bool) -> None:
        """`compiled`: through torch.compile, where there is a compiler."""
        self.temperature, self.slices = temperature, slices
        compiled = compiled and slices.width > 0
        self.numbers: Callable[..., dict[str, Tensor]] = _compiled_numbers if compiled else slice_numbers
        self.write_gradient: Callable[..., None] = _compiled_gradient if compiled else write_slice_gradient

    def __call__(
        self, logits: Tensor, bias: Tensor | None, teacher: TeacherBlock | None, targets: Tensor | None, scales: Tensor
    ) -> Tensor:
        def operands(rows: slice) -> tuple[Any, ...]:
            *known, neg_entropy = (None,) * 4 if teacher is None else teacher.rows(rows)[:4]
            column, sampled = None if targets is None else targets[rows, None], neg_entropy is not None
            return logits[rows], bias, *known, column, scales, self.temperature, self.slices.start, sampled

        piece = rows_at_once(PIECE, self.slices.width, scales)
        parts = [slice(low, high) for low, high in pieces(0, len(logits), piece)]
        found = [self.numbers(*operands(rows)) for rows in parts]
        row = self._of_whole_rows({name: torch.cat([each[name] for each in found]) for name in found[0]})
        for rows in parts:
            self.write_gradient({name: values[rows] for name, values in row.items()}, *operands(rows))
        return _losses(row, teacher, targets, self.temperature)

    def _of_whole_rows(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Numbers [n, k] of each rank's slice, by name -> those of the rows, by the one exchange."""
        packed = torch.cat(list(own.values()), 1)
        found = [torch.empty_like(packed) for _ in self.slices.widths]
        dist.all_gather(found, packed, group=self.slices.group)
        sizes = [values.shape[1] for values in own.values()]
        by_rank = dict(zip(own, torch.stack(found).split(sizes, -1), strict=True))  # [T, n, k]
        numbers = {name: values.sum(0) for name, values in by_rank.items()}
        # Sums of exponentials were taken from the largest logit of a slice; they are now taken from that of the row.
        for top, sums, temperature in (
            ("top", ("mass",), 1.0),
            ("top", ("word_mass",), self.temperature),
            ("teacher_top", ("teacher_mass", "cross"), 1.0),
            ("rest_top", ("rest_mass",), 1.0),
        ):
            if top in by_rank:
                numbers[top] = by_rank[top].amax(0)
                factor = ((by_rank[top] - numbers[top]) * temperature).exp()
                numbers |= {name: (by_rank[name] * factor).sum(0) for name in sums if name in by_rank}
        return numbers


def slice_numbers(
    logits: Tensor,
    bias: Tensor | None,
    teacher: Tensor | None,
    teacher_bias: Tensor | None,
    kept: Tensor | None,
    targets: Tensor | None,
    scale: Tensor,
    temperature: float,
    start: int,
    sampled: bool = False,
) -> dict[str, Tensor]:
    """What a slice adds to the numbers of its rows, [n, k] by name; the arguments are `loss_and_grad_block`'s.

    start: the entry of the vocabulary that the slice begins with; sampled: whether `teacher` are weights of samples.
    """
    z = biased(logits, bias, scale.dtype) / temperature
    top = _largest(z)
    found = {"top": top}
    live = teacher is not None and kept is None
    v = (z - top).exp() if live or sampled or targets is not None else z
    if sampled:
        found["mass"] = v.sum(1, keepdim=True)
    if teacher is not None and kept is None:
        y = biased(teacher, teacher_bias, scale.dtype) / temperature
        teacher_top = _largest(y)
        u = (y - teacher_top).exp()
        found |= {"mass": v.sum(1, keepdim=True), "teacher_top": teacher_top, "teacher_mass": u.sum(1, keepdim=True)}
        found["cross"] = ((y - z) * u).sum(1, keepdim=True)
    if kept is not None and not sampled:
        rest = _without(z, kept.long() - start)
        rest_top = _largest(rest)
        found |= {"rest_top": rest_top, "rest_mass": (rest - rest_top).exp().sum(1, keepdim=True)}
    if kept is not None:
        found["kept"] = _at(z, kept.long() - start)
    if targets is not None:
        found["word_mass"] = at_temperature_one(v, z, top, temperature).sum(1, keepdim=True)
        found["at_target"] = _at(z, targets - start)
    return found


def write_slice_gradient(
    row: dict[str, Tensor],
    logits: Tensor,
    bias: Tensor | None,
    teacher: Tensor | None,
    teacher_bias: Tensor | None,
    kept: Tensor | None,
    targets: Tensor | None,
    scale: Tensor,
    temperature: float,
    start: int,
    sampled: bool = False,
) -> None:
    """The gradient of the scaled losses, over the logits, from the numbers of whole rows by name."""
    z, weight = biased(logits, bias, scale.dtype) / temperature, scale[0] * temperature
    gradient = torch.zeros_like(z)
    v = z if targets is None and not sampled and (teacher is None or kept is not None) else (z - row["top"]).exp()
    if teacher is not None and kept is None:
        u = (biased(teacher, teacher_bias, scale.dtype) / temperature - row["teacher_top"]).exp()
        gradient = v * (weight / row["mass"]) - u * (weight / row["teacher_mass"])
    elif teacher is not None and kept is not None and sampled:
        w = weight * teacher.to(scale.dtype)
        gradient = _add_at(v * (w.sum(1, keepdim=True) / row["mass"]), kept.long() - start, -w)
    elif teacher is not None and kept is not None:
        difference = weight * (_log_q(row).exp() - teacher.to(scale.dtype).softmax(-1))
        rest = (_without(z, kept.long() - start) - row["rest_top"]).exp()
        gradient = _add_at(rest * (difference[:, -1:] / row["rest_mass"]), kept.long() - start, difference[:, :-1])
    if targets is not None:
        weight = scale[1] * (targets != NO_TARGET)
        words = at_temperature_one(v, z, row["top"], temperature) * (weight / row["word_mass"])
        gradient = _add_at(gradient + words, targets - start, -weight)
    logits.copy_(gradient)


_compiled_numbers, _compiled_gradient = Compiled(slice_numbers), Compiled(write_slice_gradient)


def _losses(row: dict[str, Tensor], teacher: TeacherBlock | None, targets: Tensor | None, temperature: float) -> Tensor:
    """Both losses [2, n] from the numbers of whole rows."""
    soft = words = torch.zeros_like(row["top"])
    if teacher is not None and teacher.kept is None:
        shift = (row["mass"] / row["teacher_mass"]).log() + (row["top"] - row["teacher_top"])
        soft = temperature**2 * (row["cross"] / row["teacher_mass"] + shift)
    elif teacher is not None and teacher.neg_entropy is not None:
        log_q = row["kept"] - (row["top"] + row["mass"].log())
        cross = (teacher.values.to(soft.dtype) * log_q).sum(1, keepdim=True)
        soft = temperature**2 * (teacher.neg_entropy.to(soft.dtype) - cross)
    elif teacher is not None:
        log_p = teacher.values.to(soft.dtype).log_softmax(-1)
        soft = temperature**2 * (log_p.exp() * (log_p - _log_q(row))).sum(1, keepdim=True)
    if targets is not None:
        loss = row["word_mass"].log() + temperature * (row["top"] - row["at_target"])
        words = loss * (targets != NO_TARGET)[:, None]
    return torch.stack([soft[:, 0], words[:, 0]])


def _log_q(row: dict[str, Tensor]) -> Tensor:
    """The student's log-probabilities [n, K + 1] of the entries that the teacher kept, and of all others together."""
    return torch.cat([row["kept"], row["rest_top"] + row["rest_mass"].log()], 1).log_softmax(-1)


def _without(z: Tensor, kept: Tensor) -> Tensor:
    """Logits [n, w] without the entries at columns [n, K], which the teacher kept."""
    return _add_at(z.clone(), kept, torch.full_like(kept, -torch.inf, dtype=z.dtype))


def _largest(values: Tensor) -> Tensor:
    """The largest of each row, [n, 1]; the lowest number there is for a row without any."""
    lowest = torch.finfo(values.dtype).min
    if not values.shape[1]:
        return values.new_full((len(values), 1), lowest)
    return values.amax(1, keepdim=True).clamp(min=lowest)


def _at(values: Tensor, columns: Tensor) -> Tensor:
    """values [n, w] at columns [n, K], 0 at those outside of the slice."""
    if not values.shape[1]:
        return values.new_zeros(columns.shape)
    inside = (columns >= 0) & (columns < values.shape[1])
    return torch.where(inside, values.gather(1, columns.where(inside, 0)), 0)


def _add_at(values: Tensor, columns: Tensor, more: Tensor) -> Tensor:
    """`values` [n, w], to which `more` [n, K] was added at columns [n, K]; nothing at those outside of the slice."""
    if not values.shape[1]:
        return values
    inside = (columns >= 0) & (columns < values.shape[1])
    return values.scatter_add_(1, columns.where(inside, 0), torch.where(inside, more, 0))
