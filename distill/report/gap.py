"""How much of the gap between the baseline and the teacher a student closes, as a sentence and as cells of a table."""

from distill.report.words import MINUS, NONE, is_number, listed, number, percent
from distill.runs.facts import Baseline, GapClosed, Resampled
from distill.runs.record import Record
from distill.runtime.progress import in_a_sentence

TITLE, NO_GAP = "Gap closed", "no gap"
NOTE = (
    "The gap closed is (baseline - student) / (baseline - teacher), of perplexities in logarithms, with its interval: "
    "above 100% the student is better than the teacher, below 0% worse than the baseline."
)


def has_gap(record: Record) -> bool:
    """Whether a baseline shows how much of the gap the student closes."""
    return record.baseline is not None and bool(record.baseline.gap_closed)


def closed_of(record: Record, measure: str, data: str) -> GapClosed | None:
    """What the record has of a measure on a set."""
    return record.baseline.gap_closed.get(measure, {}).get(data) if record.baseline else None


def is_tested(baseline: Baseline, measure: str, data: str) -> bool:
    """Whether a bootstrap shows how sure the difference of student and baseline on a set is."""
    drawn = baseline.drawn(measure, data)
    return is_number(drawn.low) and is_number(drawn.high)


def cell(record: Record, measure: str, data: str) -> str:
    """`34% (29 to 40)`, `34%` without an interval, or `no gap`; a dash where a model has no score."""
    closed = closed_of(record, measure, data)
    if closed is None or not is_number(closed.fraction):
        return NONE if closed is None else NO_GAP
    return f"{_percent(closed.fraction)}%" + (f" ({_interval(closed)})" if is_number(closed.low) else "")


def sentences(record: Record) -> str:
    """The fraction of the first measure on every set, the sets without a gap, and why an interval is missing.

    Where the baseline differs in more than its teacher, the student closes the gap, and not what it learned from.
    """
    baseline, (measure, described) = record.baseline, record.first_measure
    closed = {key: entry for key in record.sets_of(measure) if (entry := closed_of(record, measure, key))}
    if baseline is None or not closed:
        return ""
    models = f"between baseline and teacher{'s' * bool(record.teacher and record.teacher.members)}"
    with_gap = {key: entry for key, entry in closed.items() if is_number(entry.fraction)}
    parts: list[str] = []
    if with_gap:
        is_fair = baseline.steps == record.training.steps and not baseline.remarks
        is_fair = is_fair and all(is_tested(baseline, measure, key) for key in with_gap)
        who = f"{'Learning from the teacher' if is_fair else 'The student'} closes"
        (first, of_first), *others = [
            (_shown(entry, baseline.drawn(measure, key)), record.label_of(key)) for key, entry in with_gap.items()
        ]
        closes = [f"{first} of the gap {models} on {of_first}", *(f"{shown} on {label}" for shown, label in others)]
        parts.append(f"{who} {listed(closes)}, by {in_a_sentence(described.title)}.")
    if without := [record.label_of(key) for key in closed if key not in with_gap]:
        parts.append(f"There is no gap {models} on {listed(without)}: the baseline is no worse there.")
    parts += [
        f"The gap closed on {record.label_of(key)} has no interval: in {number(entry.without_gap)} of "
        f"{number(baseline.drawn(measure, key).resamples)} resamples the baseline is no worse than the teacher."
        for key, entry in with_gap.items()
        if entry.without_gap  # draws without a gap leave none
    ]
    return " ".join(parts)


def _shown(closed: GapClosed, drawn: Resampled) -> str:
    """`34% (95% interval 29 to 40)`."""
    interval = f" ({percent(drawn.confidence)} interval {_interval(closed)})" if is_number(closed.low) else ""
    return f"{_percent(closed.fraction)}%{interval}"


def _interval(closed: GapClosed) -> str:
    return f"{_percent(closed.low)} to {_percent(closed.high)}"


def _percent(fraction: float | None) -> str:
    return str(round(100 * (fraction or 0))).replace("-", MINUS)
