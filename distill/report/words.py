"""Numbers, spans of time and lists as text, as reports show them."""

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

from distill.runtime.progress import counted, duration

NONE = "\u2013"  # en dash: stands where there is no number
TIMES, MINUS = "\u00d7", "\u2212"


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any) -> str:
    """A number with about four significant digits and commas between thousands; a dash for no number."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.3g}"
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    return f"{value:,.{digits}f}"


def percent(fraction: Any, digits: int = 0) -> str:
    return f"{100 * fraction:.{digits}f}%" if is_number(fraction) else NONE


def short(value: Any, unit: str = "") -> str:
    """A large count with three digits: `66.4 M`, or `265 MB` with the unit `B`."""
    if not is_number(value):
        return NONE
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {letter}{unit}"
    return f"{value:,.0f} {unit}".strip()


def time_of(seconds: Any) -> str | None:
    """A span of time as text; None for no number."""
    return duration(seconds) if is_number(seconds) else None


def count_of(value: Any, noun: str) -> str | None:
    """`12 ranks`; None where there is no number."""
    return counted(value, noun) if is_number(value) else None


def ratio(over: Any, under: Any) -> float | None:
    """How many times one number is another; None where one is missing or negative, or the other is 0."""
    return over / under if is_number(over) and is_number(under) and over >= 0 and under > 0 else None


def listed(parts: Sequence[str]) -> str:
    """`one, two and three`."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
