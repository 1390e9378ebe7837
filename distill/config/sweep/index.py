"""sweep.yaml in the folder of a sweep: what was swept in each folder of a job, and how that job ended."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NotRequired, TypedDict

import yaml

from distill.config.sweep.names import readable_name
from distill.runtime.errors import Damaged, first_line
from distill.runtime.files import atomic, read_yaml, try_lock

INDEX = "sweep.yaml"
HEAD = "# The folders of this sweep: what was swept in each, and how that run ended.\n"
RUNNING, FINISHED, FAILED = "running", "finished", "failed"


class Entry(TypedDict):
    """A folder of a sweep."""

    overrides: list[str]  # that are swept
    status: NotRequired[str]  # RUNNING, FINISHED or FAILED
    problem: NotRequired[str]  # with which it failed


class SweepIndex:
    """The folders of a sweep by name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / INDEX

    def read(self) -> dict[str, Entry]:
        """The entries by folder; none where there is no such file.

        Raises:
            Damaged: it is not as it was written.
        """
        if not self.path.exists():
            return {}
        try:
            entries = read_yaml(self.path) or {}
        except (OSError, ValueError) as error:
            raise Damaged(self.path, first_line(error)) from None
        if not isinstance(entries, dict) or not all(
            isinstance(entry, dict) and isinstance(entry.get("overrides"), list) for entry in entries.values()
        ):
            raise Damaged(self.path, "it is no index of folders with overrides")
        return {str(name): entry for name, entry in entries.items()}

    def folder_of(self, swept: Sequence[str], numbered: bool = False) -> str:
        """The name of the folder of the job with these overrides, the same each time.

        Args:
            swept: the overrides that are swept.
            numbered: give it a number although its values would make a name, as in a search, whose values are long.
        """
        readable = None if numbered else readable_name(swept)
        if readable is not None:
            return readable
        with self._locked():
            entries = self.read()
            for name, entry in entries.items():
                if entry["overrides"] == list(swept) and name.isdecimal():
                    return name
            number = 0
            while (name := f"{number:03d}") in entries or (self.folder / name).exists():
                number += 1
            self._write(entries | {name: Entry(overrides=list(swept), status=RUNNING)})
            return name

    def forget_refused(self) -> None:
        """Drop the jobs that failed and left no folder: the sweep is given again, and names those that it still has."""
        with self._locked():
            entries = self.read()
            kept = {
                name: entry
                for name, entry in entries.items()
                if entry.get("status") != FAILED or (self.folder / name).exists()
            }
            if kept != entries:
                self._write(kept)

    def record(self, name: str, swept: Sequence[str], status: str, problem: str = "") -> None:
        """Keep how the job of a folder is doing."""
        entry = Entry(overrides=list(swept), status=status)
        if problem:
            entry["problem"] = problem
        with self._locked():
            self._write(self.read() | {name: entry})

    def _write(self, entries: dict[str, Entry]) -> None:
        with atomic(self.path) as new:
            text = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True, width=10_000)
            new.write_text(HEAD + text, encoding="utf-8")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time reads and writes; the same sweep may have been started twice."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".sweep.lock").open("w") as lock:
            try_lock(lock, wait=True)
            yield
