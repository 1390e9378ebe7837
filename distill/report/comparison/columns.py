"""The numbers that runs are compared by: names, readers and directions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distill.report import gap
from distill.report.summary import AGREEMENT
from distill.report.words import is_number, number, percent
from distill.runs.facts import Model
from distill.runs.record import Record
from distill.runtime.errors import SettingError, did_you_mean
from distill.runtime.progress import in_a_sentence

# Measures that belong to one vocabulary: another one has other tokens to predict.
OF_VOCABULARY = ("perplexity", "pseudo_perplexity")
GAP_CLOSED = "gap_closed"


@dataclass(frozen=True)
class Column:
    """One number of a run, as a column of the comparison.

    Attributes:
        name: as the setting `optimize` takes it, such as `heldout.perplexity`.
        group: title of the measure, the first part of the heading.
        label: title of the evaluation set, the second part of the heading; may be empty.
        read: reads the number from a record.
        measure: key of the measure in the record; empty for costs and losses.
        data: name of the evaluation set; empty for costs and losses.
        scores_a_model: whether the teacher and the baseline may have such a number, too.
    """

    name: str
    group: str
    label: str
    read: Callable[[Record], Any] = field(compare=False)
    lower_is_better: bool
    form: Callable[[Any], str] = field(default=number, compare=False)
    measure: str = ""
    data: str = ""
    scores_a_model: bool = False

    @property
    def title(self) -> str:
        """The whole heading, for a line of text or a panel of a figure."""
        return f"{self.group}, {self.label}" if self.label else self.group

    def value(self, record: Record) -> float | None:
        """The number of this run; None where its record has none."""
        value = self.read(record)
        return value if is_number(value) else None

    def of_model(self, model: Model | None) -> float | None:
        """The number of the teacher or the baseline; None where that model has none."""
        return model.score(self.measure, self.data) if model and self.scores_a_model else None


COSTS = (
    Column("parameters", "Parameters", "", lambda record: (record.student or Model()).parameters, True),
    Column(
        "tokens_per_second",
        "Student, tokens/s",
        "",
        lambda record: (record.student or Model()).tokens_per_second,
        False,
    ),
    Column(
        "training.tokens_per_second", "Training, tokens/s", "", lambda record: record.training.tokens_per_second, False
    ),
    Column("training.seconds", "Training, seconds", "", lambda record: record.training.seconds, True),
)


def scores_of(record: Record) -> list[Column]:
    """Columns for the student's scores: every measure on every set, then its agreement with the teacher.

    Beside a baseline the fraction of the gap that is closed follows, by the first measure.
    """
    columns = []
    for name, measure in record.measures.items():
        for data in record.sets_of(name):
            read = partial(_score, name, data)
            label, lower = record.label_of(data), measure.lower_is_better
            columns.append(Column(f"{data}.{name}", measure.title, label, read, lower, number, name, data, True))
    for key, (title, form) in AGREEMENT.items():
        for data, agreement in (record.agreement or {}).items():
            if getattr(agreement, key) is not None:
                read = partial(_agreement, key, data)
                columns.append(
                    Column(f"{data}.{key}", title, record.label_of(data), read, key == "kl", form, key, data)
                )
    first, measure = record.first_measure
    for data in record.sets_of(first) if gap.has_gap(record) else ():
        title, label, read = (
            f"{gap.TITLE}, {in_a_sentence(measure.title)}",
            record.label_of(data),
            partial(_closed, data),
        )
        columns.append(Column(f"{data}.{GAP_CLOSED}", title, label, read, False, percent, GAP_CLOSED, data))
    return columns


def _closed(data: str, record: Record) -> float | None:
    closed = gap.closed_of(record, record.first_measure[0], data)
    return closed.fraction if closed else None


def _score(measure: str, data: str, record: Record) -> float | None:
    return record.student.score(measure, data) if record.student else None


def _agreement(key: str, data: str, record: Record) -> float | None:
    return getattr((record.agreement or {}).get(data), key, None)


def _loss(term: str, record: Record) -> float | None:
    return record.training.final_loss.get(term)


def columns_of(record: Record) -> list[Column]:
    """All columns of a run: scores, costs and final losses."""
    losses = [
        Column(f"loss.{term}", f"Loss {term}", "", partial(_loss, term), True) for term in record.training.final_loss
    ]
    return [*scores_of(record), *COSTS, *losses]


def column_named(name: str, columns: list[Column], setting: str) -> Column:
    """Find a column by its name; the name of a measure alone means its first evaluation set.

    Raises:
        SettingError: there is none; names `setting` and the nearest names.
    """
    by_name = {column.name: column for column in reversed(columns)}
    by_name |= {column.measure: column for column in reversed(columns) if column.measure}
    if name not in by_name:
        names = [*dict.fromkeys(column.measure for column in columns if column.measure)]
        names += [column.name for column in columns]
        nearest = did_you_mean(name, names)
        raise SettingError(f"{setting}={name} is not a number of this run{nearest}: choose one of {', '.join(names)}")
    return by_name[name]
