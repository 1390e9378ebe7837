"""What ranks wait for the slowest of them, where the time of a step differs from rank to rank and from step to step."""

import math
from statistics import NormalDist

# Of the formula below; 3/8 is what Blom recommends for the normal distribution.
BLOM = 0.375


def expected_maximum(number: int) -> float:
    """The expected largest of so many independent standard normal values, in standard deviations.

    By Blom's formula, the quantile at (n - 3/8) / (n + 1/4) (G. Blom, "Statistical Estimates and Transformed
    Beta-Variables", 1958), which is within 0.02 of the exact value for all n.
    """
    if number < 2:
        return 0.0
    return NormalDist().inv_cdf((number - BLOM) / (number + 1 - 2 * BLOM))


def waiting(seconds: float, jitter: float, micro_batches: int, ranks: int) -> float:
    """Expected seconds that a rank waits before an exchange, as all wait for the slowest.

    Deviations of micro-batches are taken to be independent and normal: over a window they add up like the root of its
    length, so a longer window loses a smaller share of its time.

    Args:
        seconds: that a micro-batch takes on average.
        jitter: standard deviation of that, as a share of it.
        micro_batches: between two exchanges.
    """
    return seconds * jitter * math.sqrt(micro_batches) * expected_maximum(ranks)
