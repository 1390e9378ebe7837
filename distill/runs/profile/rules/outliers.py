"""Rule: a few steps take far longer than the others."""

import math
from typing import Any

import numpy as np

from distill.runs.profile.figures import OUTLIER, Figures
from distill.runs.profile.finding import Finding, percent
from distill.runs.profile.phases import CHECKPOINT, EVALUATION, EXCHANGE, PHASES, TITLES

NAME = "step outliers"
LEFT = 0.02  # share of the time that checkpoints may take


def find(figures: Figures) -> Finding | None:
    """Lost is the sum of (t - m) over the steps of more than 2 m, by the sum of all t; m is the median of the t.

    Checkpoints count in full, evaluations not at all. Prediction without outliers: the run takes that share less.
    With checkpoints every k' steps in place of k, which took the share C: 1 / (1 - C (1 - k / k')).
    """
    times = figures.with_checkpoints
    total, median = float(times.sum()), float(np.median(times))
    checkpoints = float(figures.times[:, :, PHASES.index(CHECKPOINT)].max(0).sum()) / total
    out = times > OUTLIER * median
    lost = float((times[out] - median).sum()) / total
    phase = _where(figures, out) if out.any() else CHECKPOINT
    if phase == CHECKPOINT:
        return _of_checkpoints(figures, checkpoints, times, out)
    sentence = (
        f"{out.sum()} of {len(times)} steps take more than {OUTLIER:g} times the median, at most "
        f"{times.max() / median:.1f} times, and {percent(lost)} of the time, most of it in {TITLES[phase]}"
    )
    advice = "Look for what else that host does in these steps; the trace and the samples of the profile show when."
    return Finding(NAME, lost, sentence, advice, gain=1 / (1 - lost))


def _of_checkpoints(figures: Figures, share: float, times: np.ndarray, out: np.ndarray) -> Finding | None:
    if not share:
        return None
    every = figures.settings.save_every
    rarer = _round_up(every * share / LEFT)
    sentence = f"Checkpoints take {percent(share)} of the time"
    if out.any():
        sentence += f", and make {out.sum()} of {len(times)} steps longer than {OUTLIER:g} times the median"
    change: dict[str, Any] = {"train.save_every": rarer} if rarer > every else {}
    return Finding(NAME, share, sentence, change=change, gain=1 / (1 - share * (1 - every / max(rarer, every))))


def _where(figures: Figures, out: np.ndarray) -> str:
    """The phase that takes most more than usual in these steps, on the rank on which it does.

    The exchange is left out where there is another one: the other ranks wait in it.
    """
    usual = np.median(figures.times, axis=1, keepdims=True)
    more = (figures.times - usual)[:, out].sum(1)  # [R, P]
    names = [phase for phase in PHASES if phase != EVALUATION]
    by_phase = {phase: float(more[:, PHASES.index(phase)].max()) for phase in names}
    if len(figures.ranks) > 1:
        own = {phase: value for phase, value in by_phase.items() if phase != EXCHANGE}
        if max(own.values()) >= by_phase[EXCHANGE] / 2:
            by_phase = own
    return max(by_phase, key=lambda phase: by_phase[phase])


def _round_up(number: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, and so on."""
    size = 10 ** math.floor(math.log10(max(number, 1)))
    return int(next(size * step for step in (1, 2, 5, 10) if size * step >= number))
