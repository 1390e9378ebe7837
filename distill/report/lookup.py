"""Finds things in results.json, whatever of it is missing: models, evaluation sets, measures and loss terms by name."""

import math
from typing import Any

MODELS = ("teacher", "student", "twin")
# Of results that do not say what was measured.
MEASURES = {
    "perplexity": {"title": "Perplexity", "lower_is_better": True},
    "pseudo_perplexity": {"title": "Pseudo-perplexity", "lower_is_better": True},
}


def usable(value: Any) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def value_at(results: Any, *keys: str) -> Any:
    """The value at a path of keys, or None as soon as one of them is missing."""
    for key in keys:
        results = results.get(key) if isinstance(results, dict) else None
    return results


def label_of(results: dict[str, Any], name: str) -> str:
    """What an evaluation set is called in the report."""
    return str(value_at(results, "evaluation", name, "name") or name)


def is_scored(results: dict[str, Any], name: str) -> bool:
    """Whether an evaluation set has positions to score, as far as is known; without any its scores mean nothing."""
    return value_at(results, "evaluation", name, "positions") != 0


def axis_of(results: dict[str, Any]) -> str:
    """What the lines of the history are shown by, which is also their key for it: step or epoch."""
    return "step" if results.get("history_by") == "step" else "epoch"


def models_of(results: dict[str, Any]) -> list[str]:
    return [name for name in MODELS if results.get(name)]


def measures_of(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was measured: by name `title`, `lower_is_better` and, where known, `explanation`."""
    found = results.get("measures") or MEASURES
    known = {name: {key: value for key, value in (of or {}).items() if value is not None} for name, of in found.items()}
    return {name: {"title": name, **measure} for name, measure in known.items()}


def sets_of(results: dict[str, Any], measure: str) -> list[str]:
    """Evaluation sets for which any model or epoch has a number, in the order of results["evaluation"].

    One without a scored position has none, whatever stands there.
    """
    given = [value_at(results, name, measure) or {} for name in MODELS]
    given += [line.get(measure) or {} for line in results.get("history") or []]
    named = dict.fromkeys(
        key for values in given for key, value in values.items() if value is not None and is_scored(results, key)
    )
    order = list(results.get("evaluation") or {})
    return sorted(named, key=lambda key: order.index(key) if key in order else len(order))


def titles_of_terms(*many: dict[str, Any]) -> dict[str, str]:
    """Title by name of every loss term in these results, the weighted total first.

    Terms that results do not describe are those that the history has losses of.
    """
    titles = {"total": "Total"}
    for results in many:
        for name, term in (value_at(results, "objective", "terms") or {}).items():
            titles.setdefault(name, str((term or {}).get("title") or name))
        for line in results.get("history") or []:
            for name in line.get("loss") or {}:
                titles.setdefault(name, name)
    return titles
