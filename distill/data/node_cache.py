"""Files of prepared sequences on the disk of a machine: fetched once for all its processes, bounded, checked, evicted.

A file lies under its sha256, so that runs and corpora share a cache. One that is evicted while a process reads it stays
readable until that process closes it, as any file does on Linux.
"""

import errno
import logging
import os
import shutil
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from distill.data.disk_cache import folder_of, once
from distill.data.file_maps import forget_maps
from distill.data.remote import ATTEMPTS, is_url, retried
from distill.data.storage import fetch_file
from distill.runtime.errors import Damaged, SettingError, StorageFailed, first_line
from distill.runtime.files import locked, sha256
from distill.runtime.host import RESERVE, size

LOCK = ".lock"
NOTED = 10.0  # seconds between two notes that a file is in use
OLD = 3600.0  # seconds without a change, after which a file is no longer on its way
FULL = (errno.ENOSPC, errno.EDQUOT)
OTHER = "give data.local=FOLDER on another disk"
CONTINUES = "the same command then continues"
SAME_BYTES = 6  # times that the same wrong bytes come until they are what is stored: a network spoils others each time

logger = logging.getLogger(__name__)


class NodeCache:
    """The folder `<cache>/shards`, and how much may be in it."""

    def __init__(self, cache: str, max_bytes: int, setting: str) -> None:
        """
        Args:
            max_bytes: of all its files together.
            setting: what error lines call `cache`.

        Raises:
            SettingError: the folder cannot be written.
        """
        self.folder = folder_of(cache, "shards", ".", setting)
        self.max_bytes, self.setting = max_bytes, f"{setting}={cache}"
        self._noted: dict[str, float] = {}  # by digest: when the use of a file was noted, in monotonic seconds

    def get(self, name: str, setting: str, digest: str, num_bytes: int, attempts: int = ATTEMPTS) -> Path:
        """The file of this sha256, fetched unless it is here, while other processes of the machine wait.

        Args:
            name: its path or URL, which `setting` names.

        Raises:
            Damaged: it is not as it was written where it comes from.
            StorageFailed: it cannot be had, or there is no room for it.
            Interrupted: a signal stops the process.
        """
        path = self.folder / digest
        self.folder.mkdir(parents=True, exist_ok=True)  # which somebody may have removed
        with once(path, quiet=True) as missing:
            if missing:
                new = self.folder / f".{digest}.new"
                try:
                    self._make_room(num_bytes, num_bytes)
                    self._fetch(name, setting, digest, new, attempts)
                    with locked(self.folder / f"room{LOCK}"):
                        self._make_room(num_bytes, 0)
                        os.replace(new, path)
                finally:
                    new.unlink(missing_ok=True)
        self._noted.pop(digest, None)
        self.note_use(digest)
        return path

    def note_use(self, digest: str) -> None:
        """Puts a file last in the order of eviction; called for each read, it does so now and then."""
        if time.monotonic() - self._noted.get(digest, -NOTED) < NOTED:
            return
        self._noted[digest] = time.monotonic()
        path = self.folder / digest
        with suppress(FileNotFoundError, PermissionError):  # it is evicted in this moment, or another user's
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))  # its file system may not keep when it is read

    def discard(self, digest: str) -> None:
        """Removes a file that is not as it was written."""
        logger.warning(f"{self.folder / digest} is damaged; it is fetched again")
        (self.folder / digest).unlink(missing_ok=True)

    def _fetch(self, name: str, setting: str, digest: str, new: Path, attempts: int) -> None:
        wrong: Counter[str] = Counter()

        def attempt() -> None:
            try:
                fetch_file(name, setting, new)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                problem = f"{self.setting}: {error.strerror} for {name}: make room there, or {OTHER}"
                raise StorageFailed(problem) from error
            if (found := sha256(new)) != digest:
                wrong[found] += 1
                if not is_url(name) or wrong[found] == SAME_BYTES:
                    raise Damaged(name, "it is not as it was written: its SHA-256 differs")
                raise EOFError("the bytes that came are not those that were written")

        try:
            retried(attempt, name, attempts, lambda reason: logger.warning(f"{name}: {reason}; trying again"))
        except (SettingError, StorageFailed):
            raise
        except FileNotFoundError as error:
            raise Damaged(name, "it is missing") from error
        except Exception as error:  # of a kind that does not pass; each library has its own
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise StorageFailed(f"{name} cannot be fetched ({reason}): restore access; {CONTINUES}") from error

    def _make_room(self, num_bytes: int, needed: int) -> None:
        """Remove the files that were used longest ago until `num_bytes` more are allowed, and `needed` are free."""
        files = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # its process has ended in this moment
                status = entry.stat()
                if entry.name.startswith("."):  # on its way, or left by a process that was killed
                    if time.time() - status.st_mtime > OLD:
                        os.unlink(entry.path)
                elif not entry.name.endswith(LOCK):
                    files.append((status.st_atime_ns, status.st_size, entry.path))
        total, free = sum(num for _, num, _ in files), shutil.disk_usage(self.folder).free
        if num_bytes > self.max_bytes or needed + RESERVE > free + total:  # which no eviction mends
            cure = "raise data.local_bytes" if num_bytes > self.max_bytes else f"make room, or {OTHER}"
            raise StorageFailed(
                f"{self.setting}: no room for a shard of {size(num_bytes)}, with {size(free)} free and "
                f"data.local_bytes={self.max_bytes}: {cure}; {CONTINUES}"
            )
        for _, old_bytes, path in sorted(files):
            if total + num_bytes <= self.max_bytes and needed + RESERVE <= free:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            forget_maps()
            total, free = total - old_bytes, free + old_bytes
