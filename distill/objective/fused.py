"""Soft targets and masked words in one visit to the rows: loss and gradients chunk by chunk, no [N, V] tensor kept.

Shape legend: N rows, n rows of one chunk or block, E width of a head's input, V vocabulary, K kept entries. The plain
path that this agrees with, in value and gradient, is `distill.losses` on full logits.

With z = student logits / T, q = softmax(z), p = softmax(teacher logits / T), the soft term T^2 * KL(p || q) has the
gradient T * (q - p) with respect to the student's logits; entries in the tail bucket, of joint masses P and Q, have
T * (q - P * q / Q) instead, be the bucket what a cut-off leaves or what a teacher's K largest entries leave. Masked
words have softmax(logits) - one_hot(target).
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

NO_TARGET = -100
BLOCK_BYTES = 1 << 20  # of values that the elementwise part visits at once: they stay in the processor's cache
COMPILED_BLOCK_BYTES = 1 << 22  # it visits each row on its own; this makes fewer calls
# On the CPU products with the vocabulary are made in pieces of it.
COLUMNS = 512  # of fp32 logits: wider pieces were up to a third slower (MKL)
GRADIENT_ROWS = 1024  # of the weight's gradient: a piece in bf16 is widened while it is in the cache


class Head(NamedTuple):
    """A linear output embedding and its input: rows [N, E], weight [V, E], bias [V] or None.

    `dtype` is the format of the matrix operations; None takes it from autocast where that is on, else from the tensors.
    `rounded` [V, E] is the weight in that format, where the caller has it.
    """

    rows: Tensor
    weight: Tensor
    bias: Tensor | None = None
    dtype: torch.dtype | None = None
    rounded: Tensor | None = None


class TopK(NamedTuple):
    """A teacher known by its largest entries: ids [N, K] (any integers), log_probs [N, K + 1], the last of all others.

    The log-probabilities hold at the run's temperature; they may be rounded, as they are normalised on use. K < V.
    """

    ids: Tensor
    log_probs: Tensor


def soft_and_mlm(
    student: Head,
    teacher: Head | TopK | None,
    targets: Tensor | None,
    *,
    soft_scale: float | Tensor = 1.0,
    mlm_scale: float | Tensor = 1.0,
    soft_rows: Tensor | None = None,
    temperature: float = 1.0,
    cutoff: float = 0.0,
    vocab: int | None = None,
    budget: int = 64 << 20,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """soft_scale * sum of `losses.soft` + mlm_scale * sum of `losses.mlm`, and both unscaled sums.

    With a `TopK` teacher the soft term is `losses.soft_topk`, which knows no cut-off. Without `teacher` there is no
    soft term, without `targets` (int64 [N], -100: no target) no mlm term; `soft_rows` (bool [N]) restricts the soft
    term. Only the first `vocab` entries of either head count. `budget` bounds, in bytes, the logits that exist at once.
    `compiled` runs the elementwise part through torch.compile, if a compiler is there. Elementwise work is done in fp32
    (float64 for float64 inputs) whatever the format of the matrix operations.

    Returns the loss (scalar, differentiable in the student's rows, weight and bias) and sums [2] (soft, mlm), detached.
    """
    student = student._replace(dtype=_matrix_dtype(student))
    if isinstance(teacher, Head):
        teacher = teacher._replace(dtype=_matrix_dtype(teacher))
    accurate, device = torch.promote_types(_matrix_dtype(student), torch.float32), student.rows.device
    visit = _Visit(
        teacher=teacher,
        targets=targets,
        soft_rows=soft_rows,
        scale=torch.stack([torch.as_tensor(value, dtype=accurate, device=device) for value in (soft_scale, mlm_scale)]),
        temperature=temperature,
        cutoff=cutoff,
        vocab=vocab or len(student.weight),
        budget=budget,
        dtype=_matrix_dtype(student),
        rounded=student.rounded,
        with_gradient=torch.is_grad_enabled(),
        terms=_compiled_terms if compiled else terms,
    )
    return _SoftAndMlm.apply(student.rows, student.weight, student.bias, visit)


@dataclass(frozen=True)
class _Visit:
    """What one visit needs besides the student's tensors, which autograd has to see."""

    teacher: Head | TopK | None
    targets: Tensor | None
    soft_rows: Tensor | None
    scale: Tensor  # [2]: of the summed soft term, of the summed mlm term; its dtype is that of the elementwise part
    temperature: float
    cutoff: float
    vocab: int
    budget: int
    dtype: torch.dtype  # of the student's matrix operations
    rounded: Tensor | None  # the student's weight in it
    with_gradient: bool
    terms: Callable[..., Tensor]


class _SoftAndMlm(torch.autograd.Function):
    """Gradients are made in forward, while the logits are there; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, visit: _Visit) -> tuple[Tensor, Tensor]:
        wanted = [need and visit.with_gradient for need in ctx.needs_input_grad[:3]]
        with torch.autocast(rows.device.type, enabled=False):
            sums, gradients = _walk(Head(rows, weight, bias, visit.dtype, visit.rounded), visit, wanted)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums)
        return (sums * visit.scale).sum(), sums

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if upstream.device.type == "cpu" and upstream.item() == 1:  # the usual case; elsewhere asking means waiting
            return *ctx.saved_tensors, None
        return *(None if gradient is None else gradient * upstream for gradient in ctx.saved_tensors), None


def _walk(student: Head, visit: _Visit, wanted: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
    """Visit all chunks: sums [2], and the gradients of the scaled loss for rows, weight and bias (None: not wanted)."""
    order, groups = _arrange(student.rows, visit)
    chunk, block = _chunk_rows(groups, visit), _block_rows(visit)
    ours = _Logits(student, order, visit, chunk)
    theirs = _Teacher(visit.teacher, order, visit, chunk)
    targets, soft_rows = (_pick(values, order) for values in (visit.targets, visit.soft_rows))
    gradients = _Gradients(student, ours, visit.scale.dtype, wanted)
    sums = visit.scale.new_zeros(2)
    for group in groups:
        for start, stop in _pieces(group.start, group.stop, chunk):
            logits = ours(start, stop)
            taught, kept = theirs(start, stop) if group.soft else (None, None)
            for low, high in _pieces(start, stop, block):
                here = slice(low - start, high - start)
                sums += visit.terms(
                    logits[here],
                    ours.bias,
                    taught[here] if taught is not None else None,
                    theirs.bias,
                    kept[here] if kept is not None else None,
                    targets[low:high, None] if targets is not None and low < group.mlm_stop else None,
                    soft_rows[low:high, None] if soft_rows is not None and order is None else None,
                    visit.scale,
                    visit.temperature,
                    visit.cutoff,
                ).sum(1)
            gradients.add(start, stop, logits)
    return sums, gradients.result(order)


def terms(
    logits: Tensor,
    bias: Tensor | None,
    taught: Tensor | None,
    taught_bias: Tensor | None,
    kept: Tensor | None,
    targets: Tensor | None,
    soft_rows: Tensor | None,
    scale: Tensor,
    temperature: float,
    cutoff: float,
) -> Tensor:
    """Both losses [2, n] of a block's rows; `logits` [n, V] is overwritten with the gradient of the scaled loss.

    bias, taught_bias [V]: of either head, still to be added to its logits (the product is spared a pass over memory).
    taught: the teacher's logits [n, V], or log-probabilities [n, K + 1] where `kept` [n, K] says of which entries;
    targets [n, 1], soft_rows (bool [n, 1]). Each is None where the block has no such term or limit.
    The sums over the rows are left to the caller: with them inside, inductor's CPU code generation fails (torch 2.13).
    """
    z = _biased(logits, bias, scale.dtype) / temperature
    top = z.amax(-1, keepdim=True)
    # Exponentials are the cost: both terms share these. Kept entries need their own; then soft rows alone want no more.
    v = (z - top).exp() if kept is None or targets is not None else z
    soft = mlm = torch.zeros_like(top)
    gradient = torch.zeros_like(top)
    if taught is not None:
        y = _biased(taught, taught_bias, scale.dtype)
        on = torch.ones_like(top) if soft_rows is None else soft_rows.to(scale.dtype)
        weight = scale[0] * temperature * on
        if kept is None:
            loss, gradient = _soft(z, top, v, y / temperature, weight, cutoff)
        else:
            loss, gradient = _soft_topk(z, y.log_softmax(-1), kept.long(), weight)
        soft = temperature**2 * loss * on
    if targets is not None:
        w = v if temperature == 1 else v.square() if temperature == 2 else ((z - top) * temperature).exp()
        on = (targets != NO_TARGET).to(scale.dtype)
        loss, mlm_gradient = _mlm(z * temperature, top * temperature, w, targets, scale[1] * on)
        mlm = loss * on
        gradient = gradient + mlm_gradient
    logits.copy_(gradient)
    return torch.stack([soft[:, 0], mlm[:, 0]])


def _biased(logits: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return logits.to(dtype) if bias is None else logits.to(dtype) + bias


def _soft(z: Tensor, top: Tensor, v: Tensor, y: Tensor, weight: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
    """KL(softmax(y) || softmax(z)) [n, 1] and weight * its gradient for z; v = exp(z - top), weight [n, 1]."""
    y_top = y.amax(-1, keepdim=True)
    u = (y - y_top).exp()
    mass_v, mass_u = v.sum(-1, keepdim=True), u.sum(-1, keepdim=True)
    if cutoff > 0:
        return _soft_with_tail(z, top + mass_v.log(), y, y_top + mass_u.log(), weight, cutoff)
    loss = ((y - z) * u).sum(-1, keepdim=True) / mass_u + ((mass_v / mass_u).log() + (top - y_top))
    return loss, v * (weight / mass_v) - u * (weight / mass_u)


def _soft_with_tail(
    z: Tensor, z_total: Tensor, y: Tensor, y_total: Tensor, weight: Tensor, cutoff: float
) -> tuple[Tensor, Tensor]:
    """The same with the teacher's entries below the cut-off in one bucket; z_total, y_total [n, 1]: log-sum-exps."""
    log_q, log_p = z - z_total, y - y_total
    p = log_p.exp()
    kept = p >= cutoff
    log_mass_p = y.masked_fill(kept, -torch.inf).logsumexp(-1, keepdim=True) - y_total  # -inf where nothing is cut
    log_mass_q = z.masked_fill(kept, -torch.inf).logsumexp(-1, keepdim=True) - z_total
    ratio = (log_mass_p - log_mass_q).masked_fill(log_mass_p == -torch.inf, 0)
    loss = (p * (log_p - log_q)).masked_fill(~kept, 0).sum(-1, keepdim=True) + log_mass_p.exp() * ratio
    return loss, weight * (log_q.exp() - torch.where(kept, p, (log_q + ratio).exp()))


def _soft_topk(z: Tensor, log_p: Tensor, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a teacher known by log_p [n, K + 1] of the entries ids [n, K] and, last, of all others together.

    The others' exponentials are taken from the largest of themselves, so that a tiny mass Q keeps its digits.
    """
    rest = z.scatter(1, ids, -torch.inf)
    rest_top = rest.amax(-1, keepdim=True)
    u = (rest - rest_top).exp()
    mass_u = u.sum(-1, keepdim=True)
    log_q = torch.cat([z.gather(1, ids), rest_top + mass_u.log()], 1).log_softmax(-1)
    p, difference = log_p.exp(), weight * (log_q.exp() - log_p.exp())
    loss = (p * (log_p - log_q)).sum(-1, keepdim=True)
    return loss, (u * (difference[:, -1:] / mass_u)).scatter(1, ids, difference[:, :-1])


def _mlm(x: Tensor, top: Tensor, w: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy [n, 1] of logits x and weight * its gradient; w = exp(x - top); no target: weight 0, any loss."""
    mass = w.sum(-1, keepdim=True)
    loss = mass.log() + (top - x.gather(1, targets.clamp(min=0)))
    gradient = w * (weight / mass)
    columns = torch.arange(x.shape[1], device=x.device)
    return loss, torch.where(columns == targets, gradient - weight, gradient)


class _Compiler:
    """`terms` through torch.compile, until that fails: without a compiler every call would try again, for seconds."""

    works = True

    @functools.cached_property
    def terms(self) -> Callable[..., Tensor]:
        return torch.compile(terms, dynamic=True)


_compiler = _Compiler()


def _compiled_terms(logits: Tensor, *rest: Any) -> Tensor:
    """`terms` through torch.compile; as it is, after one warning, where there is no compiler or it fails."""
    if not _compiler.works:
        return terms(logits, *rest)
    # Slices would be compiled for every new offset; these are tensors of their own over the same memory.
    arguments = [from_dlpack(value) if isinstance(value, Tensor) else value for value in (logits, *rest)]
    try:
        return _compiler.terms(*arguments)
    except Exception as error:  # a missing compiler and inductor's faults have many faces, all before the first write
        _compiler.works = False
        warnings.warn(f"the objective runs without torch.compile: {str(error).splitlines()[0]}", stacklevel=2)
        return terms(logits, *rest)


class _Group(NamedTuple):
    """Rows [start, stop), in the order of the visit: all of them with soft targets or none, the first with mlm ones."""

    start: int
    stop: int
    soft: bool
    mlm_stop: int


def _arrange(rows: Tensor, visit: _Visit) -> tuple[Tensor | None, list[_Group]]:
    """An order of the rows (both terms, soft alone, mlm alone; no term: left out) and its groups.

    Elsewhere than on the CPU the sizes would have to be waited for: there all rows are one group, in their own order.
    """
    soft, num_rows = visit.teacher is not None, len(rows)
    if rows.device.type != "cpu":
        return None, [_Group(0, num_rows, soft, 0 if visit.targets is None else num_rows)]
    on_soft = torch.full((num_rows,), soft) if visit.soft_rows is None else visit.soft_rows & soft
    on_mlm = torch.zeros(num_rows, dtype=torch.bool) if visit.targets is None else visit.targets != NO_TARGET
    picks = [mask.nonzero()[:, 0] for mask in (on_soft & on_mlm, on_soft & ~on_mlm, on_mlm & ~on_soft)]
    num_both, num_soft, num_mlm = map(len, picks)
    taught, total = num_both + num_soft, num_both + num_soft + num_mlm
    return torch.cat(picks), [_Group(0, taught, True, num_both), _Group(taught, total, False, total)]


def _pieces(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut into pieces of at most `size`."""
    return ((low, min(low + size, stop)) for low in range(start, stop, size))


def _chunk_rows(groups: list[_Group], visit: _Visit) -> int:
    """Rows per chunk: as many as the budget allows, but the chunks of the larger group all alike."""
    num_rows = max(group.stop - group.start for group in groups)
    heads = [visit.dtype, *([_matrix_dtype(visit.teacher)] if isinstance(visit.teacher, Head) else [])]
    row_bytes = visit.vocab * sum(dtype.itemsize for dtype in heads)
    num_chunks = min(num_rows, math.ceil(num_rows * row_bytes / visit.budget))
    return math.ceil(num_rows / max(1, num_chunks)) or 1


def _block_rows(visit: _Visit) -> int:
    """Rows per elementwise block; a GPU has no use for blocks."""
    if visit.scale.device.type != "cpu":
        return 1 << 30
    num_bytes = BLOCK_BYTES if visit.terms is terms else COMPILED_BLOCK_BYTES
    return max(1, num_bytes // (visit.vocab * visit.scale.dtype.itemsize))


class _Logits:
    """Applies a head's weight to chunks of its rows, into one buffer that every chunk uses again."""

    def __init__(self, head: Head, order: Tensor | None, visit: _Visit, chunk: int) -> None:
        dtype, vocab = _matrix_dtype(head), visit.vocab
        self.rows = (head.rows if order is None else head.rows[order]).to(dtype)
        self.weight = (head.weight if head.rounded is None else head.rounded)[:vocab].to(dtype)
        self.bias = None if head.bias is None else head.bias[:vocab].detach().to(visit.scale.dtype)
        splits = dtype == torch.float32 and self.rows.device.type == "cpu"
        self.columns = list(_pieces(0, vocab, COLUMNS if splits else vocab))
        self.buffer = torch.empty(chunk, vocab, dtype=dtype, device=self.rows.device)

    def __call__(self, start: int, stop: int) -> Tensor:
        """[stop - start, vocab], without the bias."""
        out = self.buffer[: stop - start]
        for low, high in self.columns:
            torch.mm(self.rows[start:stop], self.weight[low:high].t(), out=out[:, low:high])
        return out


class _Teacher:
    """What `terms` wants to know of the teacher for a chunk of rows: logits, or log-probabilities and their ids."""

    def __init__(self, teacher: Head | TopK | None, order: Tensor | None, visit: _Visit, chunk: int) -> None:
        self.logits = _Logits(teacher, order, visit, chunk) if isinstance(teacher, Head) else None
        self.bias = self.logits.bias if self.logits else None
        top = teacher if isinstance(teacher, TopK) else None
        self.ids, self.log_probs = (_pick(top.ids, order), _pick(top.log_probs, order)) if top else (None, None)

    def __call__(self, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        if self.logits is not None:
            return self.logits(start, stop), None
        if self.ids is None or self.log_probs is None:
            return None, None
        return self.log_probs[start:stop], self.ids[start:stop]


class _Gradients:
    """Sums over the chunks, for rows, weight and bias; weight and bias in fp32 or better where chunks are added up."""

    def __init__(self, student: Head, ours: _Logits, accurate: torch.dtype, wanted: list[bool]) -> None:
        self.student, self.ours, self.accurate, self.wanted = student, ours, accurate, wanted
        self.rows = torch.empty_like(ours.rows)
        self.weight = self.bias = self.product = torch.empty(0)
        num_columns, width = ours.weight.shape
        self.pieces = list(_pieces(0, num_columns, GRADIENT_ROWS if ours.rows.device.type == "cpu" else num_columns))
        if wanted[1]:
            make = torch.empty if len(ours.rows) else torch.zeros  # the first chunk writes all of it
            self.weight = make(num_columns, width, dtype=accurate, device=ours.rows.device)
            self.product = ours.rows.new_empty(self.pieces[0][1], width)

    def add(self, start: int, stop: int, gradient: Tensor) -> None:
        """Take in the gradient [n, V] with respect to the logits of rows [start, stop); chunks come in order."""
        if self.wanted[0]:
            torch.mm(gradient, self.ours.weight, out=self.rows[start:stop])
        if self.wanted[1]:
            self._add_weight(gradient, self.ours.rows[start:stop], first=start == 0)
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
        return [_fit(value, tensor) if tensor is not None and wanted else None for value, tensor, wanted in found]


def _fit(value: Tensor, like: Tensor) -> Tensor:
    """`value` in the format of `like`, with zeros for the entries of a padded vocabulary."""
    if value.shape == like.shape:
        return value.to(like.dtype)
    fitted = torch.zeros_like(like)
    fitted[: len(value)] = value.view(-1, *like.shape[1:])
    return fitted


def _pick(values: Tensor | None, order: Tensor | None) -> Tensor | None:
    return values if values is None or order is None else values[order]


def _matrix_dtype(head: Head) -> torch.dtype:
    device = head.rows.device.type
    if head.dtype is not None:
        return head.dtype
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(head.rows.dtype, head.weight.dtype)
