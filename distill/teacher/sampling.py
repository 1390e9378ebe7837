"""A teacher's distribution kept without bias: its largest entries exactly, and draws from all others.

Shapes: n positions, V vocabulary, M entries kept exactly, K draws, J = M + K.

With p the teacher's probabilities at the temperature and R all tokens but its M most probable, tokens are drawn in
proportion to p from R, and each draw stands for P(R) / K of probability. So the estimate

    e(v) = p(v)                          for the M most probable
    e(v) = (draws of v) * P(R) / K       for all others

has the mean p, and everything linear in p (the cross-entropy -sum p log s, its gradient, and with the teacher's entropy
KL(p || s)) is estimated without bias; but for the 16 bits in which the numbers are stored. Of all distributions to draw
from this one has the smallest sum of the variances of e, with independent draws. The largest entries alone, with all
others in one bucket, are a biased estimate whatever their number.

The draws of a position are systematic: the K points (i + u) / K, i = 0 ... K - 1, of the cumulative distribution of R
in the order of the vocabulary, with a single uniform u. Every token is expected K p(v) / P(R) times, as in independent
draws, and comes that often to within one, so the variance is smaller (Cochran, "Sampling Techniques", 1977, chapter 8).
One that is drawn several times is there several times. Cached targets drawn by importance, with independent draws and
without exact entries: "Sparse Logit Sampling: Accelerating Knowledge Distillation in LLMs" (arXiv 2503.16870).
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from distill.models.precision import at_least_fp32
from distill.runtime.seed import key, uniform
from distill.teacher.distributions import Samples, top_k_log_probs

LOWEST = -6e4  # log-probability: float16 ends at -65504


def offsets_of(sequences: np.ndarray, counts: np.ndarray, purpose: str) -> np.ndarray:
    """The u of each position, sequence by sequence, [counts.sum()] float64: a function of sequence and place.

    Args:
        sequences, counts: numbers of sequences, and how many positions each has.
        purpose: one stream for each, so that two caches of the same sequences draw independently.
    """
    starts = np.repeat(counts.cumsum() - counts, counts)
    return uniform(key(0, purpose, np.repeat(sequences, counts), np.arange(counts.sum()) - starts))


def kept_entries(logits: Tensor, top_k: int, sampled: int, temperature: float, offsets: Tensor) -> dict[str, Tensor]:
    """What a cache keeps of logits [n, V]: the fields of its record by name, numbers in at least fp32.

    Args:
        top_k, sampled: M and K, one of which may be 0.
        offsets: [n] float64 between 0 and 1, the u of each position.
    """
    columns: dict[str, Tensor] = {}
    if top_k:
        columns["ids"], columns["log_probs"] = top_k_log_probs(logits, top_k, temperature)
    if not sampled:
        return columns
    log_p = (at_least_fp32(logits) / temperature).log_softmax(-1)
    columns["neg_entropy"] = -torch.special.entr(log_p.exp()).sum(-1, keepdim=True)
    rest = log_p.scatter(1, columns["ids"], -torch.inf) if top_k else log_p
    # In float64, as a sum over the vocabulary in fp32 would lose tokens of small probability.
    cumulative = _running_sums(rest.exp())
    total = cumulative[:, -1:]
    points = (torch.arange(sampled, device=logits.device) + offsets[:, None]) * (total / sampled)
    points = points.minimum(torch.nextafter(total, torch.zeros_like(total)))  # rounding up would leave the vocabulary
    draws = torch.searchsorted(cumulative, points, right=True)  # right: never a token of probability 0
    columns["draws"] = draws.clamp(max=logits.shape[1] - 1)  # of a rest that has none at all, and weighs nothing
    return columns


def _running_sums(values: Tensor) -> Tensor:
    """[n, V] in float64; on the host where torch refuses the GPU's algorithm, as it may not repeat bit for bit."""
    if values.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(-1, dtype=torch.float64).to(values.device)
    return values.cumsum(-1, dtype=torch.float64)


def stored(entries: Mapping[str, Tensor], record: np.dtype) -> np.ndarray:
    """The records [n] of these entries, rounded as they are on disk."""
    records = np.empty(len(next(iter(entries.values()))), record)
    for name, values in entries.items():
        records[name] = (values.clamp(min=LOWEST).half() if values.is_floating_point() else values).cpu().numpy()
    return records


def as_samples(columns: Mapping[str, Tensor]) -> Samples:
    """The fields of some records, as weighted entries."""
    draws = columns["draws"]
    rest = torch.ones(len(draws), 1, device=draws.device)
    ids, weights = [draws], []
    if "ids" in columns:
        exact = columns["log_probs"].float().softmax(-1)
        ids, weights, rest = [columns["ids"], draws], [exact[:, :-1]], exact[:, -1:]
    weights.append((rest / draws.shape[1]).expand(draws.shape))
    return Samples(torch.cat(ids, 1), torch.cat(weights, 1), columns["neg_entropy"].float())
