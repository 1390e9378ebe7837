"""Failing storage: recognised in the errors of every library, checked before large writes, reported in one line."""

import errno
import os
import re
import shutil
from pathlib import Path

from distill.runtime.errors import StorageFailed

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A file system's own, whatever else an error says: those of a file that is already open name none.
CERTAIN = {*FULL, errno.EIO, errno.EROFS, errno.ESTALE}
# Conditions of a file system. No program can mend them, and each goes away when somebody makes room or names a folder.
# But for those above, an error has to name a file: sockets and system calls know some of these numbers, too.
CONDITIONS = {
    *CERTAIN,
    errno.EACCES,
    errno.EPERM,
    errno.EEXIST,  # a file stands where a folder should be
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENODEV,
    errno.ENXIO,
}
IN_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers put the number into the text
IN_NUMPY = re.compile(r"\d+ requested and \d+ written")  # its writer gives no reason; a full disk is the usual one
RESERVE = 1 << 20  # bytes of a file system that are left for its own tables


def storage_failure(error: BaseException, folder: str = "") -> StorageFailed | None:
    """The error as one of storage, if that is what it is or what it comes from; else None.

    Args:
        folder: the path to name where the error has none.
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    deliberate = True  # whether each error was raised `from` the next one
    while current is not None and current not in seen:
        if isinstance(current, StorageFailed):
            return current
        # What happens to be raised while another error is dealt with may be a bug: a folder that exists is no cause of
        # a KeyError. A file system that fails is one of all that follows, such as torch's error in closing a file.
        if (number := _number(current)) in (CONDITIONS if deliberate else CERTAIN):
            return StorageFailed(_line(number, _path(current) or folder))
        seen.append(current)
        deliberate = deliberate and current.__cause__ is not None
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return None


def require_room(folder: Path, num_bytes: int, what: str) -> None:
    """Raises StorageFailed where the file system of `folder` has no room for so many bytes, before any is written."""
    free = shutil.disk_usage(folder).free
    if num_bytes + RESERVE > free:
        raise StorageFailed(
            f"{folder}: {what} needs {size(num_bytes)} and {size(free)} are free: make room, or choose another folder; "
            "the same command then resumes"
        )


def size(num_bytes: float) -> str:
    """A number of bytes with its unit, such as 1.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _number(error: BaseException) -> int | None:
    """The number of the condition that an error reports; None where it may not be one of files."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in CERTAIN or _path(error) else None
    if match := IN_RUST.search(str(error)):
        return int(match[1])
    return errno.ENOSPC if isinstance(error, OSError) and IN_NUMPY.search(str(error)) else None


def _path(error: BaseException) -> str:
    name = getattr(error, "filename", None)
    return os.fsdecode(name) if isinstance(name, str | bytes) else ""


def _line(number: int, path: str) -> str:
    target = path or "a file of this run"
    free = _free(path)
    room = f", with {size(free)} free" if number in FULL and free is not None else ""
    cure = "make room" if number in FULL else "repair it"
    return f"{target}: {os.strerror(number)}{room}: {cure}, or choose another folder; the same command then resumes"


def _free(path: str) -> int | None:
    """Bytes that are free where the nearest folder above `path` lies; None where no folder can be asked."""
    for folder in Path(path).absolute().parents if path else []:
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None
