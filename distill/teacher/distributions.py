"""A teacher's distribution over the vocabulary: all logits, the largest entries and the rest, samples, or a mixture.

Shapes: N positions or n of them, V vocabulary, K or J kept entries. With T the temperature, z = student logits / T, q =
softmax(z) and p the teacher's probabilities at T, the soft term T^2 * KL(p || q) has the gradient T * (q - p) with
respect to the student's logits. Entries in a tail bucket, of joint masses P and Q, have T * (q - P * q / Q) instead,
whether the bucket is what a cut-off leaves or what a teacher's K largest entries leave. A teacher known by weights w of
some entries, of sum W, has T * (W q - w). `objective.losses` has the same values as formulas.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from distill.models.language_model import Head
from distill.models.precision import at_least_fp32


class StudentRows(NamedTuple):
    """Rows of the student: z [n, V], their maxima [n, 1], and exp(z - top) [n, V] (any where nobody reads them)."""

    z: Tensor
    top: Tensor
    exponentials: Tensor
    temperature: float


class Logits(NamedTuple):
    """A teacher that gives all its logits [n, V]; the bias [V] is still to be added: that spares a pass over memory."""

    values: Tensor
    bias: Tensor | None = None

    @property
    def reads_exponentials(self) -> bool:
        return True

    def rows(self, rows: Tensor | slice) -> Self:
        """The distributions at some of the positions."""
        return self._replace(values=self.values[rows])

    def as_read_by_terms(self, dtype: torch.dtype) -> Tensor:
        """What `VocabularyTerm.losses` gets: the logits."""
        return biased(self.values, self.bias, dtype)

    def soft_targets(self, student: StudentRows, weight: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
        """KL(p || q) [n, 1] and weight * its gradient for z; entries of p below `cutoff` share one bucket."""
        z, top, v, temperature = student
        y = biased(self.values, self.bias, z.dtype) / temperature
        y_top = y.amax(-1, keepdim=True)
        u = (y - y_top).exp()
        mass_v, mass_u = v.sum(-1, keepdim=True), u.sum(-1, keepdim=True)
        if cutoff > 0:
            return _with_tail(z, top + mass_v.log(), y, y_top + mass_u.log(), weight, cutoff)
        loss = ((y - z) * u).sum(-1, keepdim=True) / mass_u + ((mass_v / mass_u).log() + (top - y_top))
        return loss, v * (weight / mass_v) - u * (weight / mass_u)


class TopK(NamedTuple):
    """A teacher known by its largest entries: ids [N, K] (any integers), log_probs [N, K + 1], the last of all others.

    The log-probabilities hold at the run's temperature; they may be rounded, as they are normalised on use. K < V.
    """

    ids: Tensor
    log_probs: Tensor

    @property
    def reads_exponentials(self) -> bool:
        return False

    def rows(self, rows: Tensor | slice) -> Self:
        """The distributions at some of the positions."""
        return type(self)(self.ids[rows], self.log_probs[rows])

    def as_read_by_terms(self, dtype: torch.dtype) -> Self:
        """What `VocabularyTerm.losses` gets."""
        return self

    def soft_targets(self, student: StudentRows, weight: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
        """As of `Logits`, with all other entries in one bucket in place of a cut-off.

        The others' exponentials are taken from the largest of themselves, so that a tiny mass Q keeps its digits.
        """
        z, ids = student.z, self.ids.long()
        log_p = self.log_probs.to(z.dtype).log_softmax(-1)
        rest = z.scatter(1, ids, -torch.inf)
        rest_top = rest.amax(-1, keepdim=True)
        u = (rest - rest_top).exp()
        mass_u = u.sum(-1, keepdim=True)
        log_q = torch.cat([z.gather(1, ids), rest_top + mass_u.log()], 1).log_softmax(-1)
        p, difference = log_p.exp(), weight * (log_q.exp() - log_p.exp())
        loss = (p * (log_p - log_q)).sum(-1, keepdim=True)
        return loss, (u * (difference[:, -1:] / mass_u)).scatter(1, ids, difference[:, :-1])


class Samples(NamedTuple):
    """A teacher known by an unbiased estimate of its distribution p: weights at some entries, 0 at all others.

    ids [N, J] (any integers; one that is there twice has the sum of its weights), weights [N, J] at least fp32,
    whose mean over the draws is p and which need not add up to 1, and neg_entropy [N, 1], the sum of p log p, so that a
    cross-entropy with the weights becomes a divergence. All of it holds at the run's temperature.
    """

    ids: Tensor
    weights: Tensor
    neg_entropy: Tensor

    @property
    def reads_exponentials(self) -> bool:
        return True

    def rows(self, rows: Tensor | slice) -> Self:
        """The distributions at some of the positions."""
        return type(self)(self.ids[rows], self.weights[rows], self.neg_entropy[rows])

    def as_read_by_terms(self, dtype: torch.dtype) -> Self:
        """What `VocabularyTerm.losses` gets."""
        return self

    def soft_targets(self, student: StudentRows, weight: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
        """As of `Logits`, in the mean over the draws; no cut-off."""
        z, top, v, _ = student
        ids, w = self.ids.long(), self.weights.to(z.dtype)
        mass = v.sum(-1, keepdim=True)
        log_q = z.gather(1, ids) - (top + mass.log())
        loss = self.neg_entropy.to(z.dtype) - (w * log_q).sum(-1, keepdim=True)
        return loss, (v * (weight * w.sum(-1, keepdim=True) / mass)).scatter_add(1, ids, -weight * w)


Sparse = TopK | Samples  # a teacher known by some of its entries, as caches give it
Single = Logits | TopK | Samples  # one distribution for each position


class Mixture(NamedTuple):
    """Several teachers at the same positions, with their weights in the mixture, which add up to 1.

    Where all of them give logits they stand for one distribution, the mean of all at `temperature`. Where one is known
    by some of its entries only, every loss is the mean of the members' losses: for soft targets that has the gradient
    of the mixture, since KL(p || q) is linear in p but for a constant.
    """

    members: tuple[Head | Single, ...]
    weights: tuple[float, ...] | Tensor  # [N, K] where they differ by position, which takes members with all logits
    temperature: float = 1.0  # at which probabilities are averaged

    @classmethod
    def of(cls, teacher: "Distribution | None") -> "Mixture":
        """Any form as a mixture: a single teacher has all the weight, and no teacher has no members."""
        if isinstance(teacher, Mixture):
            return teacher
        return Mixture((), ()) if teacher is None else Mixture((teacher,), (1.0,))

    def rows(self, rows: Tensor | slice) -> Self:
        """With the weights at some of the positions."""
        return self._replace(weights=self.weights[rows]) if isinstance(self.weights, Tensor) else self

    def combined(self, members: Sequence[Single], dtype: torch.dtype) -> list[tuple[float, Single | None]]:
        """The distributions whose losses are averaged, with their weights; no teacher counts as one that is None.

        Args:
            members: what each member gives at some positions.
            dtype: in which logits are averaged.
        """
        if not members:
            return [(1.0, None)]
        if len(members) > 1 and all(isinstance(member, Logits) for member in members):
            logits = (biased(*member, dtype) for member in members if isinstance(member, Logits))
            return [(1.0, Logits(mixed_logits(logits, self.weights, self.temperature)))]
        assert not isinstance(self.weights, Tensor), "the rules refuse caches of teachers with sources"
        return list(zip(self.weights, members, strict=True))


Distribution = Head | Single | Mixture  # of all N positions of a micro-batch


def biased(logits: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Logits with their bias, in the format of elementwise work."""
    return logits.to(dtype) if bias is None else logits.to(dtype) + bias


def top_k_log_probs(logits: Tensor, count: int, temperature: float) -> TopK:
    """The `count` = K largest entries of logits [N, V] at a temperature, and the joint mass of all others.

    Returns ids int64 [N, K] and log_probs [N, K + 1], at least fp32; there has to be another entry: K < V.
    """
    scaled = at_least_fp32(logits) / temperature
    values, ids = scaled.topk(count)
    rest = scaled.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return TopK(ids, torch.cat([values, rest], 1).log_softmax(-1))


def mixed_logits(members: Iterable[Tensor], weights: Sequence[float] | Tensor, temperature: float) -> Tensor:
    """Teachers' logits z_k [N, V] -> logits y [N, V] of their mean distribution at a temperature T, in at least fp32.

    The weights w_k are numbers, or [N, K].

    softmax(y / T) is the sum over the members k of w_k * softmax(z_k / T), as y = T * logsumexp over k of (log w_k +
    log_softmax(z_k / T)). The probabilities are averaged at T itself: mixed at 1 and divided by T afterwards they would
    be others. y is determined up to a constant; this one makes softmax(y / T) = exp(y / T).
    """
    total: Tensor | None = None
    logs = weights.log().split(1, 1) if isinstance(weights, Tensor) else [math.log(weight) for weight in weights]
    for logits, log_weight in zip(members, logs, strict=True):
        scaled = at_least_fp32(logits) / temperature
        part = scaled.log_softmax(-1) + log_weight
        total = part if total is None else torch.logaddexp(total, part)
    assert total is not None
    return temperature * total


def _with_tail(
    z: Tensor, z_total: Tensor, y: Tensor, y_total: Tensor, weight: Tensor, cutoff: float
) -> tuple[Tensor, Tensor]:
    """`Logits.soft_targets` with the entries below the cut-off in one bucket; z_total, y_total [n, 1]: log-sum-exps."""
    log_q, log_p = z - z_total, y - y_total
    p = log_p.exp()
    is_kept = p >= cutoff
    log_mass_p = y.masked_fill(is_kept, -torch.inf).logsumexp(-1, keepdim=True) - y_total  # -inf where nothing is cut
    log_mass_q = z.masked_fill(is_kept, -torch.inf).logsumexp(-1, keepdim=True) - z_total
    ratio = (log_mass_p - log_mass_q).masked_fill(log_mass_p == -torch.inf, 0)
    loss = (p * (log_p - log_q)).masked_fill(~is_kept, 0).sum(-1, keepdim=True) + log_mass_p.exp() * ratio
    return loss, weight * (log_q.exp() - torch.where(is_kept, p, (log_q + ratio).exp()))
