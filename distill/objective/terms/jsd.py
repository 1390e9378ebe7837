"""Generalised Jensen-Shannon divergence: both distributions over the vocabulary against a mixture of the two."""

from distill.objective.terms._distributions import Divergence


class Jsd(Divergence):
    """T^2 * (b * KL(p || m) + (1 - b) * KL(q || m)), m = b * p + (1 - b) * q (Agarwal et al. 2024); see its base."""

    title = "Jensen-Shannon divergence"
