"""Groups of runs against columns of numbers, and which of these numbers can be compared with each other."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from distill.report.comparison.columns import (
    COSTS,
    GAP_CLOSED,
    OF_VOCABULARY,
    Column,
    column_named,
    columns_of,
    scores_of,
)
from distill.report.comparison.groups import Group, group_runs
from distill.report.comparison.runs import Run
from distill.report.summary import AGREEMENT
from distill.runs.facts import Baseline, EvaluationSet, Student
from distill.runs.record import Record

MARKS = (
    "",
    "†",
    "‡",
    "§",
    "¶",
)  # of numbers that cannot be compared with those of another mark; the last: of any others
REASONS = (
    "the vocabulary of the student",
    "the evaluation set",
    "the teacher",
    "the baseline",
    "evaluate.stride",
)
SPEED = next(column for column in COSTS if column.name == "tokens_per_second")
UNEVEN, UNEVEN_MARK = 1.25, "*"  # times by which speeds of one model differ, and what marks them
OF_TEACHERS = re.compile(r"teacher\.(digest|members|members\.\w+\.(digest|weight))")
KIND = re.compile(r"evaluate\.sources\.\w+\.kind")
OF_TEXT = ("bits_per_byte", "order_accuracy", GAP_CLOSED)  # measures of a text that no vocabulary changes
OF_CONTEXT = ("perplexity", "bits_per_byte")  # measures of a text, whose tokens have more before them at a small stride


@dataclass
class Comparison:
    """What is to be shown.

    Attributes:
        columns: of scores.
        marks: by name of a column: the mark of each run, by its folder, whose number cannot be compared with the
            unmarked ones.
        reasons: why there are marks.
    """

    runs: list[Run]
    groups: list[Group]
    columns: list[Column]
    costs: list[Column]
    marks: dict[str, dict[str, str]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.record is not None]

    @property
    def names(self) -> list[str]:
        """Of the settings that differ."""
        return [name for group in self.groups[:1] for name in group.values]

    def values(self, group: Group, column: Column, mark: str | None = "") -> list[float]:
        """The numbers of a group's runs, in the order of their seeds; of those with this mark alone (None: of all)."""
        marks = self.marks.get(column.name, {})
        values = [
            column.value(run.record)
            for run in group.runs
            if run.record is not None and (mark is None or marks.get(str(run.folder), "") == mark)
        ]
        return [value for value in values if value is not None]

    def by_seed(self, group: Group, column: Column) -> dict[Any, float]:
        """The numbers of a group's runs by seed, of those that can be compared."""
        marks = self.marks.get(column.name, {})
        runs = [(run, column.value(run.record)) for run in group.runs if run.record is not None]
        return {run.seed: value for run, value in runs if value is not None and not marks.get(str(run.folder), "")}

    def marks_of(self, group: Group, column: Column) -> list[str]:
        """The marks of a group's numbers; groups have the same settings, and so nearly always one mark."""
        marks = self.marks.get(column.name, {})
        return [*dict.fromkeys(marks.get(str(run.folder), "") for run in group.finished)]

    def best(self, column: Column) -> list[tuple[Group, list[float]]]:
        """The groups with numbers that can be compared, best mean first."""
        ranked = [(group, values) for group in self.groups if (values := self.values(group, column))]
        return sorted(ranked, key=lambda pair: fmean(pair[1]), reverse=not column.lower_is_better)


def compare(runs: Sequence[Run], first: str | None = None, setting: str = "by") -> Comparison:
    """Lay runs side by side.

    Args:
        first: name of the number to begin with, and to order the groups by, best first.
        setting: what an error line calls it.

    Raises:
        SettingError: no number has that name.
    """
    records = [run.record for run in runs if run.record is not None]
    columns: dict[str, Column] = {}
    for record in records:
        for column in scores_of(record):
            columns.setdefault(column.name, column)
    # Measures in the order of their first run, and the sets of each together.
    groups = list(dict.fromkeys(column.group for column in columns.values()))
    ordered = sorted(columns.values(), key=lambda column: groups.index(column.group))
    costs = [column for column in COSTS if any(column.value(record) is not None for record in records)]
    comparison = Comparison(list(runs), group_runs(runs), ordered, costs)
    for column in ordered:
        _mark(comparison, column)
    _mark_speeds(comparison)
    if first is not None and records:
        by_name = {column.name: column for record in records for column in columns_of(record)} | columns
        column = column_named(first, list(by_name.values()), setting)
        ordered.sort(key=lambda other: other.name != column.name)
        ranked = [group for group, _ in comparison.best(column)]
        comparison.groups.sort(key=lambda group: ranked.index(group) if group in ranked else len(ranked))
    return comparison


def _mark(comparison: Comparison, column: Column) -> None:
    """Mark the runs whose number of this column was measured on something else than in the majority of runs."""
    bases = {
        str(run.folder): _basis(run, run.record, column)
        for run in comparison.finished
        if run.record is not None and column.value(run.record) is not None
    }
    counts = Counter(bases.values())
    if len(counts) < 2:
        return
    ranked = [basis for basis, _ in counts.most_common()]
    comparison.marks[column.name] = {
        folder: MARKS[min(ranked.index(basis), len(MARKS) - 1)] for folder, basis in bases.items()
    }
    for number, reason in enumerate(REASONS):
        if len({basis[number] for basis in counts}) > 1 and reason not in comparison.reasons:
            comparison.reasons.append(reason)


def _mark_speeds(comparison: Comparison) -> None:
    """Mark the speeds of one model on one kind of machine that differ by more than `UNEVEN`, as a busy machine's do."""
    by_model: dict[tuple[Any, ...], dict[str, float]] = {}
    for run in comparison.finished:
        if run.record is None or (speed := SPEED.value(run.record)) is None:
            continue
        student, machine = run.record.student or Student(), run.record.environment
        where = machine.device, machine.cpu_count, run.record.precision.get("evaluate")
        key = (student.name, student.parameters, student.bytes, *where)
        by_model.setdefault(key, {})[str(run.folder)] = speed
    for speeds in by_model.values():
        if max(speeds.values()) > UNEVEN * min(speeds.values()):
            comparison.marks.setdefault(SPEED.name, {}).update(dict.fromkeys(speeds, UNEVEN_MARK))


def _basis(run: Run, record: Record, column: Column) -> tuple[str, ...]:
    """What a number rests on besides the model, one text for each of `REASONS`."""
    of_tokens = any(measure in record.measures for measure in OF_VOCABULARY) and column.measure not in OF_TEXT
    of_vocabulary = of_tokens or column.measure in (*OF_VOCABULARY, *AGREEMENT)
    of_teacher = column.measure in (*AGREEMENT, GAP_CLOSED) or column.measure.endswith("_loss")
    teachers = {name: digest for name, digest in record.identity.items() if OF_TEACHERS.fullmatch(name)}
    return (
        str(run.vocabulary) if of_vocabulary else "",
        repr(_scored(run, record, column, of_vocabulary)),
        repr(sorted(teachers.items())) if of_teacher else "",
        repr(_baseline(run, record)) if column.measure == GAP_CLOSED else "",
        str(run.settings.get("evaluate.stride")) if column.measure in OF_CONTEXT else "",
    )


def _scored(run: Run, record: Record, column: Column, of_vocabulary: bool) -> list[Any]:
    """The facts on the evaluation set that two numbers must share; tokens are those of one vocabulary."""
    data, corpus = record.evaluation.get(column.data) or EvaluationSet(), record.corpus
    facts: list[Any] = [data.description, data.documents]
    if of_vocabulary:
        pseudo = column.measure == "pseudo_perplexity"
        facts += [data.sequences, data.tokens, data.pseudo_positions if pseudo else data.positions]
    elif (sampled := _max_sequences(run, column.data)) is not None and (data.sequences or 0) >= sampled:
        # Another vocabulary cuts a text into other sequences, so that as many of them are other passages.
        is_text = any(measure in record.measures for measure in OF_VOCABULARY)
        facts += [data.sequences, *[str(run.vocabulary)] * is_text]
    kinds = {"heldout": "heldout"} | {
        name.split(".")[2]: kind for name, kind in run.settings.items() if KIND.fullmatch(name)
    }
    held_out = [name for name, kind in kinds.items() if kind == "heldout"]
    if any(column.data == name or column.data.startswith(f"{name}_") for name in held_out):  # documents of the corpus
        facts += [corpus.name, corpus.documents, *[corpus.tokens] * of_vocabulary]
    return facts


def _max_sequences(run: Run, data: str) -> Any:
    """How many sequences of a set are scored at most; None where all are."""
    everywhere = run.settings.get("evaluate.max_sequences")
    return run.settings.get(f"evaluate.by_set.{data}.max_sequences", everywhere)


def _baseline(run: Run, record: Record) -> list[Any]:
    """What a baseline learned by; its seed is the student's."""
    baseline = record.baseline or Baseline()
    rate = baseline.learning_rate if baseline.learning_rate is not None else run.settings.get("optimizer.lr")
    ends = [run.settings.get(name) for name in ("train.minutes", "train.patience")]  # whatever steps that gives
    return [baseline.steps if ends == [None, None] else ends, rate, baseline.remarks]
