"""The formulas of the losses, one value per position and no reduction.

Shape legend: N positions, V vocabulary, K or J kept teacher entries, H width of the hidden states. Everything is
computed in fp32, in float64 where an input is float64. Sums, weights and counts belong to
`distill.objective.objective`; `distill.objective.chunked` computes those over the vocabulary without keeping [N, V] and
is tested against this file.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.models.precision import at_least_fp32


def soft(student_logits: Tensor, teacher_logits: Tensor, temperature: float, cutoff: float = 0.0) -> Tensor:
    """Soft targets: T^2 * KL(softmax(teacher / T) || softmax(student / T)), summed over the vocabulary, in nats.

    [N, V], [N, V] -> [N]. Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015); the factor
    T^2 keeps the gradient's size when T changes. Entries whose teacher probability (at temperature T) is below `cutoff`
    are merged into one tail bucket on both sides, so that both stay distributions: nothing cut gives the plain
    divergence, everything cut gives 0.
    """
    student = at_least_fp32(student_logits) / temperature
    teacher = at_least_fp32(teacher_logits) / temperature
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    terms = F.kl_div(log_q, log_p, reduction="none", log_target=True)
    if cutoff <= 0:
        return temperature**2 * terms.sum(-1)
    cut = log_p.exp() < cutoff
    kept_terms = terms.masked_fill(cut, 0).sum(-1)
    return temperature**2 * (kept_terms + _tail(student, teacher, cut))


def soft_topk(student_logits: Tensor, ids: Tensor, log_probs: Tensor, temperature: float) -> Tensor:
    """Soft targets from the teacher's K largest entries alone, all others in one tail bucket: [N, V] -> [N], in nats.

    `soft` of the K + 1 buckets: T^2 * (sum over K of p (log p - log q) + P (log P - log Q)), with q = softmax(student
    / T) and P, Q the joint masses of the rest. `ids` [N, K] and `log_probs` [N, K + 1] are what
    `teacher.distributions.top_k_log_probs` gives; log_probs may have been rounded since and are normalised here.
    """
    student, ids = at_least_fp32(student_logits) / temperature, ids.long()
    rest = student.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    log_q = torch.cat([student.gather(1, ids), rest], 1).log_softmax(-1)
    log_p = log_probs.to(log_q.dtype).log_softmax(-1)
    return temperature**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def soft_sampled(
    student_logits: Tensor, ids: Tensor, weights: Tensor, neg_entropy: Tensor, temperature: float
) -> Tensor:
    """Soft targets from an unbiased estimate w of the teacher's distribution p: [N, V] -> [N], in nats.

    T^2 * (sum of p log p - sum over J of w_j log q(x_j)), q = softmax(student / T), with the gradient T * (W q - w), W
    the sum of the weights. Both are linear in w: where E w = p they have the mean of `soft` and of its gradient. W need
    not be 1; dividing by it would make the estimate biased. A single value may be below 0. `ids` and `weights` [N, J]
    and `neg_entropy` [N, 1] are those of `teacher.distributions.Samples`; an id that is there twice counts twice.
    """
    log_q = (at_least_fp32(student_logits) / temperature).log_softmax(-1)
    cross = (weights.to(log_q.dtype) * log_q.gather(1, ids.long())).sum(-1)
    return temperature**2 * (neg_entropy[:, 0].to(log_q.dtype) - cross)


def divergence(student_logits: Tensor, teacher_logits: Tensor, temperature: float, beta: float) -> Tensor:
    """T^2 * (beta * KL(p || m) + (1 - beta) * KL(q || m)), m = beta * p + (1 - beta) * q: [N, V] twice -> [N], in nats.

    p = softmax(teacher / T), q = softmax(student / T). The generalised Jensen-Shannon divergence of Agarwal et al.,
    "On-Policy Distillation of Language Models" (2024). Near 0 it is beta * KL(p || q) and near 1 it is (1 - beta) *
    KL(q || p), and so it goes to 0 at both ends. At the ends themselves, as in the published code, it is KL(p || q),
    that of `soft`, for beta = 0, and KL(q || p), the reverse divergence, for beta = 1 (Gu et al., "MiniLLM: Knowledge
    Distillation of Large Language Models", 2024): it costs the student little to miss what is probable for the teacher,
    and much to make probable what is not. The value jumps at 0 and at 1.
    """
    log_q, log_p = (
        (at_least_fp32(logits) / temperature).log_softmax(-1) for logits in (student_logits, teacher_logits)
    )
    if beta in (0, 1):
        over, under = (log_p, log_q) if beta == 0 else (log_q, log_p)
        return temperature**2 * F.kl_div(under, over, reduction="none", log_target=True).sum(-1)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    of_teacher, of_student = (F.kl_div(log_m, log_x, reduction="none", log_target=True) for log_x in (log_p, log_q))
    return temperature**2 * (beta * of_teacher + (1 - beta) * of_student).sum(-1)


def logit_mse(student_logits: Tensor, teacher_logits: Tensor, center: bool = False) -> Tensor:
    """The squared difference of the logits, averaged over the vocabulary: [N, V], [N, V] -> [N].

    Kim et al., "Comparing Kullback-Leibler Divergence and Mean Squared Error Loss in Knowledge Distillation" (2021);
    they write its sum, here it is the mean, as in their code. `center` takes each side's mean over the vocabulary away
    first, which no softmax sees: that is twice the limit of `soft` for an ever higher temperature.
    """
    difference = at_least_fp32(student_logits) - at_least_fp32(teacher_logits)
    if center:
        difference = difference - difference.mean(-1, keepdim=True)
    return difference.square().mean(-1)


def mlm(logits: Tensor, targets: Tensor) -> Tensor:
    """Masked-language-model cross-entropy at temperature 1, in nats: [N, V], [N] (int64) -> [N].

    A target of -100 gives 0 and no gradient.
    """
    return F.cross_entropy(at_least_fp32(logits), targets, reduction="none")


def cosine(student_hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """1 - cos(student, teacher), between 0 and 2: [N, H], [N, H] -> [N]. A vector of zeros has cosine 0."""
    # The teacher is normalised first, so that autograd saves this new tensor and not one made under inference mode.
    teacher = F.normalize(at_least_fp32(teacher_hidden), dim=-1)
    return 1 - (F.normalize(at_least_fp32(student_hidden), dim=-1) * teacher).sum(-1)


def _tail(student: Tensor, teacher: Tensor, cut: Tensor) -> Tensor:
    """P * (log P - log Q) of the cut entries' joint masses, from scaled logits [N, V] and `cut` (bool [N, V]) -> [N].

    Both masses are ratios of log-sum-exps: with everything cut they cancel exactly, and a tiny mass keeps its digits.
    """
    has_cut = cut.any(-1)
    outside = ~cut & has_cut[:, None]  # a row without a cut keeps all: no gradient of -inf
    log_mass_p = teacher.masked_fill(outside, -torch.inf).logsumexp(-1) - teacher.logsumexp(-1)
    log_mass_q = student.masked_fill(outside, -torch.inf).logsumexp(-1) - student.logsumexp(-1)
    return log_mass_p.exp() * (log_mass_p - log_mass_q)
