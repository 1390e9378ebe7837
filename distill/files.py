"""Files and folders that appear whole or not at all, whatever kills the process that writes them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic(path: Path, durable: bool = False) -> Iterator[Path]:
    """Give a path to create as a file or a folder; it becomes `path` in one step when the block ends without error.

    What stood at `path` is replaced. What an earlier process that was killed left half-written is removed first, so
    only one process at a time may write the same path.

    Args:
        durable: also flush everything to the disk, so that a crash of the machine leaves no name without its content.
    """
    new = path.with_name(f".{path.name}.new")
    remove(new)
    try:
        yield new
    except BaseException:
        remove(new)
        raise
    if durable:
        for written in [*new.rglob("*"), new]:
            flush_to_disk(written)
    if path.is_dir():
        remove(path)
    os.replace(new, path)
    if durable:
        flush_to_disk(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that it holds; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
