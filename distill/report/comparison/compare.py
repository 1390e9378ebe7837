"""Runs laid side by side: the settings that differ, the numbers of each run, and which of these can be compared."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distill.report.comparison.columns import COSTS, GAP_CLOSED, SPEED, Column, column_named, columns_of, scores_of
from distill.report.comparison.runs import Run, natural
from distill.report.summary import AGREEMENT
from distill.report.words import NONE
from distill.runs.facts import Baseline, EvaluationSet
from distill.runs.record import Record

if TYPE_CHECKING:
    import pandas as pd

# Settings, or groups of them, that do not change the student.
IGNORED = ["resume", "optimize", "tracker", "profile", "report", "evaluate.baseline"]
IGNORED += [f"train.{name}" for name in ("workers", "log_every", "keep", "save_every", "on_usr1")]
IGNORED += [f"data.{name}" for name in ("cache", "workers", "local", "local_bytes", "tokens")]
DIGESTS = ("corpus.digest", "teacher.digest")  # of the identity: two runs may name the same path and read other content
SEED = "seed"
UNEVEN = 1.25  # times by which speeds of one model differ where a machine had other work
OF_VOCABULARY = ("perplexity", "pseudo_perplexity")  # measures of tokens: another vocabulary has others to predict
OF_TEXT = ("bits_per_byte", "order_accuracy", GAP_CLOSED)  # measures of a text that no vocabulary changes
OF_CONTEXT = ("perplexity", "bits_per_byte")  # measures of a text, whose tokens have more before them at a small stride


@dataclass
class Group:
    """Runs with the same settings but for their seed; `values`: of the settings that differ between groups."""

    runs: list[Run]
    values: dict[str, Any]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.record is not None]

    @property
    def repeats(self) -> str:
        """What its runs differ in: their seeds, or nothing."""
        return "seeds" if len({run.seed for run in self.finished}) == len(self.finished) else "runs"

    @property
    def label(self) -> str:
        """The settings that distinguish it from the other groups."""
        return ", ".join(f"{name}={shown(value)}" for name, value in self.values.items()) or self.runs[0].name


class Comparison:
    """Runs, the groups that they make, and their numbers.

    Attributes:
        names: of the settings that differ.
        groups: in the order of these settings' values, or by a number, best first.
        columns: the scores, each with the runs that have it.
        costs: size, speed and time.
        apart: by name of a column the folders of the runs whose number cannot be compared with the others.
        reasons: why there are such.
        uneven: folders of runs whose model was faster or slower in another run.
    """

    def __init__(self, runs: Sequence[Run], first: str | None = None, setting: str = "by") -> None:
        """
        Args:
            first: name of the number to begin with, and to order the groups by, best first.
            setting: what an error line calls it.

        Raises:
            SettingError: no number has that name.
        """
        self.runs = [*runs]
        configured = [run for run in runs if run.settings]
        self.names = differing(configured)
        self.groups = _grouped(configured, self.names)
        records = self.records
        columns = {column.name: column for record in reversed(records) for column in reversed(scores_of(record))}
        # Measures in the order of their first run, and the sets of each together.
        order = list(dict.fromkeys(column.group for column in reversed(columns.values())))
        self.columns = sorted(reversed(columns.values()), key=lambda column: order.index(column.group))
        self.costs = [column for column in COSTS if any(column.value(record) is not None for record in records)]
        self.apart, self.reasons = dict[str, set[Any]](), list[str]()
        for column in self.columns:
            self._separate(column)
        self.uneven = self._uneven()
        if first is not None and records:
            by_name = {column.name: column for record in records for column in columns_of(record)} | columns
            chosen = column_named(first, list(by_name.values()), setting)
            self.columns.sort(key=lambda other: other.name != chosen.name)
            ranked = [group for group, _ in self.best(chosen)]
            self.groups.sort(key=lambda group: ranked.index(group) if group in ranked else len(ranked))

    @property
    def records(self) -> list[Record]:
        """Of the finished runs."""
        return [run.record for run in self.runs if run.record is not None]

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """A row for each run: folder, status, seed, the settings that differ, every number; None for what it lacks."""
        import pandas as pd

        numbers = dict.fromkeys(column.name for record in self.records for column in columns_of(record))
        of_group = {id(run): group.values for group in self.groups for run in group.runs}
        rows = [
            {"run": run.name, "status": run.status, SEED: run.seed}
            | {name: of_group.get(id(run), {}).get(name) for name in self.names}
            | dict.fromkeys(numbers)
            | ({column.name: column.value(run.record) for column in columns_of(run.record)} if run.record else {})
            for run in self.runs
        ]
        return pd.DataFrame(rows, columns=["run", "status", SEED, *self.names, *numbers], dtype=object)

    def values(self, group: Group, column: Column, apart: bool = False) -> "pd.Series":
        """The numbers of a group's runs by seed, of those that can be compared, or of those `apart`."""
        import pandas as pd

        folders = self.apart.get(column.name, set())
        runs = [run for run in group.finished if (run.folder in folders) == apart]
        numbers = [column.value(run.record) if run.record else None for run in runs]
        return pd.Series(numbers, index=[str(run.seed) for run in runs], dtype=float).dropna()

    def best(self, column: Column) -> list[tuple[Group, "pd.Series"]]:
        """The groups with numbers that can be compared, best mean first."""
        ranked = [(group, values) for group in self.groups if len(values := self.values(group, column))]
        return sorted(ranked, key=lambda pair: pair[1].mean(), reverse=not column.lower_is_better)

    def _separate(self, column: Column) -> None:
        """Set the runs apart whose number of this column was measured on something else than in most runs."""
        bases = {
            run.folder: basis(run, run.record, column)
            for run in self.runs
            if run.record is not None and column.value(run.record) is not None
        }
        counts = Counter(map(repr, bases.values()))
        if len(counts) > 1:
            (most, _), *_ = counts.most_common(1)
            self.apart[column.name] = {folder for folder, of in bases.items() if repr(of) != most}
            usual = next(of for of in bases.values() if repr(of) == most)
            others = [reason for of in bases.values() for reason in of if of[reason] != usual[reason]]
            self.reasons += [reason for reason in usual if reason in others and reason not in self.reasons]

    def _uneven(self) -> set[Any]:
        """The runs of one model on one kind of machine whose speeds differ by more than `UNEVEN`."""
        by_model: dict[tuple[Any, ...], dict[Any, float]] = {}
        for run in self.runs:
            if run.record is not None and (speed := SPEED.value(run.record)) is not None:
                student, machine = run.record.student, run.record.environment
                model = (student.name, student.parameters, student.bytes)
                where = (machine.device, machine.cpu_count, run.record.precision.get("evaluate"))
                by_model.setdefault((*model, *where), {})[run.folder] = speed
        unlike = (speeds for speeds in by_model.values() if max(speeds.values()) > UNEVEN * min(speeds.values()))
        return {folder for speeds in unlike for folder in speeds}


def basis(run: Run, record: Record, column: Column) -> dict[str, Any]:
    """What a number rests on besides the model; two numbers of which it is the same can be compared."""
    of_teacher = column.measure in (*AGREEMENT, GAP_CLOSED) or column.measure.endswith("_loss")
    ends = ("digest", "members", "weight")  # and not the cache: the report scores the teacher itself
    names = [name for name in record.identity if name.startswith("teacher.") and name.endswith(ends)]
    return {
        "the evaluation set, or how it is cut into tokens": _scored(run, record, column),
        "the teacher": [(name, record.identity[name]) for name in sorted(names)] if of_teacher else None,
        "the baseline": _baseline(run, record) if column.measure == GAP_CLOSED else None,
        "evaluate.stride": run.settings.get("evaluate.stride") if column.measure in OF_CONTEXT else None,
    }


def _scored(run: Run, record: Record, column: Column) -> list[Any]:
    """What was scored: of measures of tokens these by their digest, of measures of a text or of examples its source."""
    data, measure = record.evaluation.get(column.data) or EvaluationSet(), column.measure
    is_text = any(name in record.measures for name in OF_VOCABULARY)
    if measure in (*OF_VOCABULARY, *AGREEMENT) or (is_text and measure not in OF_TEXT):
        return [data.digest, data.pseudo_positions if measure == "pseudo_perplexity" else None]
    scored: list[Any] = [data.description, data.documents]
    everywhere = run.settings.get("evaluate.max_sequences")
    limit = run.settings.get(f"evaluate.by_set.{column.data}.max_sequences", everywhere)
    if limit is not None and (data.sequences or 0) >= limit:
        # Another vocabulary cuts a text into other sequences, so that as many of them are other passages.
        scored += [data.sequences, data.digest if is_text else None]
    kind = run.settings.get(f"evaluate.sources.{column.data}.kind", column.data.partition("_")[0])
    return [*scored, record.corpus.name, record.corpus.documents] if kind == "heldout" else scored


def _baseline(run: Run, record: Record) -> list[Any]:
    """What a baseline learned by; its seed is the student's."""
    baseline = record.baseline or Baseline()
    rate = baseline.learning_rate if baseline.learning_rate is not None else run.settings.get("optimizer.lr")
    ends = [run.settings.get(name) for name in ("train.minutes", "train.patience")]  # whatever steps that gives
    return [baseline.steps if ends == [None, None] else ends, rate, baseline.remarks]


def differing(runs: Sequence[Run]) -> list[str]:
    """The names of the settings that are not the same in all these runs, besides the seed.

    A setting that takes its value from another of the same name, as objective.soft.temperature does, is left out,
    and a digest counts only where it distinguishes runs that no setting does.
    """
    present = dict.fromkeys(name for run in runs for name in run.settings if name != SEED and not _is_ignored(name))
    names = [name for name in present if len({repr(value_of(run, name)) for run in runs}) > 1]
    names = [name for name in names if not any(_follows(name, other, runs) for other in names)]
    for digest in DIGESTS:
        found = {
            tuple(repr(value_of(run, name)) for name in (*names, digest)) for run in runs if run.record is not None
        }
        if len({key[:-1] for key in found}) < len(found):
            names.append(digest)
    return names


def _is_ignored(name: str) -> bool:
    return any(name == ignored or name.startswith(f"{ignored}.") for ignored in IGNORED)


def _follows(name: str, other: str, runs: Sequence[Run]) -> bool:
    """Whether a setting has the value of another one further up that is called the same, in every run."""
    (*within, last), (*above, same) = name.split("."), other.split(".")
    if last != same or len(above) >= len(within):
        return False
    return all(repr(value_of(run, name)) == repr(value_of(run, other)) for run in runs)


def value_of(run: Run, name: str) -> Any:
    """A setting of a run, or one of `DIGESTS` in short; a dash where it has none."""
    if name in DIGESTS:
        digest = run.record.identity.get(name) if run.record else None
        return NONE if digest is None else str(digest)[:8]
    return run.settings.get(name, NONE)


def _grouped(runs: Sequence[Run], names: Sequence[str]) -> list[Group]:
    """The runs by the values of these settings, ordered by them."""
    groups: dict[str, Group] = {}
    for run in sorted(runs, key=lambda run: (natural(run.seed), natural(run.name))):
        values = {name: value_of(run, name) for name in names}
        groups.setdefault(repr(values), Group([], values)).runs.append(run)
    return sorted(groups.values(), key=lambda group: [_order(value) for value in group.values.values()])


def _order(value: Any) -> tuple[int, float, list[Any]]:
    """To sort by: no value, numbers, then everything else as text."""
    if value is None or value == NONE:
        return 0, 0.0, []
    return (1, float(value), []) if isinstance(value, int | float) else (2, 0.0, natural(value))


def shown(value: Any) -> str:
    """A value as it is in a table, and nearly as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else "null" if value is None else str(value)
