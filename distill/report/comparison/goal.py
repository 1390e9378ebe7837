"""`optimize=NAME`: the number of a run's results that a sweep reports or a search optimizes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from distill.config.settings import TrainConfig
from distill.report.comparison.columns import Column, column_named, columns_of, scores_of
from distill.runs.against_baseline import GapClosed
from distill.runs.facts import Agreement, Baseline, Best, Measure, Student, Training
from distill.runs.record import Record
from distill.runtime.errors import SettingError


@dataclass(frozen=True)
class Goal:
    """A number by its name, and what a search does with it: `minimize`, `maximize`, or None without a search."""

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
        closed = {measure.name: {name: GapClosed(0.0) for name in sets} for measure in measures[:1]}
        self._column(
            replace(
                _scored(measures, sets),
                baseline=Baseline(gap_closed=closed) if has_gap else None,
                agreement={name: Agreement(0.0, 0.0) for name in sets} if compares else None,
                training=Training(final_loss=dict.fromkeys(["total", *terms], 0.0)),
            )
        )

    def value(self, record: Record) -> float | None:
        """The number in a record; None where this run has none, as of a perplexity that is infinite.

        A run that ended with its profile has no results yet.

        Raises:
            SettingError: no number has that name, or the search goes the wrong way.
        """
        return self._column(record).value(record) if record.finished else None

    def _column(self, record: Record) -> Column:
        column = column_named(self.name, columns_of(record), "optimize")
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
    column = column_named(settings.keep_best, scores_of(_scored(measures, sets)), "train.keep_best")
    return Best(column.measure, column.data, column.lower_is_better, settings.patience)


def _scored(measures: Iterable[Any], sets: Iterable[str]) -> Record:
    """A record with scores of these measures on these sets."""
    measures, sets = list(measures), list(sets)
    return Record(
        measures={measure.name: Measure(measure.title, "", measure.lower_is_better) for measure in measures},
        student=Student(scores={measure.name: dict.fromkeys(sets, 0.0) for measure in measures}),
    )
