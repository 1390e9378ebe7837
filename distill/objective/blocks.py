"""The elementwise part of the loss on a block of logits: losses, and the gradient written over the logits.

Shapes: n rows of a block, V vocabulary, K kept entries, M terms. With T the temperature, z = student logits / T, q =
softmax(z), p = softmax(teacher logits / T), the soft term T^2 * KL(p || q) has the gradient T * (q - p) with respect to
the student's logits; entries in the tail bucket, of joint masses P and Q, have T * (q - P * q / Q) instead, whether the
bucket is what a cut-off leaves or what a teacher's K largest entries leave. A teacher known by weights w of some
entries, of sum W, has T * (W q - w). Masked words have softmax(logits) - one_hot(target).
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from distill.objective.terms import ALL, VocabularyTerm
from distill.teacher.signal import Mixture, Samples, Sparse, TopK, mixed_logits

NO_TARGET = -100


class TeacherBlock(NamedTuple):
    """What a block of rows knows of the teacher: logits [n, V], or numbers of some of its entries.

    Those are log-probabilities [n, K + 1] of its K largest, or weights [n, J] as in `Samples`. Of several teachers it
    is the first, and `others` are the rest.
    """

    values: Tensor
    bias: Tensor | None  # [V], still to be added to the logits: the product is spared a pass over memory
    kept: Tensor | None  # [n, K] or [n, J]; None: all of them
    neg_entropy: Tensor | None = None  # [n, 1]; only where `values` are the weights of samples
    others: tuple["TeacherBlock", ...] = ()

    def rows(self, here: slice) -> "TeacherBlock":
        """Some of the rows."""
        kept, neg_entropy = (None if each is None else each[here] for each in (self.kept, self.neg_entropy))
        others = tuple(other.rows(here) for other in self.others)
        return TeacherBlock(self.values[here], self.bias, kept, neg_entropy, others)

    @property
    def sparse(self) -> Sparse | None:
        """The entries that are known; None where all logits are."""
        if self.kept is None:
            return None
        if self.neg_entropy is None:
            return TopK(self.kept, self.values)
        return Samples(self.kept, self.values, self.neg_entropy)


class Block(Protocol):
    """Losses and gradient of a block of rows.

    `num_bytes` is how many of its logits are visited at once on a CPU: small enough to stay in the processor's cache.
    `every_row` is whether rows without a target carry a term even where there is no teacher.
    """

    num_bytes: int
    every_row: bool

    def __call__(
        self, logits: Tensor, bias: Tensor | None, teacher: TeacherBlock | None, targets: Tensor | None, scales: Tensor
    ) -> Tensor:
        """Losses [M, n]; `logits` [n, V], before the bias, is overwritten with the gradient of the scaled losses.

        targets [n] int64, NO_TARGET in a row without one; None where no row of the block has one. scales [M].
        """
        ...


def pieces(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut into pieces of at most `size`, at least 1."""
    return ((low, min(low + size, stop)) for low in range(start, stop, max(size, 1)))


def rows_at_once(num_bytes: int, vocab: int, like: Tensor) -> int:
    """How many rows of logits, in the format of `like`, go through a block at once; a GPU has no use for blocks."""
    return max(1, num_bytes // (max(vocab, 1) * like.dtype.itemsize)) if like.device.type == "cpu" else 1 << 30


class AutogradBlock:
    """Any terms over the vocabulary, each by its own formula; the gradient is autograd's, inside the block."""

    num_bytes = 1 << 20

    def __init__(self, terms: Sequence[VocabularyTerm]) -> None:
        self.terms = terms
        self.every_row = any(term.rows == ALL for term in terms)

    def __call__(
        self, logits: Tensor, bias: Tensor | None, teacher: TeacherBlock | None, targets: Tensor | None, scales: Tensor
    ) -> Tensor:
        z = biased(logits, bias, scales.dtype).detach().requires_grad_()
        y: Tensor | Sparse | None = None
        if teacher is not None:
            y = teacher.sparse or biased(teacher.values, teacher.bias, scales.dtype)
        if targets is None:
            targets = torch.full((len(z),), NO_TARGET, device=z.device)
        with torch.enable_grad():
            losses = torch.stack([on_its_rows(term, term.losses(z, y, targets), targets) for term in self.terms])
            (gradient,) = torch.autograd.grad((scales[:, None] * losses).sum(), z)
        logits.copy_(gradient)
        return losses.detach()


class JoinedBlock:
    """The hand-written pair and further terms over the same rows: losses one below the other, gradients added up."""

    num_bytes = AutogradBlock.num_bytes

    def __init__(self, pair: "SoftMlmBlock", has_soft: bool, has_mlm: bool, others: AutogradBlock) -> None:
        self.pair, self.has_soft, self.has_mlm, self.others = pair, has_soft, has_mlm, others
        self.every_row = others.every_row

    def __call__(
        self, logits: Tensor, bias: Tensor | None, teacher: TeacherBlock | None, targets: Tensor | None, scales: Tensor
    ) -> Tensor:
        gradient = logits.clone()
        others = self.others(gradient, bias, teacher, targets, scales[2:])
        known, wanted = teacher if self.has_soft else None, targets if self.has_mlm else None
        losses = torch.cat([self.pair(logits, bias, known, wanted, scales[:2]), others])
        logits.add_(gradient)
        return losses


class MembersBlock:
    """Another block, for each of several teachers: every loss is the mean over them, by their weights.

    Losses that need no teacher come out as they are, as the weights add up to 1.
    """

    def __init__(self, block: Block, weights: Sequence[float]) -> None:
        self.block, self.weights = block, weights
        self.num_bytes, self.every_row = block.num_bytes, block.every_row

    def __call__(
        self, logits: Tensor, bias: Tensor | None, teacher: TeacherBlock | None, targets: Tensor | None, scales: Tensor
    ) -> Tensor:
        assert teacher is not None
        gradient, losses = torch.zeros_like(logits, dtype=scales.dtype), []
        for weight, member in zip(self.weights, (teacher._replace(others=()), *teacher.others), strict=True):
            own = logits.clone()
            losses.append(weight * self.block(own, bias, member, targets, weight * scales))
            gradient += own
        logits.copy_(gradient)
        return torch.stack(losses).sum(0)


class MixedBlock:
    """Another block, for several teachers that all run live: it sees the logits of their mean distribution."""

    def __init__(self, block: Block, mixture: Mixture) -> None:
        self.block, self.mixture = block, mixture
        self.num_bytes, self.every_row = block.num_bytes, block.every_row

    def __call__(
        self, logits: Tensor, bias: Tensor | None, teacher: TeacherBlock | None, targets: Tensor | None, scales: Tensor
    ) -> Tensor:
        assert teacher is not None
        members = (biased(each.values, each.bias, scales.dtype) for each in (teacher, *teacher.others))
        mixed = mixed_logits(members, self.mixture.weights, self.mixture.temperature)
        return self.block(logits, bias, TeacherBlock(mixed, None, None), targets, scales)


def of_several(block: Block, teachers: Mixture) -> Block:
    """A block for what several teachers say: of their mean distribution where all are live, else of each one."""
    return MixedBlock(block, teachers) if teachers.live else MembersBlock(block, teachers.weights)


def on_its_rows(term: VocabularyTerm, losses: Tensor, targets: Tensor) -> Tensor:
    """[n] -> [n], 0 in the rows that do not carry the term."""
    return losses if term.rows == ALL else torch.where(targets == NO_TARGET, torch.zeros_like(losses), losses)


class SoftMlmBlock:
    """Soft targets and masked words, in this order, with a gradient written by hand; both share their exponentials."""

    every_row = False

    def __init__(self, temperature: float, cutoff: float, compiled: bool) -> None:
        """`compiled`: through torch.compile, where there is a compiler."""
        self.temperature, self.cutoff, self.compiled = temperature, cutoff, compiled
        self.function = compiled_pair if compiled else loss_and_grad_block
        self.num_bytes = 1 << 22 if compiled else 1 << 20  # compiled, it visits each row on its own: fewer calls

    def __call__(
        self, logits: Tensor, bias: Tensor | None, teacher: TeacherBlock | None, targets: Tensor | None, scales: Tensor
    ) -> Tensor:
        values, teacher_bias, kept, neg_entropy = (None,) * 4 if teacher is None else teacher[:4]
        column = None if targets is None else targets[:, None]
        known = (values, teacher_bias, kept)
        return self.function(logits, bias, *known, column, scales, self.temperature, self.cutoff, neg_entropy)


def loss_and_grad_block(
    logits: Tensor,
    bias: Tensor | None,
    teacher: Tensor | None,
    teacher_bias: Tensor | None,
    kept: Tensor | None,
    targets: Tensor | None,
    scale: Tensor,
    temperature: float,
    cutoff: float,
    neg_entropy: Tensor | None = None,
) -> Tensor:
    """Both losses [2, n] of a block's rows; `logits` [n, V] is overwritten with the gradient of the scaled loss.

    bias, teacher_bias [V]: of either head, still to be added to its logits.
    teacher: its logits [n, V], or log-probabilities [n, K + 1] of the entries `kept` [n, K], or, with `neg_entropy`
    [n, 1], the weights [n, J] of the entries `kept` [n, J]; targets [n, 1]. Each is None where the block has no such
    term. The sums over the rows are left to the caller: with them inside, inductor's
    CPU code generation fails (torch 2.13).
    """
    z = biased(logits, bias, scale.dtype) / temperature
    top = z.amax(-1, keepdim=True)
    # Exponentials are the cost: both terms share these. The largest entries need their own; then soft rows alone want
    # no more.
    v = z if kept is not None and neg_entropy is None and targets is None else (z - top).exp()
    soft = mlm = torch.zeros_like(top)
    gradient = torch.zeros_like(top)
    if teacher is not None:
        y = biased(teacher, teacher_bias, scale.dtype)
        weight = scale[0] * temperature
        if kept is None:
            loss, gradient = _soft(z, top, v, y / temperature, weight, cutoff)
        elif neg_entropy is not None:
            loss, gradient = _soft_sampled(z, top, v, y, kept.long(), neg_entropy.to(scale.dtype), weight)
        else:
            loss, gradient = _soft_topk(z, y.log_softmax(-1), kept.long(), weight)
        soft = temperature**2 * loss
    if targets is not None:
        w = at_temperature_one(v, z, top, temperature)
        on = (targets != NO_TARGET).to(scale.dtype)
        loss, mlm_gradient = _mlm(z * temperature, top * temperature, w, targets, scale[1] * on)
        mlm = loss * on
        gradient = gradient + mlm_gradient
    logits.copy_(gradient)
    return torch.stack([soft[:, 0], mlm[:, 0]])


def biased(logits: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Logits with their bias, in the format of elementwise work."""
    return logits.to(dtype) if bias is None else logits.to(dtype) + bias


def at_temperature_one(v: Tensor, z: Tensor, top: Tensor, temperature: float) -> Tensor:
    """v = exp(z - top) of logits over the temperature -> exp of the same logits without it."""
    if temperature == 1:
        return v
    return v.square() if temperature == 2 else ((z - top) * temperature).exp()


def _soft(z: Tensor, top: Tensor, v: Tensor, y: Tensor, weight: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
    """KL(softmax(y) || softmax(z)) [n, 1] and weight * its gradient for z; v = exp(z - top), weight a scalar."""
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


def _soft_sampled(
    z: Tensor, top: Tensor, v: Tensor, w: Tensor, ids: Tensor, neg_entropy: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for a teacher known by the weights w [n, J] of the entries ids [n, J]; ids may repeat."""
    mass = v.sum(-1, keepdim=True)
    log_q = z.gather(1, ids) - (top + mass.log())
    loss = neg_entropy - (w * log_q).sum(-1, keepdim=True)
    return loss, (v * (weight * w.sum(-1, keepdim=True) / mass)).scatter_add(1, ids, -weight * w)


def _mlm(x: Tensor, top: Tensor, w: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy [n, 1] of logits x and weight * its gradient; w = exp(x - top); no target: weight 0, any loss."""
    mass = w.sum(-1, keepdim=True)
    loss = mass.log() + (top - x.gather(1, targets.clamp(min=0)))
    gradient = w * (weight / mass)
    columns = torch.arange(x.shape[1], device=x.device)
    return loss, torch.where(columns == targets, gradient - weight, gradient)


class Compiled:
    """A function of a block's tensors through torch.compile; as it is, after one warning, where there is no compiler.

    Its tensors, which may lie in dicts, are all that may change from call to call without another compilation.
    """

    works = True  # all of them, until one fails: without a compiler every call would try for seconds

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        return torch.compile(self.plain, dynamic=True)

    def __call__(self, *arguments: Any) -> Any:
        if not Compiled.works:
            return self.plain(*arguments)
        try:
            return self.function(*map(_whole, arguments))
        except Exception as error:  # a missing compiler and inductor's faults have many faces, before the first write
            Compiled.works = False
            warnings.warn(f"the objective runs without torch.compile: {str(error).splitlines()[0]}", stacklevel=2)
            return self.plain(*arguments)


def _whole(value: Any) -> Any:
    """Slices would be compiled for every new offset; these are tensors of their own over the same memory."""
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    return from_dlpack(value) if isinstance(value, Tensor) else value


compiled_pair = Compiled(loss_and_grad_block)
