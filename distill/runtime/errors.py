"""Errors that a user can correct or that end a run on purpose; each carries its exit status."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
MAX_NAMES = 3  # names that are suggested for one that is not known


def printable(text: str) -> str:
    """`text` with control characters as escapes: what comes from a file begins no lines and commands no terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class SettingError(ValueError):
    """Bad input: the message is one line that names the setting, its value and the cure. Exit status 2.

    Args:
        problem: what is wrong; without the other arguments, the whole line.
        setting: the name as the command line has it, such as `train.steps`; "" where no single setting is at fault.
        value: what it was set to; left out where the value says nothing.
        cure: what to do, as an imperative.
        refusals: of several settings, in place of all the others: one line for them, with the fields of the first.
    """

    status = 2

    def __init__(
        self,
        problem: object = "",
        *,
        setting: str = "",
        value: object = None,
        cure: str = "",
        refusals: "Sequence[SettingError]" = (),
    ) -> None:
        subject = f"{setting}={value}" if setting and value is not None else setting
        line = "; ".join(filter(None, [": ".join(filter(None, [subject, str(problem)])), cure]))
        super().__init__(printable("; and ".join(dict.fromkeys(map(str, refusals))) or line))
        self.problem, self.refusals = problem, tuple(refusals)
        self.setting: str = refusals[0].setting if refusals else setting
        self.value: object = refusals[0].value if refusals else value
        self.cure: str = refusals[0].cure if refusals else cure

    def within(self, group: str) -> "SettingError":
        """The same error of a setting whose name begins with a dot, as one of this group: `.lr` is optimizer.lr."""
        if not self.setting.startswith("."):
            return self
        name = f"{group}{self.setting}".strip(".")
        return SettingError(self.problem, setting=name, value=self.value, cure=self.cure)


class Damaged(SettingError):
    """A file or folder of a run is not as it was written. Exit status 2 where nothing can stand in for it."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path} is damaged ({reason})")
        self.path, self.reason = Path(path), reason
        self._arguments = path, reason  # no Path keeps a URL as it is

    def __reduce__(self) -> tuple[type["Damaged"], tuple[Path | str, str]]:
        return type(self), self._arguments  # processes that prepare text send it to the one that started them


class Diverged(RuntimeError):
    """Training has diverged; the checkpoints before that are kept. Exit status 3."""

    status = 3


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run; the same command resumes it. Exit status 128 + its number. It is no Exception."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.status = 128 + signal_number


class RankLost(RuntimeError):
    """Another rank has ended or does not answer; that one reports why. Exit status 4."""

    status = 4


class StorageFailed(RuntimeError):
    """The disk is full, read-only, out of reach or broken; no finished file is lost. Exit status 74."""

    status = 74  # EX_IOERR of sysexits.h


class StageFailed(RuntimeError):
    """A stage of a chain has ended with another status than 0, which becomes that of the chain."""

    def __init__(self, stage: str, status: int) -> None:
        super().__init__(f"stage {stage} ended with status {status}; the same command resumes there")
        self.status = status if status > 0 else 128 - status


def raising_at_the_call(function: Callable[P, R]) -> Callable[P, R]:
    """Let a SettingError be raised at the caller's line, without our frames; DISTILL_TRACEBACK=1 keeps them."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except SettingError as error:
            if os.environ.get("DISTILL_TRACEBACK") == "1":
                raise
            raise error.with_traceback(None) from None

    return called


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class where the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def did_you_mean(name: object, options: Iterable[str], before: str = "") -> str:
    """The nearest options, `before` in front of each, as ` (did you mean bert?)`; empty where none is near."""
    names = {option.lower(): option for option in options}
    nearest = [before + names[key] for key in get_close_matches(str(name).lower(), names, MAX_NAMES)]
    return f" (did you mean {' or '.join(nearest)}?)" if nearest else ""


def choose(setting: str, value: str, options: Iterable[str]) -> None:
    """Raises SettingError where `value` is none of the options."""
    options = list(options)
    if value not in options:
        near = did_you_mean(value, options)
        raise SettingError(f"{setting}={value} is not known{near}: choose one of {', '.join(options)}")
