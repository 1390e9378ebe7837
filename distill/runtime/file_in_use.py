"""A file that a run reads parts of from its first step to its last, and that nobody is to change until then."""

import os
import resource
import time
from contextlib import suppress
from pathlib import Path
from threading import Lock

from distill.runtime.errors import StorageFailed

FEWEST, MOST = 16, 512  # open files


class FileInUse:
    """Bytes of an open file, by their place in it.

    They are read when they are needed. A memory map would show what is written over the file without a word, and where
    the file is cut the system ends the process. What is renamed to its place, or removes it, leaves the open file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self.state = self._now()

    def read(self, start: int, size: int) -> bytes:
        """The bytes [start, start + size), fewer at the end of the file; valid once `require_unchanged` has returned.

        Raises:
            StorageFailed: the file cannot be read.
        """
        try:
            return os.pread(self._file.fileno(), size, start)
        except OSError as error:
            raise StorageFailed(f"{self.path} cannot be read ({error.strerror}): {CURE}") from error

    def require_unchanged(self) -> None:
        """Raises StorageFailed where the file has been written to, or cut, since it was opened."""
        if self._now() != self.state:
            raise StorageFailed(f"{self.path} was changed while this run read it: {CURE}")

    def mark_used(self) -> None:
        """Set when the file was last read, whether or not its file system keeps that; when it was written stays."""
        with suppress(OSError):  # another user's
            os.utime(self._file.fileno(), ns=(time.time_ns(), self.state[1]))

    def _now(self) -> tuple[int, int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns, status.st_ino


class Gone(StorageFailed):
    """A file that was closed for others has been changed, replaced or removed since."""


class FilesInUse:
    """Files by number, of which few are open at a time: a process may open 1,024, and there may be more blocks.

    One that had to give way to others is opened again when it is read. Any thread may read.
    """

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: of open files; None: a quarter of those that the process may have."""
        self.limit = limit or min(MOST, max(FEWEST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._open: dict[int, FileInUse] = {}  # the one that was opened first is the first to be closed
        self._closed: dict[int, tuple[Path, tuple[int, int, int]]] = {}
        self._lock = Lock()

    def __setitem__(self, number: int, file: FileInUse) -> None:
        with self._lock:
            self._closed.pop(number, None)
            self._open[number] = file
            while len(self._open) > self.limit:
                first = next(iter(self._open))
                old = self._open.pop(first)  # closed when the last thread has read from it
                self._closed[first] = old.path, old.state

    def __getitem__(self, number: int) -> FileInUse:
        """Raises KeyError where there is none of this number, Gone where it is not the same any more."""
        try:
            return self._open[number]
        except KeyError:
            return self._again(number)

    def _again(self, number: int) -> FileInUse:
        with self._lock:
            if number in self._open:  # by another thread, just now
                return self._open[number]
            path, state = self._closed[number]
        with suppress(FileNotFoundError):
            if (file := FileInUse(path)).state == state:
                self[number] = file
                return file
        self.pop(number)
        raise Gone(f"{path} was changed while this run read it: {CURE}")

    def pop(self, number: int) -> None:
        """Forget a file."""
        with self._lock:
            self._open.pop(number, None)
            self._closed.pop(number, None)

    def __contains__(self, number: int) -> bool:
        return number in self._open or number in self._closed

    def numbers(self) -> list[int]:
        with self._lock:
            return [*self._open, *self._closed]


CURE = "the same command checks it, makes it again where that is possible, and resumes"
