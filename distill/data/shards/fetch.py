"""Blocks as they are stored, read from a disk or through a network, tried again until they are whole and right."""

import logging
import mmap
import time
from asyncio import run_coroutine_threadsafe
from collections import Counter
from concurrent.futures import wait
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from distill.data.remote import ATTEMPTS, NAP, NoRanges, file_system, is_url, retried
from distill.data.shards.index import Block, Layout
from distill.runtime.errors import Damaged, SettingError, StorageFailed, first_line
from distill.runtime.files import CURE
from distill.runtime.signals import in_force

SECONDS = 60.0  # that one request may take, where the library can be stopped
PIECE = 4 << 20  # bytes of a block in one request: libraries hold what they have received twice
LOG_EVERY = 10.0  # seconds between two lines about storage that fails
SAME_BYTES = 6  # times that the same wrong bytes come until they are what is stored: a network spoils others each time

logger = logging.getLogger(__name__)


class Blocks:
    """The blocks of the shards at one place, which is a folder or a URL.

    When a block cannot be had, the run is about to end: until one comes again the others are tried once only.

    Attributes:
        failures: attempts that have failed so far.
        last_error: why the last block could not be had; None: it came.
    """

    def __init__(self, place: str, layout: Layout) -> None:
        self.place, self.layout = place.rstrip("/"), layout
        self.failures = 0
        self.last_error: StorageFailed | SettingError | None = None
        self._logged = 0.0  # when the last line about failures was written
        self._lock = Lock()

    def give_up(self, error: StorageFailed | SettingError) -> None:
        """The last block could not be had."""
        self.last_error = error

    def name(self, block: Block) -> str:
        """The file that holds it."""
        return f"{self.place}/{self.layout.shard_name(block.shard)}"

    def plain(self, block: Block, attempts: int = ATTEMPTS) -> memoryview:
        """The sequences of a block, decompressed.

        Raises:
            StorageFailed: it cannot be read, or other bytes come each time.
            SettingError: the same bytes come each time, and they are not those that were written.
        """
        stored = self._stored(block, attempts)
        if self.layout.compression is None:
            return stored
        import pyarrow

        size = block.sequences * self.layout.sequence_bytes
        return memoryview(pyarrow.decompress(stored, size, codec=self.layout.compression))

    def _stored(self, block: Block, attempts: int) -> memoryview:
        """The bytes of a block as they are stored, piece by piece; what has come stays for the next attempt."""
        # Memory of its own, which goes back to the system at once: malloc would keep a block for each thread.
        name, data, arrived = self.name(block), memoryview(mmap.mmap(-1, block.size)), 0
        wrong: Counter[bytes] = Counter()

        def attempt() -> memoryview:
            nonlocal arrived
            while arrived < block.size:
                end = min(arrived + PIECE, block.size)
                piece = read_range(name, block.offset + arrived, block.offset + end)
                if len(piece) != end - arrived and not is_url(name):
                    raise StorageFailed(f"{name} was cut while this run read it: {CURE}")
                if len(piece) != end - arrived:
                    raise OSError(f"{arrived + len(piece):,} of {block.size:,} bytes came")
                data[arrived:end] = piece
                arrived = end
            if (digest := sha256(data).digest()) != block.digest:
                arrived, wrong[digest] = 0, wrong[digest] + 1
                problem = f"the {block.size:,} bytes from {block.offset:,} are not those that were written"
                if wrong[digest] == SAME_BYTES:
                    raise SettingError(
                        f"{name} is damaged ({problem}, and the same ones came {SAME_BYTES} times): restore that file, "
                        "or delete its folder, and the same command makes it again from the text"
                    )
                raise OSError(problem)
            self.last_error = None
            return data

        try:
            return retried(attempt, name, attempts, lambda reason: self._note(name, reason))
        except (SettingError, StorageFailed):
            raise
        except Exception as error:  # of a kind that does not pass; each library has its own
            raise _failed(name, error) from error

    def _note(self, name: str, reason: str) -> None:
        """Count a failure, and log it now and then. Raises StorageFailed where the run ends anyway."""
        with self._lock:
            self.failures += 1
            if self.last_error is not None:
                raise self.last_error
            if time.monotonic() - self._logged < LOG_EVERY:
                return
            self._logged = time.monotonic()
        logger.warning(f"{name}: {reason}; trying again ({self.failures} such failures so far)")


def _failed(name: str, error: Exception) -> StorageFailed:
    reason = f"{type(error).__name__}: {first_line(error)}"
    return StorageFailed(f"{name} cannot be read ({reason}): restore access; the same command then continues")


def read_range(name: str, start: int, stop: int) -> bytes:
    """The bytes [start, stop) of a file, fewer where it ends before. One attempt; raises whatever its library does."""
    if not is_url(name):
        with open(name, "rb") as file:
            file.seek(start)
            return file.read(stop - start)
    system, path = file_system(name, "data.tokens")
    data = _within(SECONDS, system, path, start, stop)
    if len(data) > stop - start:
        raise NoRanges("its server sends whole files only")
    return data


def _within(seconds: float, system: Any, path: str, start: int, stop: int) -> bytes:
    """The bytes [start, stop) of a file; of libraries that can be interrupted the attempt ends after so many seconds.

    Raises:
        TimeoutError: they are over.
        Interrupted: a signal stops the process.
    """
    if not system.async_impl:
        data: bytes = system.cat_file(path, start=start, end=stop)
        return data
    signals, until = in_force(), time.monotonic() + seconds
    coming = run_coroutine_threadsafe(system._cat_file(path, start=start, end=stop), system.loop)
    try:
        while not wait([coming], NAP).done:
            signals.raise_if_stopped()
            if time.monotonic() > until:
                raise TimeoutError(f"no answer in {seconds:.0f} s")
        data = coming.result()
        return data
    finally:
        coming.cancel()


def read_whole(name: str, digest: str | None = None) -> bytes:
    """The content of a small file at a path or URL.

    Args:
        digest: its SHA-256 in hexadecimal digits, where that is on record.

    Raises:
        Damaged: there is no such file, it cannot be read, or its content is another.
        StorageFailed: object storage keeps failing.
    """
    try:
        data = _content(name)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise Damaged(name, "it is missing" if missing else f"it cannot be read: {first_line(error)}") from error
    if digest is not None and sha256(data).hexdigest() != digest:
        raise Damaged(name, "it is not as it was written: its SHA-256 differs")
    return data


def _content(name: str) -> bytes:
    if not is_url(name):
        return Path(name).expanduser().read_bytes()
    system, path = file_system(name, "data.tokens")
    try:
        data: bytes = retried(lambda: system.cat_file(path), name)
    except (FileNotFoundError, SettingError, StorageFailed):
        raise
    except Exception as error:
        raise _failed(name, error) from error
    return data
