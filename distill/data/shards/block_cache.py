"""Blocks of sequences on the disk of a node: fetched once for all its processes, bounded, checked, evicted.

A block is a file of its plain sequences, with their sha256 after them, under the digest that the index
assigns. So runs and corpora share a cache. A file that is evicted while processes read it stays
readable until the last of them closes it, as any file does on Linux.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from distill.data.disk_cache import folder_of
from distill.data.shards.in_flight import InFlight, bytes_in_flight
from distill.data.shards.index import DIGEST_BYTES, Block, Layout
from distill.runtime.errors import StorageFailed
from distill.runtime.files import FileInUse, atomic, locked
from distill.runtime.host import RESERVE, size

SUFFIX = ".block"
READ_BYTES = 1 << 20  # at once, to check a file

logger = logging.getLogger(__name__)


class _File(NamedTuple):
    used: int  # when it was last opened, nanoseconds
    size: int
    path: str


class BlockCache:
    """The folder `<cache>/blocks` and what may be in it."""

    def __init__(self, cache: str, max_bytes: int, setting: str = "data.cache") -> None:
        """
        Args:
            max_bytes: of all its files together.
            setting: what error lines call `cache`.

        Raises:
            SettingError: the folder cannot be written.
        """
        self.folder = folder_of(cache, "blocks", "files", setting)
        self.max_bytes, self.setting = max_bytes, f"{setting}={cache}"
        self._in_flight = InFlight()
        self.folder.mkdir(exist_ok=True)
        (self.folder.parent / "locks").mkdir(exist_ok=True)

    def get(self, block: Block, layout: Layout, fetch: Callable[[Block], memoryview], ahead: bool = False) -> FileInUse:
        """The file of the plain bytes of a block; fetched unless they are here, while other processes of the node wait.

        Args:
            fetch: gives the plain bytes of a block.
            ahead: fetched before it is needed.
        """
        if (plain := self._open(block, layout)) is not None:
            return plain
        with self._lock(f"{block.digest[0]:02x}"):  # of one block in 256: few wait for another one
            if (plain := self._open(block, layout)) is None:
                with self._in_flight.room_for(bytes_in_flight(block, layout), ahead):
                    self._add(block, fetch(block))
                plain = self._open(block, layout, check=False)
        return self.get(block, layout, fetch, ahead) if plain is None else plain  # None: evicted in between

    def digests(self) -> set[str]:
        """The digests of the blocks that are here, in hexadecimal digits."""
        return {name.removesuffix(SUFFIX) for name in os.listdir(self.folder)}

    def _path(self, block: Block) -> Path:
        return self.folder / (block.digest.hex() + SUFFIX)

    def _open(self, block: Block, layout: Layout, check: bool = True) -> FileInUse | None:
        """The file of the plain bytes of a block; None where they are not here, or not as they were written."""
        try:
            file = FileInUse(path := self._path(block))
        except FileNotFoundError:
            return None
        if check and not _is_whole(file, block.sequences * layout.sequence_bytes):
            logger.warning(f"{path} is damaged; it is fetched again")
            path.unlink(missing_ok=True)
            return None
        with suppress(OSError):  # another user's; when it was written stays
            os.utime(path, ns=(time.time_ns(), file.state[1]))
        return file

    def _add(self, block: Block, plain: memoryview) -> None:
        """Write a block; one process of the node at a time, so that the bound holds."""
        with self._lock("write"):
            self._make_room(len(plain) + DIGEST_BYTES)
            with atomic(self._path(block)) as new, new.open("wb") as file:
                file.write(plain)
                file.write(sha256(plain).digest())

    def _make_room(self, num_bytes: int) -> None:
        """Remove the blocks that were opened longest ago until so many bytes more are allowed, and are free."""
        files = sorted(self._files())
        total, free = sum(file.size for file in files), shutil.disk_usage(self.folder).free
        for file in files:
            if total + num_bytes <= self.max_bytes and num_bytes + RESERVE <= free:
                return
            with suppress(FileNotFoundError):  # another process found it damaged just now
                os.unlink(file.path)
            total, free = total - file.size, free + file.size
        if total + num_bytes > self.max_bytes or num_bytes + RESERVE > free:
            small = num_bytes > self.max_bytes
            cure = "raise data.local_bytes" if small else "make room, or give data.local=FOLDER on another disk"
            raise StorageFailed(
                f"{self.setting}: no room for a block of {size(num_bytes)}, with {size(free)} free and "
                f"data.local_bytes={self.max_bytes}: {cure}; the same command then continues"
            )

    def _files(self) -> Iterator[_File]:
        """The files of the cache; removes what a killed process has left half-written."""
        for entry in os.scandir(self.folder):
            if not entry.name.endswith(SUFFIX):
                os.unlink(entry.path)
                continue
            with suppress(FileNotFoundError):  # another process found it damaged just now
                status = entry.stat()
                yield _File(status.st_atime_ns, status.st_size, entry.path)

    def _lock(self, name: str) -> AbstractContextManager[bool]:
        """Held by one thread of one process of the node; it goes with a process that is killed."""
        return locked(self.folder.parent / "locks" / name)


def _is_whole(file: FileInUse, num_bytes: int) -> bool:
    """Whether a file holds so many bytes and then their digest."""
    digest, at = sha256(), 0
    while at < num_bytes and (part := file.read(at, min(num_bytes - at, READ_BYTES))):
        digest.update(part)
        at += len(part)
    return at == num_bytes and file.read(at, DIGEST_BYTES + 1) == digest.digest()
