"""A file that a run reads parts of from its first step to its last, and that nobody is to change until then."""

import os
import time
from contextlib import suppress
from pathlib import Path

from distill.runtime.errors import StorageFailed


class FileInUse:
    """Bytes of an open file, by their place in it.

    They are read when they are needed. A memory map would show what is written over the file without a word, and where
    the file is cut the system ends the process. What is renamed to its place, or removes it, leaves the open file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._state = self._now()

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
        if self._now() != self._state:
            raise StorageFailed(f"{self.path} was changed while this run read it: {CURE}")

    def mark_used(self) -> None:
        """Set when the file was last read, whether or not its file system keeps that; when it was written stays."""
        with suppress(OSError):  # another user's
            os.utime(self._file.fileno(), ns=(time.time_ns(), self._state[1]))

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns


CURE = "the same command checks it, makes it again where that is possible, and resumes"
