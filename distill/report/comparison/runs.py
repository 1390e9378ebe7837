"""Finds the runs that a command names, and reads their settings, results and progress."""

import glob
import os
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from distill.config.base import flatten
from distill.report.comparison.columns import Number, numbers_of
from distill.runs.record import Record
from distill.runs.results_file import is_continued, read_results
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import read_settings
from distill.runtime.jsonl import read_lines

FINISHED = "finished"


@dataclass
class Run:
    """One run.

    Attributes:
        name: its folder, from the one that all compared runs are in.
        status: `finished`, or what it is instead.
        settings: of config.yaml, by their dotted names of today; none of a run that did not begin.
        record: None where the run is not finished.
    """

    folder: Path
    name: str = ""
    status: str = FINISHED
    settings: dict[str, Any] = field(default_factory=dict)
    record: Record | None = None

    @cached_property
    def numbers(self) -> dict[str, Number]:
        """By their names; none of a run that is not finished."""
        return {each.name: each for each in numbers_of(self.record)} if self.record else {}


def find_runs(arguments: list[str]) -> list[Run]:
    """The runs in these folders: of runs, of sweeps and chains, or any that hold runs; globs stand for what they match.

    Raises:
        SettingError: one of them does not exist, or holds no run.
    """
    if not arguments:
        raise SettingError("run is empty: name folders of runs or of a sweep")
    by_folder: dict[Path, Run] = {}
    for argument in arguments:
        paths = [Path(argument).expanduser()]
        if not paths[0].exists():
            paths = [Path(path) for path in sorted(glob.glob(os.path.expanduser(argument)), key=natural)]
        if not paths:
            raise SettingError(f"run={argument} is not a folder and matches none: correct the path")
        runs = [run for path in paths for run in _runs_below(path)]
        if not runs:
            raise SettingError(f"run={argument} holds no run: name a run, a sweep, or a glob of them")
        for run in runs:
            by_folder.setdefault(run.folder.resolve(), run)
    above = Path(os.path.commonpath([path.parent for path in by_folder]))
    return [replace(run, name=str(path.relative_to(above))) for path, run in by_folder.items()]


def natural(name: Any) -> list[Any]:
    """To sort by: numbers in a name by their value."""
    parts = re.split(r"(\d+(?:\.\d+)?)", str(name))
    return [(0, float(part), "") if number % 2 else (1, 0.0, part) for number, part in enumerate(parts)]


def _runs_below(path: Path) -> list[Run]:
    """The run of this folder, or those of the folders in it."""
    runs: list[Run] = []
    for folder, below, _ in os.walk(path):
        if is_run(Path(folder)):
            runs.append(read_run(Path(folder)))
            below.clear()
        below[:] = sorted((name for name in below if not name.startswith(".")), key=natural)
    return runs


def is_run(folder: Path) -> bool:
    """Whether a run has begun or ended here."""
    return (folder / "metrics.jsonl").is_file() or all(
        (folder / name).is_file() for name in ("results.json", "config.yaml")
    )


def read_run(folder: Path) -> Run:
    """What there is of a run."""
    run = Run(folder, settings=flatten(read_settings(folder / "config.yaml")))
    try:
        record = read_results(folder / "results.json")
        if not is_continued(folder, record):
            return replace(run, record=record)
    except FileNotFoundError:
        pass
    except Damaged as damage:
        return replace(run, status=f"damaged: {damage.reason}")
    if is_at_work(folder):
        return replace(run, status=f"running, {last_step(folder)}")
    return replace(run, status=f"not finished: it stopped {last_step(folder)}")


def last_step(folder: Path) -> str:
    """How far a run is, by its metrics."""
    lines = read_lines(folder / "metrics.jsonl", only_good=True)
    return f"after step {lines[-1].get('step', 0):,}" if lines else "before its first step"


def is_at_work(folder: Path) -> bool:
    """Whether a process of this machine holds the lock of a run; the lock is not taken."""
    lock, table = folder / ".lock", Path("/proc/locks")
    if not lock.is_file() or not table.is_file():
        return False
    of_lock = lock.stat()  # inodes are numbered by each file system anew
    place = f" {os.major(of_lock.st_dev):02x}:{os.minor(of_lock.st_dev):02x}:{of_lock.st_ino} "
    return any("FLOCK" in line and place in line for line in table.read_text().splitlines())
