"""Which settings differ between runs, and which runs differ in their seed alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distill.report.comparison.runs import Run, natural

# Settings, or groups of them, that do not change the student.
OF_TRAIN = ("workers", "log_every", "keep", "save_every", "on_usr1")
OF_DATA = ("cache", "workers", "local", "local_bytes", "tokens", "shard_bytes")
IGNORED = ["resume", "optimize", "tracker", "profile", "report", "evaluate.baseline"]
IGNORED += [*(f"train.{name}" for name in OF_TRAIN), *(f"data.{name}" for name in OF_DATA)]
DIGESTS = ("corpus.digest", "teacher.digest")  # of the identity: two runs may name the same path and read other content
SEED = "seed"
ABSENT = "\u2013"  # stands for a setting that a run does not have


@dataclass
class Group:
    """Runs with the same settings but for their seed.

    Attributes:
        values: of the settings that differ between groups, by name.
    """

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


def shown(value: Any) -> str:
    """A value as it is in a table, and nearly as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return "null" if value is None else str(value)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """The runs that have a config.yaml, grouped by their settings, ordered by the values of those that differ."""
    configured = [run for run in runs if run.settings]
    names = differing(configured)
    by_values: dict[tuple[str, ...], Group] = {}
    for run in configured:
        values = {name: value_of(run, name) for name in names}
        key = tuple(map(repr, values.values()))
        by_values.setdefault(key, Group([], values)).runs.append(run)
    for group in by_values.values():
        group.runs.sort(key=lambda run: (natural(run.seed), natural(run.name)))
    return sorted(by_values.values(), key=lambda group: [_order(value) for value in group.values.values()])


def differing(runs: Sequence[Run]) -> list[str]:
    """The names of the settings that are not the same in all these runs, besides the seed.

    A setting that takes its value from another of the same name, as objective.soft.temperature does, is left out,
    and a digest counts only where it distinguishes runs that no setting does.
    """
    present = dict.fromkeys(name for run in runs for name in run.settings if name != SEED and not _is_ignored(name))
    names = [name for name in present if len({repr(value_of(run, name)) for run in runs}) > 1]
    names = [name for name in names if not any(_follows(name, other, runs) for other in names)]
    finished = [run for run in runs if run.record is not None]
    for digest in DIGESTS:
        by_settings: dict[tuple[str, ...], set[str]] = {}
        for run in finished:
            key = tuple(repr(value_of(run, name)) for name in names)
            by_settings.setdefault(key, set()).add(repr(value_of(run, digest)))
        if any(len(digests) > 1 for digests in by_settings.values()):
            names.append(digest)
    return names


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
        return ABSENT if digest is None else str(digest)[:8]
    return run.settings.get(name, ABSENT)


def _is_ignored(name: str) -> bool:
    return any(name == ignored or name.startswith(f"{ignored}.") for ignored in IGNORED)


def _order(value: Any) -> tuple[int, float, list[Any]]:
    """To sort by: no value, numbers, then everything else as text."""
    if value is None or value == ABSENT:
        return 0, 0.0, []
    if isinstance(value, int | float):
        return 1, float(value), []
    return 2, 0.0, natural(value)
