"""The history of a run in tables: losses and scores by epoch or step, the baseline's and the teacher's beside them."""

from collections.abc import Callable, Sequence

from distill.report.page import Block, Picture, Table
from distill.report.words import NONE, number, short, time_of
from distill.runs.facts import HistoryPoint
from distill.runs.record import Record, term_titles

MAX_LINES = 40  # of a history in a table; the figures show all
Points = dict[str, HistoryPoint]  # by step or epoch, as it is shown


def history_blocks(record: Record, pictures: dict[str, Picture]) -> list[Block]:
    """The tables of a history and its figures, where `pictures` has them; of a run under way those so far."""
    of_baseline = record.baseline.history if record.baseline else []
    key = _key([*record.history, *of_baseline], record.history_by)
    all_points = {key(point): point for point in record.history}
    student, baseline = _some(all_points), _some({key(point): point for point in of_baseline})
    tables = [_losses(record, student, baseline)]
    tables += [_measure(record, measure, student, baseline) for measure in record.measures]
    shown: list[Block] = [table for table in tables if table.rows]
    if len(student) < len(all_points):
        shown.insert(0, f"The tables list {len(student)} of {len(all_points)} points; history.jsonl has all.")
    return shown + [pictures[name] for name in ("history", "minutes") if name in pictures]


def _key(history: Sequence[HistoryPoint], axis: str) -> Callable[[HistoryPoint], str]:
    """What names a point: its step, or its epoch in as few digits as keep those of this history apart."""
    if axis == "step":
        return lambda point: number(point.step or 0)
    epochs = {point.epoch or 0.0 for point in history}
    digits = next((count for count in range(2, 9) if len({round(epoch, count) for epoch in epochs}) == len(epochs)), 9)
    return lambda point: f"{point.epoch or 0.0:.{digits}f}".rstrip("0").rstrip(".")


def _some(points: Points) -> Points:
    """The points themselves, or every n-th from the last one back where a table of all would be too long."""
    stride = -(-len(points) // MAX_LINES)
    return {key: point for at, (key, point) in enumerate(points.items(), 1) if (len(points) - at) % max(stride, 1) == 0}


def _losses(record: Record, student: Points, baseline: Points) -> Table:
    """Training losses up to each point, with what the baseline's terms were beside them."""
    titles = term_titles(record, record.baseline) if record.baseline else term_titles(record)
    columns = [
        (term, points)
        for points in (student, baseline)
        for term in titles
        if any(point.loss.get(term) is not None for point in points.values())
    ]
    # With one term alone the weighted total is that term again.
    for points in (student, baseline):
        terms = [term for term, history in columns if history is points]
        if len(terms) == 2 and terms[0] == "total":
            columns.remove(("total", points))
    by_step = record.history_by == "step"
    first = ["Step", "Epochs"] if by_step else ["Epoch", "Steps"]
    head = [*first, "Tokens", "Time", *(titles[term] for term, _ in columns)]
    baseline_columns = sum(history is baseline for _, history in columns)
    groups = (
        [("", 4), ("Student", len(columns) - baseline_columns), ("Baseline", baseline_columns)]
        if baseline_columns
        else []
    )
    rows = [
        [
            key,
            f"{point.epoch or 0.0:.3g}" if by_step else number(point.step),
            short(point.tokens),
            time_of(point.seconds) or NONE,
            *(number(history[key].loss.get(term)) if key in history else NONE for term, history in columns),
        ]
        for key, point in student.items()
    ]
    return Table(head, rows if columns else [], title="Training loss", groups=groups)


def _measure(record: Record, measure: str, student: Points, baseline: Points) -> Table:
    """One measure at each point for each evaluation set, student and baseline side by side; the teacher's last."""
    columns = [
        (key, name, points)
        for key in record.sets_of(measure)
        for name, points in (("Student", student), ("Baseline", baseline))
        if any(point.score(measure, key) is not None for point in points.values())
    ]
    axis = record.history_by
    points = {**baseline, **student}
    ordered = sorted(points, key=lambda at: float((points[at].step if axis == "step" else points[at].epoch) or 0))
    rows = [
        [at, *(number(history[at].score(measure, key)) if at in history else NONE for key, _, history in columns)]
        for at in ordered
    ]
    rows = [row for row in rows if set(row[1:]) - {NONE}]
    kept = record.best.step if record.best else None
    rows = [[f"{at}, kept" if at in student and student[at].step == kept else at, *cells] for at, *cells in rows]
    # Its score is that of all sequences.
    is_whole = record.training.scored_sequences is None
    if rows and is_whole and record.teacher and record.teacher.scores.get(measure):
        # Once for each set: the first of its columns.
        keys = [key for key, _, _ in columns]
        cells = [number(record.teacher.score(measure, key)) for key in keys]
        firsts = [keys.index(key) == column for column, key in enumerate(keys)]
        rows.append(["Teacher", *(cell if first else "" for cell, first in zip(cells, firsts, strict=True))])
    labels = [record.label_of(key) for key, _, _ in columns]
    title = record.measures[measure].title
    if not baseline:
        return Table([axis.capitalize(), *labels], rows, title=title)
    groups = [("", 1), *((label, labels.count(label)) for label in dict.fromkeys(labels))]
    return Table([axis.capitalize(), *(name for _, name, _ in columns)], rows, title=title, groups=groups)
