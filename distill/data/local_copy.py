"""A copy of a token cache on storage of the node itself, made once per node."""

import json
import logging
import os
import shutil
import time
from pathlib import Path

from distill.data.disk_cache import folder_of, once
from distill.runtime.errors import SettingError
from distill.runtime.files import atomic

logger = logging.getLogger(__name__)

NOTE = "copied.json"  # beside the copied files: how long it took, for the processes that did not do it


def local_copy(folder: Path, local: str, max_bytes: int = 1 << 62) -> Path:
    """A folder below `local` with the files of `folder`, copied there unless they are there already.

    Files of more than `max_bytes` together stay where they are: it is `folder` then, which is read in blocks.

    One process of a node copies while the others wait. The copy gets its name when it is whole and on the disk, and it
    is made again where a file is missing or has another size.

    Raises:
        SettingError: `local` cannot be written, or has no room for the files.
    """
    sizes = _sizes(folder)
    num_bytes = sum(sizes.values())
    if num_bytes > max_bytes:
        return folder
    target = folder_of(local, "copies", folder.name, "data.local")

    def is_whole() -> bool:
        return _seconds(target) is not None and sizes.items() <= _sizes(target).items()

    with once(target, is_whole) as missing:
        if missing:
            logger.info(f"copying {num_bytes:,} bytes of tokens to {target}")
            try:
                _copy(folder, target, num_bytes)
            except OSError as error:
                raise SettingError(
                    f"data.local={local}: {folder} cannot be copied there ({error}); make room, give another "
                    "folder, or leave data.local out"
                ) from error
    seconds = _seconds(target) or 0.0
    rate = num_bytes / max(seconds, 1e-9) / 1e6
    logger.info(
        f"tokens are read from {target}: {num_bytes:,} bytes, copied in {seconds:.1f} s, {rate:,.0f} MB a second"
    )
    return target


def _seconds(copy: Path) -> float | None:
    """How long a copy took to make; None where its note is missing or damaged."""
    try:
        return float(json.loads((copy / NOTE).read_bytes())["seconds"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file; none where there is no such folder, or where another process is removing it."""
    try:
        return {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()}
    except OSError:
        return {}


def _copy(folder: Path, target: Path, num_bytes: int) -> None:
    begun = time.perf_counter()
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise OSError(f"{free:,} bytes are free, {num_bytes:,} are needed")
    with atomic(target, durable=True) as new:
        new.mkdir()
        for name in _sizes(folder):
            shutil.copyfile(folder / name, new / name)
        seconds = time.perf_counter() - begun
        (new / NOTE).write_text(json.dumps({"bytes": num_bytes, "seconds": seconds}))
