"""What a tuning ends with: prediction against measurement as a table, and the overrides to use."""

import json
from dataclasses import asdict
from typing import Any

from distill.report.stage_scores import lines_of_table
from distill.runtime.files import atomic
from distill.tune.tuning import Tried, Tuning

NOTE = (
    "Times as fast as the run as it is, which takes its turn beside all others; of several turns the median, with "
    "the lowest and the highest. The loss is the largest difference in any step of a trial: what rounding makes of it."
)


def write(tuning: Tuning) -> str:
    """Write tune.md and tune.json into the folder of a tuning, and give the text of the first."""
    text = "\n\n".join([tuning.base.outcomes[0].conclusion, _table(tuning), NOTE, advice(tuning)]) + "\n"
    with atomic(tuning.plan.folder / "tune.md") as new:
        new.write_text(f"# What makes this run faster\n\n{text}", encoding="utf-8")
    with atomic(tuning.plan.folder / "tune.json") as new:
        new.write_text(json.dumps(content(tuning), indent=1), encoding="utf-8")
    return text


def advice(tuning: Tuning) -> str:
    """The overrides to use, in a sentence."""
    best = tuning.best
    if best is None:
        return "The run is best as it is."
    return f"Use these settings, {best.measured:.2f} times as fast: {' '.join(best.candidate.overrides)}"


def content(tuning: Tuning) -> dict[str, Any]:
    """The whole of it, for tune.json."""
    best = tuning.best
    base = tuning.base.outcomes[0]
    return {
        "arguments": tuning.plan.arguments,
        "steps": tuning.plan.steps,
        "conclusion": base.conclusion,
        "findings": [asdict(finding) for finding in base.findings],
        "seconds": tuning.base.seconds,
        "tried": [_described(tried) for tried in tuning.tried],
        "overrides": best.candidate.overrides if best else [],
        "gain": best.measured if best else 1.0,
    }


def _described(tried: Tried) -> dict[str, Any]:
    candidate = tried.candidate
    return {
        "name": candidate.name,
        "overrides": candidate.overrides,
        "predicted": candidate.predicted,
        "reason": candidate.reason,
        "measured": tried.measured,
        "turns": tried.gains,
        "seconds": tried.seconds,
        "loss_difference": tried.loss_difference if tried.gains else None,
        "error": tried.error,
    }


def _table(tuning: Tuning) -> str:
    base = tuning.base.seconds or 0.0
    rows = [[tuning.base.candidate.name, "", "", "1", f"{1000 * base:,.1f}", ""]]
    rows += [_row(tried) for tried in tuning.tried]
    return lines_of_table(["change", "settings", "predicted", "measured", "ms a step", "loss"], rows)


def _row(tried: Tried) -> list[str]:
    candidate = tried.candidate
    predicted = "-" if candidate.predicted is None else f"{candidate.predicted:.2f}"
    cells = [candidate.name, " ".join(candidate.overrides), predicted]
    if tried.measured is None or tried.seconds is None:
        return [*cells, f"failed: {tried.error}".replace("|", "/"), "", ""]
    spread = f" ({min(tried.gains):.2f} to {max(tried.gains):.2f})" if len(tried.gains) > 1 else ""
    return [*cells, f"{tried.measured:.2f}{spread}", f"{1000 * tried.seconds:,.1f}", f"{tried.loss_difference:.1g}"]
