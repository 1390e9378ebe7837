"""Runs that were stopped or are finished, of which cases take copies, and moments in a run."""

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.attacks.ground import Ground, student_of
from benchmarks.attacks.ingredients import distilled, undisturbed
from benchmarks.reliability.chaos import steps_of

LONGER = ("train.steps=12", "train.save_every=2")


class Prepared(NamedTuple):
    """What a case begins with, in its own folder."""

    student: str  # SHA-256 of that of an undisturbed run
    cache: Path
    arguments: list[str]  # of the command that makes or resumes the run


def command(ground: Ground, cache: Path, folder: Path) -> list[str]:
    """Of a run of a few more steps."""
    return distilled(ground, cache, folder, *LONGER)


def whole(ground: Ground) -> tuple[str, Path]:
    """The student and the folder of the undisturbed run, in which cache and run lie."""
    student, cache = undisturbed(ground, "twelve steps", partial(command, ground))
    return student, cache.parent


def stopped(ground: Ground) -> Path:
    """The folder of a run that was killed half-way."""
    _, sound = whole(ground)

    def make(folder: Path) -> Path:
        process = ground.start(*command(ground, sound / "cache", folder), change=slow_steps)
        wait_for_step(process, folder, 7)
        process.kill()
        ground.end(process)
        assert steps_of(folder) < 12, "the run was over before it was killed"
        return folder

    return ground.shared.get("stopped", make)


def slow_steps(seconds: float = 0.15) -> None:
    """In a run: each step takes so long at least, and things can happen to it."""
    from distill.runs.callbacks import RunLog

    log = RunLog.write

    def later(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return log(*arguments, **named)

    RunLog.write = later  # type: ignore[method-assign]


def wait_for_step(process: Any, folder: Path, step: int, longest: float = 60.0) -> None:
    """Until the run has logged the step, or has ended."""
    until = time.monotonic() + longest
    while steps_of(folder) < step and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)


def copied(ground: Ground, state: str) -> Prepared:
    """A copy of the run as it is `new`, `stopped` or `finished`, and of its cache."""
    student, sound = whole(ground)
    cache = Path(shutil.copytree(sound / "cache", ground.folder / "cache"))
    if state == "stopped":
        shutil.copytree(stopped(ground), ground.run)
    if state == "finished":
        shutil.copytree(sound / "run", ground.run)
    return Prepared(student, cache, command(ground, cache, ground.run))


def is_same(ground: Ground, student: str) -> Callable[[], bool]:
    return lambda: student_of(ground.run) == student
