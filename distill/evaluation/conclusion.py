"""The conclusion from a comparison of two models, in one of three words; `significance` draws it."""

from dataclasses import dataclass

HELPED, DID_NOT, UNCLEAR = "helped", "did not", "unclear"


@dataclass(frozen=True)
class Conclusion:
    """Whether what differs between two models has made the first the better one, by a measure on a set."""

    word: str  # `helped`: the whole interval is on the better side; `did not`: on the worse side; `unclear`: neither
    reason: str  # half a sentence
    difference: float | None  # of the whole set
    low: float | None  # of the interval that holds 95 % of the draws; None where there is none
    high: float | None
    unit: str  # `ratio` of perplexities, below 1 if the first is better; or `points` in percent, above 0 if it is
    n: int  # units that are scored
    units: str  # what they are


def word_of(low: float, high: float) -> str:
    """The conclusion from the ends of an interval of gains: above 0 the first model is better."""
    return HELPED if low > 0 else DID_NOT if high < 0 else UNCLEAR


def in_points(difference: float) -> str:
    """`+1.2`, with a minus sign as in print."""
    return f"{round(difference, 1) + 0.0:+.1f}".replace("-", "\u2212")
