"""One attack, the outcomes that it may have, and how the end of a command is assessed."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from benchmarks.attacks.ground import Ground

ENDING = "distill: "  # begins the one line that a refused command ends with
LONGEST_LINE = 2000  # characters that a reader of a terminal can bear


class Kind(StrEnum):
    """What came of an attack: the first three are as it should be, the others are problems."""

    FINISHED = "finished"  # status 0, and the same student or tokens as without the attack where the case demands it
    REFUSED = "refused"  # a documented status, one line that names the place and the cure, nothing left behind
    RESUMED = "resumed"  # a documented status, after which the same command finished with the same bits
    TRACEBACK = "traceback"
    SILENT = "silent"  # status 0 with another result
    HANG = "hang"
    WRONG_STATUS = "wrong status"  # or a message that is no line, or names nothing
    ORPHANS = "orphans"
    LEFTOVERS = "leftovers"


GOOD = (Kind.FINISHED, Kind.REFUSED, Kind.RESUMED)


class Outcome(NamedTuple):
    """Of one case."""

    kind: Kind
    detail: str = ""


@dataclass(frozen=True)
class Case:
    """An attack with a name that is the only one of its subject; the attack assesses what it has done."""

    subject: str
    name: str
    attack: "Callable[[Ground], Outcome]"


class Ended(NamedTuple):
    """A command that has ended."""

    status: int | None  # None: it did not end by itself
    output: str
    errors: str
    orphans: int  # processes of its session that were alive afterwards

    @property
    def refusal(self) -> str:
        """The last line of standard error."""
        return (self.errors.strip().splitlines() or [""])[-1]


def problem_of(ended: Ended, statuses: Collection[int]) -> Outcome | None:
    """What is wrong with the end of a command, whatever it has written; None: nothing."""
    tail = ended.errors[-3000:]
    if ended.status is None:
        return Outcome(Kind.HANG, tail)
    if ended.orphans:
        return Outcome(Kind.ORPHANS, f"{ended.orphans} processes were left behind: {tail}")
    if "Traceback (most recent call last)" in ended.errors:
        return Outcome(Kind.TRACEBACK, tail)
    if ended.status not in statuses:
        return Outcome(Kind.WRONG_STATUS, f"status {ended.status}: {tail}")
    lines = [line for line in ended.errors.splitlines() if line.startswith(ENDING)]
    if ended.status and (len(lines) != 1 or lines[0] != ended.refusal or len(lines[0]) > LONGEST_LINE):
        return Outcome(Kind.WRONG_STATUS, f"status {ended.status} without its one line: {tail}")
    return None


def refused(ended: Ended, names: str, folder: Path | None = None, statuses: Collection[int] = (2,)) -> Outcome:
    """The command has to be refused.

    Args:
        names: a pattern that the line has to match: the setting or the file.
        folder: of the run, which must not be there.
    """
    if problem := problem_of(ended, (0, *statuses)):
        return problem
    if ended.status == 0:
        return Outcome(Kind.SILENT, f"it was taken, and should have been refused: {ended.errors[-1000:]}")
    if not re.search(names, ended.refusal):
        return Outcome(Kind.WRONG_STATUS, f"the line does not name {names}: {ended.refusal}")
    if folder is not None and folder.exists():
        inside = sorted(path.name for path in folder.rglob("*"))[:9]
        return Outcome(Kind.LEFTOVERS, f"{folder.name} is there, with {inside}: {ended.refusal}")
    return Outcome(Kind.REFUSED, ended.refusal)


def finished(ended: Ended, is_same: Callable[[], bool] | None = None) -> Outcome:
    """The command has to finish, with the same result as without the attack where `is_same` compares that."""
    if problem := problem_of(ended, (0,)):
        return problem
    if is_same is not None and not is_same():
        return Outcome(Kind.SILENT, f"status 0 with another result: {ended.errors[-2000:]}")
    return Outcome(Kind.FINISHED)


def either(
    ended: Ended,
    names: str,
    folder: Path | None = None,
    is_same: Callable[[], bool] | None = None,
    statuses: Collection[int] = (2,),
) -> Outcome:
    """The command may finish, then with the right result, or be refused."""
    return finished(ended, is_same) if ended.status == 0 else refused(ended, names, folder, statuses)


def resumed(
    ended: Ended, again: Callable[[], Ended], statuses: Collection[int], is_same: Callable[[], bool]
) -> Outcome:
    """The command has ended as documented or finished; the same one again has to finish with the same result.

    Args:
        statuses: documented ones of this attack besides 0; negative ones are Python's own of a signal.
    """
    signalled = ended.status is not None and ended.status < 0 and ended.status in statuses
    if not signalled and (problem := problem_of(ended, (0, *statuses))):
        return problem
    second = finished(again(), is_same)
    return Outcome(Kind.RESUMED) if second.kind is Kind.FINISHED and ended.status else second
