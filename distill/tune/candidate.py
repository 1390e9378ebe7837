"""A change of settings that may be tried, and which settings that may be."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

from distill.runs.identity import RESUME_IGNORES, SETTINGS_IGNORED
from distill.runtime.errors import SettingError

# Groups that stand in a run's identity by a digest; of these, the settings that do not reach what is digested.
DIGESTED = {"corpus": ("cache", "local", "workers"), "teacher": ("micro_batches",)}


@dataclass
class Candidate:
    """One change.

    Attributes:
        name: in the table.
        change: settings with their new values, by the names of the command line.
        predicted: how many times as fast the run would be; None where nothing predicts it.
        reason: what that comes from, or why it is tried.
        then: makes the next candidate of the seconds of a step before this one and with it; None: there is none.
    """

    name: str
    change: dict[str, Any] = field(default_factory=dict)
    predicted: float | None = None
    reason: str = ""
    then: Callable[[float, float], Optional["Candidate"]] | None = None

    def __post_init__(self) -> None:
        for setting, value in self.change.items():
            if not keeps_student(setting, value):
                raise SettingError(f"{setting} changes the student: it is nothing to tune")

    @property
    def overrides(self) -> list[str]:
        """The change as arguments of a command."""
        return [f"{name}={'null' if value is None else value}" for name, value in self.change.items()]


def keeps_student(setting: str, value: Any = None) -> bool:
    """Whether a setting stands outside of a run's identity, so that its student stays the same, but for rounding.

    That is decided by the lists of `distill.runs.identity` that also decide with which settings a run may be resumed.
    The rows of a micro-batch and their accumulation are among these, because a run is known by their product; the
    trials compare the whole identity, so that a change of one alone is found. Of the number formats int8 stands in it.
    """
    group, _, rest = setting.partition(".")
    if group in DIGESTED:
        return rest in DIGESTED[group]
    return setting in SETTINGS_IGNORED or (
        group in RESUME_IGNORES and (setting, value) != ("precision.teacher", "int8")
    )
