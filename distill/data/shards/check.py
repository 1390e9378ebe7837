"""Whether prepared sequences are as they were written.

meta.json has its own digest, and those of the indices and of the counts; an index has those of the blocks of its
shards.

On each machine the files of a folder are read in full once. A stamp in `data.cache` then shows that they are the same
files, by their sizes, times of change and inodes.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from distill.config.settings import DataConfig
from distill.data.disk_cache import folder_of, num_processes, once
from distill.data.shards.destination import LocalFolder, array_in
from distill.data.shards.fetch import read_whole
from distill.data.shards.index import Block, ShardIndex
from distill.data.shards.open import index_name, read_index
from distill.data.shards.records import META, PARTS, Meta, Part, PartMeta
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import atomic, quarantine, remove
from distill.runtime.host import size

READ_BYTES = 1 << 20  # of a block at once
ANNOUNCED = 4 << 30  # bytes from which on the check takes long enough to be logged
BEGAN = time.monotonic()  # about when this process and the other ranks of its run began
SEAL = "sha256"  # the entry of meta.json that is the digest of all others

logger = logging.getLogger(__name__)


def sealed(meta: Meta) -> bytes:
    """The content of meta.json, its own digest in it."""
    return json.dumps({**meta, SEAL: _digest(meta)}).encode()


def _digest(meta: Any) -> str:
    return sha256(json.dumps(meta).encode()).hexdigest()


def read_meta(place: str) -> Meta:
    """What meta.json in a folder or at a URL holds.

    Raises:
        Damaged: there is none, or it is not as it was written.
        StorageFailed: object storage keeps failing.
    """
    name = f"{place.rstrip('/')}/{META}"
    content = read_whole(name)
    try:
        meta = json.loads(content)
        seal = meta.pop(SEAL, None)
        lacking = (Meta.__required_keys__ - meta.keys()) | set().union(
            *(PartMeta.__required_keys__ - meta[part].keys() for part in PARTS)
        )
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise Damaged(name, "it is not the JSON that was written") from error
    if lacking:
        raise Damaged(name, f"it has no {', '.join(sorted(lacking))}")
    if seal != _digest(meta):
        raise Damaged(name, "it is not as it was written: its SHA-256 differs")
    checked: Meta = meta
    return checked


def index_of(place: str, part: Part, meta: Meta) -> ShardIndex:
    """The index of a part. Raises Damaged, StorageFailed as `read_meta`."""
    index = read_index(place, part, index_digest(part, meta))
    if index.num_sequences != meta[part]["rows"]:
        problem = f"it has {index.num_sequences:,} sequences, {META} has {meta[part]['rows']}"
        raise Damaged(index_name(place, part), problem)
    return index


def index_digest(part: Part, meta: Meta) -> str:
    """SHA-256 of the file of an index."""
    return meta["files"][f"{part}.index"]


def read_counts(place: str, part: Part, meta: Meta) -> np.ndarray:
    """How often each token occurs in a part, [V] int64. Raises Damaged, StorageFailed as `read_meta`."""
    file = f"{part}.counts.npy"
    name = f"{place.rstrip('/')}/{file}"
    content = read_whole(name, meta["files"][file])
    counts = array_in(content, name)
    if counts.dtype != np.int64 or counts.ndim != 1 or counts.sum() < meta[part]["tokens"]:
        raise Damaged(name, "it does not hold the counts of the tokens")
    return counts


def check_folder(folder: LocalFolder, data: DataConfig, again: bool, remake: bool) -> bool:
    """Whether finished sequences are in a folder, all as they were written; else they are to be made.

    One process of the machine reads the files while others wait. Of a folder that is larger than `data.local_bytes`
    and read in blocks, which are checked one by one, only the sizes are checked here.

    Args:
        again: read everything again, once for each run, although a stamp shows the same files.
        remake: remove a damaged folder, and log that, instead of raising Damaged.
    """
    if not again and _is_read_in_blocks(folder, data):
        check_files(folder, data, in_full=False)
        return True
    try:
        stamp = folder_of(data.cache, "checked", sha256(str(folder.folder.resolve()).encode()).hexdigest()[:32])
    except SettingError:  # a cache that may only be read, beside finished sequences
        return _check(folder, data, remake)
    with once(stamp, lambda: _is_stamped(stamp, folder, again), quiet=True) as needed:
        if not needed:
            return True
        seen = _seen(folder)
        if not _check(folder, data, remake):
            return False
        with suppress(OSError), atomic(stamp) as new:  # without room for it, the next process reads them again
            new.write_text(json.dumps(seen))
    return True


def _check(folder: LocalFolder, data: DataConfig, remake: bool) -> bool:
    if not folder.exists(META):
        return False
    try:
        check_files(folder, data)
    except Damaged as damage:
        if not remake:
            raise
        try:
            remove(quarantine(folder.folder))  # renamed in one step, whatever kills this process
        except OSError:  # another user's
            raise damage from None
        logger.warning(f"{damage}: {folder.folder} is removed, and made again")
        return False
    return True


def _is_read_in_blocks(folder: LocalFolder, data: DataConfig) -> bool:
    """Whether a folder that several hosts share is too large to be read at once, and every block is checked later."""
    if data.tokens is None or sum(num_bytes for num_bytes, *_ in _seen(folder).values()) <= data.local_bytes:
        return False
    return data.local is not None or (folder.exists(META) and read_meta(folder.place)["compression"] is not None)


def _seen(folder: LocalFolder) -> dict[str, list[int]]:
    """Size, time of change and inode of each file; none where there is no such folder."""
    files = {}
    with suppress(OSError):
        for entry in sorted(os.scandir(folder.folder), key=lambda entry: entry.name):
            if entry.is_file():
                status = entry.stat()
                files[entry.name] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return files


def _is_stamped(stamp: Path, folder: LocalFolder, again: bool) -> bool:
    try:
        seen = json.loads(stamp.read_bytes())
        recent = not again or _age(stamp) <= time.monotonic() - BEGAN
    except (OSError, ValueError):
        return False
    return bool(recent and META in seen and seen == _seen(folder))


def _age(file: Path) -> float:
    """Seconds since a file was written, by the clock of the server that keeps it: that of this machine may differ."""
    with tempfile.NamedTemporaryFile(dir=file.parent) as now:
        return os.fstat(now.fileno()).st_mtime - file.stat().st_mtime


def check_files(folder: LocalFolder, data: DataConfig, in_full: bool = True) -> None:
    """Raises Damaged for the first file that is missing or not as it was written.

    Args:
        in_full: read the shards too, with a thread for each core that may be used; else their sizes have to do.
    """
    meta = read_meta(folder.place)
    indices = [index_of(folder.place, part, meta) for part in PARTS]
    for part in PARTS:
        read_counts(folder.place, part, meta)
    for index in indices:
        _check_sizes(folder.folder, index)
    if not in_full:
        return
    if (num_bytes := sum(int(index.size.sum()) for index in indices)) >= ANNOUNCED:
        logger.info(f"checking {size(num_bytes)} of sequences in {folder.folder}, once on this machine")
    for index in indices:
        _check_blocks(folder.folder, index, num_processes(data))


def _check_sizes(folder: Path, index: ShardIndex) -> None:
    sizes = np.bincount(index.shard, index.size, minlength=index.num_shards).astype(np.int64)
    for shard, expected in enumerate(sizes.tolist()):
        path = folder / index.layout.shard_name(shard)
        found_bytes = path.stat().st_size if path.is_file() else None
        if expected and found_bytes is None:
            raise Damaged(path, "it is missing")
        if expected and found_bytes != expected:
            raise Damaged(path, f"it has {found_bytes:,} bytes instead of {expected:,}")


def _check_blocks(folder: Path, index: ShardIndex, threads: int) -> None:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="check")  # hashing and reading let other threads run
    try:
        is_whole: Callable[[int], bool] = lambda number: _is_whole(folder, index, index.block(number))  # noqa: E731
        for number, is_sound in enumerate(pool.map(is_whole, range(len(index)))):
            if not is_sound:
                block = index.block(number)
                problem = f"its {block.size:,} bytes from {block.offset:,} on are not those that were written"
                raise Damaged(folder / index.layout.shard_name(block.shard), problem)
    finally:
        pool.shutdown(cancel_futures=True)


def _is_whole(folder: Path, index: ShardIndex, block: Block) -> bool:
    """Whether the bytes of a block are there, with its digest. Mapped, they would count as memory."""
    digest, left, path = sha256(), block.size, folder / index.layout.shard_name(block.shard)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(block.offset)
            while left and (part := file.read(min(left, READ_BYTES))):
                digest.update(part)
                left -= len(part)
    except OSError as error:
        raise Damaged(path, f"it cannot be read: {error.strerror or error}") from error
    return digest.digest() == block.digest
