"""How sure it is that the student is better than its twin, as the paired bootstrap of a run says."""

from typing import Any

from distill.report.lookup import label_of, measures_of, usable, value_at
from distill.report.page import number, percent


def of_twin(results: dict[str, Any]) -> str:
    """A sentence on the first measure for which there is a bootstrap; nothing where there is none."""
    for measure, described in measures_of(results).items():
        by_set = value_at(results, "twin", "bootstrap", measure) or {}
        parts = [_of_set(label_of(results, name), found) for name, found in by_set.items() if usable(found.get("low"))]
        if parts:
            resamples = number(next(iter(by_set.values()))["resamples"])
            return (
                f"In {resamples} paired resamples of each set its {described['title'].lower()} is the lower one "
                f"{_listed(parts)}."
            )
    return ""


def interval(found: dict[str, Any]) -> str:
    """`0.812 to 0.845`, the ratios between which the middle of the resamples lies."""
    return f"{found['low']:.3f} to {found['high']:.3f}"


def _of_set(label: str, found: dict[str, Any]) -> str:
    drawn = f"{number(found['num_units'])} {found['units']}"
    return (
        f"in {percent(found['better'], 1)} of them on {label} ({drawn}; {percent(found['confidence'])} interval of the "
        f"ratio {interval(found)})"
    )


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
