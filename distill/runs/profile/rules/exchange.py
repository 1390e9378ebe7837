"""Rule: the ranks stand still while they exchange gradients."""

from typing import Any

from distill.runs.profile.figures import Figures
from distill.runs.profile.finding import Finding, percent

NAME = "exchange"
LARGE = 2**18  # bytes: below, an exchange is waiting for answers, which fewer bytes do not bring sooner


def find(figures: Figures) -> Finding | None:
    """Lost is E / T: E is the time of the exchange on the rank that came last, which waits for no other rank.

    Predictions: one exchange in place of M, T' = T - E + E / M. In half the bytes an exchange that takes X from its
    beginning to its end, of which H = X - E lies beside the backward pass, stands in the way for max(0, X / 2 - H).
    """
    if len(figures.ranks) < 2:
        return None
    step, still = figures.step, figures.exchange
    sentence = f"The ranks stand still for their exchange in {percent(still / step)} of the time"
    change, left = _change(figures)
    if not change:
        advice = "It needs a faster network, or more rows a step, which would change the student."
        return Finding(NAME, still / step, sentence, advice, gain=step / (step - still))
    return Finding(NAME, still / step, sentence, change=change, gain=step / (step - still + left))


def _change(figures: Figures) -> tuple[dict[str, Any], float]:
    """What would shorten the exchange, and the seconds of a step that are left of it; none and 0 where nothing does."""
    settings, still = figures.settings, figures.exchange
    if settings.sync == "every" and settings.micro_batches > 1:
        return {"backend.sync": "window"}, still / settings.micro_batches
    if settings.compression == "none" and settings.bytes_exchanged >= LARGE:
        span = figures.exchange_span
        return {"backend.compression": "bf16"}, max(0.0, span / 2 - (span - still))
    return {}, 0.0
