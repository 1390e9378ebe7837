"""The numbers of a run by their names, by which runs are compared, ordered and searched."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from distill.config.settings import TrainConfig
from distill.report import summary
from distill.report.words import is_number, number, percent
from distill.runs.facts import Best
from distill.runs.record import Record
from distill.runtime.errors import SettingError, did_you_mean
from distill.runtime.progress import in_a_sentence

GAP_CLOSED = "gap_closed"


@dataclass(frozen=True)
class Number:
    """One number of a run, and what heads its column in a comparison.

    Attributes:
        name: as the setting `optimize` takes it, such as `heldout.perplexity`.
        group: title of the measure, the first part of the heading.
        label: title of the evaluation set, the second part of the heading; may be empty.
        value: finite; None where the run has none.
        measure: key of the measure in the record; empty for costs and losses.
        data: name of the evaluation set; empty for costs and losses.
    """

    name: str
    group: str
    label: str = ""
    lower_is_better: bool = True
    value: float | None = field(default=None, compare=False)
    form: Callable[[Any], str] = field(default=number, compare=False)
    measure: str = ""
    data: str = ""

    @property
    def title(self) -> str:
        """The whole heading, for a line of text."""
        return f"{self.group}, {self.label}" if self.label else self.group


def _score(key: str, measure: Any, data: str, label: str, value: float | None = None) -> Number:
    """`measure`: with its title and direction."""
    return Number(f"{data}.{key}", measure.title, label, measure.lower_is_better, value, number, key, data)


def _agreement(key: str, data: str, label: str, value: float | None = None) -> Number:
    title, form = summary.AGREEMENT[key]
    return Number(f"{data}.{key}", title, label, key == "kl", value, form, key, data)


def _closed(first: Any, data: str, label: str, value: float | None = None) -> Number:
    title = f"{summary.GAP_CLOSED}, {in_a_sentence(first.title)}"
    return Number(f"{data}.{GAP_CLOSED}", title, label, False, value, percent, GAP_CLOSED, data)


def _others(record: Record, terms: Iterable[str]) -> list[Number]:
    """Size, speed and time, and the final losses of these terms."""
    student, training = record.student, record.training
    return [
        Number("parameters", "Parameters", value=student.parameters),
        Number("tokens_per_second", "Student, tokens/s", "", False, student.tokens_per_second),
        Number("training.tokens_per_second", "Training, tokens/s", "", False, training.tokens_per_second),
        Number("training.seconds", "Training, seconds", value=training.seconds),
        *(Number(f"loss.{term}", f"Loss {term}", value=training.final_loss.get(term)) for term in terms),
    ]


def numbers_of(record: Record) -> list[Number]:
    """Every measure of the student on every set, its agreement with the teacher, the gap closed, costs and losses."""
    first, described = record.first_measure
    found = [
        _score(name, measure, data, record.label_of(data), record.student.score(name, data))
        for name, measure in record.measures.items()
        for data in record.sets_of(name)
    ]
    found += [
        _agreement(key, data, record.label_of(data), value)
        for key in summary.AGREEMENT
        for data, agreement in (record.agreement or {}).items()
        if (value := getattr(agreement, key)) is not None
    ]
    for data in record.sets_of(first) if summary.has_gap(record) else ():
        closed = summary.closed_of(record, first, data)
        found.append(_closed(described, data, record.label_of(data), closed.fraction if closed else None))
    found += _others(record, record.training.final_loss)
    return [each if is_number(each.value) else replace(each, value=None) for each in found]


def number_named(name: str, numbers: list[Number], setting: str) -> Number:
    """Find a number by its name; the name of a measure alone means its first evaluation set.

    Raises:
        SettingError: there is none; names `setting` and the nearest names.
    """
    by_name = {each.name: each for each in reversed(numbers)}
    by_name |= {each.measure: each for each in reversed(numbers) if each.measure}
    if name not in by_name:
        names = [*dict.fromkeys(each.measure for each in numbers if each.measure), *(each.name for each in numbers)]
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
            problem = f"hydra.sweeper.direction={list(direction)}, but optimize={optimize} is one number"
            raise SettingError(f"{problem}: give minimize or maximize")
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
        numbers = [_score(measure.name, measure, data, data) for measure in measures for data in sets]
        numbers += [_agreement(key, data, data) for key in summary.AGREEMENT for data in sets if compares]
        numbers += [_closed(measure, data, data) for measure in measures[:1] for data in sets if has_gap]
        self._among([*numbers, *_others(Record(), ["total", *terms])])

    def value(self, record: Record) -> float | None:
        """The number in a record; None where this run has none, as of a perplexity that is infinite.

        A run that ended with its profile has no results yet.

        Raises:
            SettingError: no number has that name, or the search goes the wrong way.
        """
        return self._among(numbers_of(record)).value if record.finished else None

    def _among(self, numbers: list[Number]) -> Number:
        found = number_named(self.name, numbers, "optimize")
        better, best = ("minimize", "lowest") if found.lower_is_better else ("maximize", "highest")
        if self.direction not in (None, better):
            problem = f"hydra.sweeper.direction={self.direction}, but of optimize={self.name} the {best} is best"
            raise SettingError(f"{problem}: set hydra.sweeper.direction={better}")
        return found


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
    numbers = [_score(measure.name, measure, data, data) for measure in measures for data in sets]
    found = number_named(settings.keep_best, numbers, "train.keep_best")
    lower = found.lower_is_better
    return Best(measure=found.measure, data=found.data, lower_is_better=lower, patience=settings.patience)
