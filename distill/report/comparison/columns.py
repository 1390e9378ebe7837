"""The numbers that runs are compared, ordered and searched by: names, readers and directions."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from distill.config.settings import TrainConfig
from distill.report import gap
from distill.report.summary import AGREEMENT
from distill.report.words import is_number, number, percent
from distill.runs.facts import Best
from distill.runs.record import Record
from distill.runtime.errors import SettingError, did_you_mean
from distill.runtime.progress import in_a_sentence

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
    """

    name: str
    group: str
    label: str
    lower_is_better: bool
    read: Callable[[Record], Any] = field(compare=False)
    form: Callable[[Any], str] = field(default=number, compare=False)
    measure: str = ""
    data: str = ""

    @property
    def title(self) -> str:
        """The whole heading, for a line of text."""
        return f"{self.group}, {self.label}" if self.label else self.group

    def value(self, record: Record) -> float | None:
        """The number of this run; None where its record has none."""
        value = self.read(record)
        return value if is_number(value) else None


def _of_student(name: str) -> Callable[[Record], Any]:
    return lambda record: getattr(record.student, name)


SPEED = Column("tokens_per_second", "Student, tokens/s", "", False, _of_student("tokens_per_second"))
COSTS = (
    Column("parameters", "Parameters", "", True, _of_student("parameters")),
    SPEED,
    Column("training.tokens_per_second", "Training, tokens/s", "", False, lambda run: run.training.tokens_per_second),
    Column("training.seconds", "Training, seconds", "", True, lambda run: run.training.seconds),
)


def scores_of(record: Record) -> list[Column]:
    """Columns for the student's scores: every measure on every set, then its agreement with the teacher.

    Beside a baseline the fraction of the gap that is closed follows, by the first measure.
    """
    first, first_measure = record.first_measure
    columns = [
        _score(name, measure, data, record.label_of(data))
        for name, measure in record.measures.items()
        for data in record.sets_of(name)
    ]
    columns += [
        _agreement(key, data, record.label_of(data))
        for key in AGREEMENT
        for data, agreement in (record.agreement or {}).items()
        if getattr(agreement, key) is not None
    ]
    return columns + [
        _closed(first_measure, data, record.label_of(data))
        for data in (record.sets_of(first) if gap.has_gap(record) else ())
    ]


def _score(key: str, measure: Any, data: str, label: str) -> Column:
    """`measure`: with its title and direction."""
    read = lambda record: record.student.score(key, data)  # noqa: E731
    return Column(f"{data}.{key}", measure.title, label, measure.lower_is_better, read, number, key, data)


def _agreement(key: str, data: str, label: str) -> Column:
    title, form = AGREEMENT[key]
    read = lambda record: getattr((record.agreement or {}).get(data), key, None)  # noqa: E731
    return Column(f"{data}.{key}", title, label, key == "kl", read, form, key, data)


def _closed(first: Any, data: str, label: str) -> Column:
    title = f"{gap.TITLE}, {in_a_sentence(first.title)}"
    read = lambda record: getattr(gap.closed_of(record, record.first_measure[0], data), "fraction", None)  # noqa: E731
    return Column(f"{data}.{GAP_CLOSED}", title, label, False, read, percent, GAP_CLOSED, data)


def _loss(term: str) -> Column:
    return Column(f"loss.{term}", f"Loss {term}", "", True, lambda record: record.training.final_loss.get(term))


def columns_of(record: Record) -> list[Column]:
    """All columns of a run: scores, costs and final losses."""
    return [*scores_of(record), *COSTS, *map(_loss, record.training.final_loss)]


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


@dataclass(frozen=True)
class Goal:
    """`optimize=NAME`: the number that a sweep reports, or a search minimizes or maximizes (`direction`)."""

    name: str
    direction: str | None = None

    @classmethod
    def of(cls, optimize: Any, direction: Any = None) -> "Goal | None":
        """The goal that the setting names, or is already; None where it names none.

        Args:
            direction: of the search, a name or a member of an enum.

        Raises:
            SettingError: it is no name, or there are several directions.
        """
        if optimize is None or isinstance(optimize, cls):
            return optimize
        if not isinstance(optimize, str) or not optimize:
            raise SettingError(f"optimize={optimize} is not the name of a number: give one, for example perplexity")
        if isinstance(direction, list | tuple):
            raise SettingError(
                f"hydra.sweeper.direction={list(direction)}, but optimize={optimize} is one number: give minimize or "
                "maximize"
            )
        return cls(optimize, None if direction is None else str(getattr(direction, "name", direction)))

    def check(
        self, measures: Iterable[Any], sets: Iterable[str], terms: Iterable[str], compares: bool, has_gap: bool
    ) -> None:
        """Refuse a name that the results of a run will not have, before it is trained.

        Args:
            measures: with `name`, `title` and `lower_is_better`.
            sets: names of the evaluation sets.
            terms: names of the loss terms.
            compares: whether the student is compared with its teacher.
            has_gap: whether there are a teacher that is scored and a baseline.

        Raises:
            SettingError: no number has that name, or the search goes the wrong way.
        """
        measures, sets = list(measures), list(sets)
        columns = [_score(measure.name, measure, data, data) for measure in measures for data in sets]
        columns += [_agreement(key, data, data) for key in AGREEMENT for data in sets if compares]
        columns += [_closed(measure, data, data) for measure in measures[:1] for data in sets if has_gap]
        self._among([*columns, *COSTS, *map(_loss, ["total", *terms])])

    def value(self, record: Record) -> float | None:
        """The number in a record; None where this run has none, as of a perplexity that is infinite.

        A run that ended with its profile has no results yet.

        Raises:
            SettingError: no number has that name, or the search goes the wrong way.
        """
        return self._among(columns_of(record)).value(record) if record.finished else None

    def _among(self, columns: list[Column]) -> Column:
        column = column_named(self.name, columns, "optimize")
        better = "minimize" if column.lower_is_better else "maximize"
        if self.direction not in (None, better):
            raise SettingError(
                f"hydra.sweeper.direction={self.direction}, but of optimize={self.name} the "
                f"{'lowest' if column.lower_is_better else 'highest'} is best: set hydra.sweeper.direction={better}"
            )
        return column


def choose_best(settings: TrainConfig, measures: Iterable[Any], sets: Iterable[str]) -> Best | None:
    """By which measure of which set the best student is chosen, as `train.keep_best` names them; None: the last one is.

    Args:
        measures, sets: as `Goal.check` takes them.

    Raises:
        SettingError: no measure has that name.
    """
    if settings.keep_best is None:
        return None
    sets = list(sets)
    columns = [_score(measure.name, measure, data, data) for measure in measures for data in sets]
    column = column_named(settings.keep_best, columns, "train.keep_best")
    return Best(
        measure=column.measure,
        data=column.data,
        lower_is_better=column.lower_is_better,
        patience=settings.patience,
    )
