"""The three loss terms, one value per position and no reduction: soft targets, masked words, hidden directions.

Shape legend: N positions, V vocabulary, K kept teacher entries, H width of the hidden states. Everything is computed in
fp32, in float64 where an input is float64. Sums, weights and counts belong to `distill.objective.objective`;
`distill.objective.fused` computes the first two terms without keeping [N, V] and is tested against this file.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def soft(student_logits: Tensor, teacher_logits: Tensor, temperature: float, cutoff: float = 0.0) -> Tensor:
    """Soft targets: T^2 * KL(softmax(teacher / T) || softmax(student / T)), summed over the vocabulary, in nats.

    [N, V], [N, V] -> [N]. Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015); the factor
    T^2 keeps the gradient's size when T changes. Entries whose teacher probability (at temperature T) is below `cutoff`
    are merged into one tail bucket on both sides, so that both stay distributions: nothing cut gives the plain
    divergence, everything cut gives 0.
    """
    student = _at_least_fp32(student_logits) / temperature
    teacher = _at_least_fp32(teacher_logits) / temperature
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    terms = F.kl_div(log_q, log_p, reduction="none", log_target=True)
    if cutoff <= 0:
        return temperature**2 * terms.sum(-1)
    cut = log_p.exp() < cutoff
    kept = terms.masked_fill(cut, 0).sum(-1)
    return temperature**2 * (kept + _tail(student, teacher, cut))


def soft_topk(student_logits: Tensor, ids: Tensor, log_probs: Tensor, temperature: float) -> Tensor:
    """Soft targets from the teacher's K largest entries alone, all others in one tail bucket: [N, V] -> [N], in nats.

    `soft` of the K + 1 buckets: T^2 * (sum over K of p (log p - log q) + P (log P - log Q)), with q = softmax(student
    / T) and P, Q the joint masses of the rest. `ids` [N, K] and `log_probs` [N, K + 1] are what
    `teacher.signal.top_k_log_probs` gives; log_probs may have been rounded since and are normalised here.
    """
    student, ids = _at_least_fp32(student_logits) / temperature, ids.long()
    rest = student.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    log_q = torch.cat([student.gather(1, ids), rest], 1).log_softmax(-1)
    log_p = log_probs.to(log_q.dtype).log_softmax(-1)
    return temperature**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def mlm(logits: Tensor, targets: Tensor) -> Tensor:
    """Masked-language-model cross-entropy at temperature 1, in nats: [N, V], [N] (int64) -> [N].

    A target of -100 gives 0 and no gradient.
    """
    return F.cross_entropy(_at_least_fp32(logits), targets, reduction="none")


def cosine(student_hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """1 - cos(student, teacher), between 0 and 2: [N, H], [N, H] -> [N]. A vector of zeros has cosine 0."""
    # The teacher is normalised first, so that autograd saves this new tensor and not one made under inference mode.
    teacher = F.normalize(_at_least_fp32(teacher_hidden), dim=-1)
    return 1 - (F.normalize(_at_least_fp32(student_hidden), dim=-1) * teacher).sum(-1)


def _tail(student: Tensor, teacher: Tensor, cut: Tensor) -> Tensor:
    """P * (log P - log Q) of the cut entries' joint masses, from scaled logits [N, V] and `cut` (bool [N, V]) -> [N].

    Both masses are ratios of log-sum-exps: with everything cut they cancel exactly, and a tiny mass keeps its digits.
    """
    some = cut.any(-1)
    outside = ~cut & some[:, None]  # a row without a cut keeps all: no gradient of -inf
    log_mass_p = teacher.masked_fill(outside, -torch.inf).logsumexp(-1) - teacher.logsumexp(-1)
    log_mass_q = student.masked_fill(outside, -torch.inf).logsumexp(-1) - student.logsumexp(-1)
    return log_mass_p.exp() * (log_mass_p - log_mass_q)


def _at_least_fp32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
