"""Files and folders that appear whole or not at all, locks, manifests of digests, and files that nobody may change."""

import errno
import fcntl
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from distill.runtime.errors import Damaged, SettingError, first_line

MANIFEST = "SHA256SUMS"
MAX_YAML = 4 << 20  # bytes of a file: PyYAML takes seconds for one
NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}  # numbers of errors where there is no such file
CURE = "the same command checks it, makes it again where that is possible, and resumes"


def expanded(path: str) -> str:
    """A path with `~` and `~user` at its beginning as a shell has them. Raises SettingError for an unknown user."""
    home = os.path.expanduser(path)
    if home.startswith("~"):
        raise SettingError(f"{path} begins with ~, and {home.partition('/')[0][1:]} is no user here; give ./{path}")
    return home


def make_folder(path: Path, setting: str) -> None:
    """Make a folder and those above it. Raises SettingError, which names `setting`, where none can be, as in /proc."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
        raise SettingError(f"{setting}: no folder can be made there ({error.strerror}): give another") from None


def remove(path: Path) -> None:
    """Remove a file or a folder with all that it holds; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def quarantine(path: Path, prefix: str = "damaged") -> Path:
    """Rename an unusable file or folder to `prefix`-NAME; returns the new path, which is numbered where it exists."""
    endings = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{prefix}-{path.name}{ending}") for ending in endings)
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def refuse_overwriting(path: Path, setting: str, reads: Iterable[Path] = (), overwrite: bool = False) -> None:
    """Raises SettingError for an output, given as `setting`, in whose place something lies already.

    Args:
        reads: files that the command reads; nothing may replace them, nor a folder that they are in.
        overwrite: whether all others may be replaced, but for devices and pipes.
    """
    if not os.path.lexists(path):
        return
    for source in map(Path.resolve, reads):
        is_same = path.exists() and source.exists() and path.samefile(source)  # by another name, too
        if is_same or path.resolve() in source.parents:
            raise SettingError(f"{setting}: this command reads {path}, and would write over it: give another name")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise SettingError(f"{setting}: {path} is a device or a pipe, and no file: give a file")
    if not overwrite:
        raise SettingError(f"{setting}: {path} exists: give another name, or overwrite=true to replace it")


@contextmanager
def atomic(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield a path to create as a file or a folder; it becomes `path` in one step when the block ends without error.

    What stood at `path` is replaced, but for a folder in the place of a file, which is renamed. What an earlier process
    that was killed left half-written is removed first, so only one process at a time may write the same path.

    Args:
        durable: also flush everything to the disk, so that a crash of the machine leaves no name without its content.
    """
    new = path.with_name(f".{path.name}.new")
    remove(new)
    try:
        yield new
    except BaseException as error:
        with suppress(OSError):  # of a file system that fails: what it failed at is the error to report
            remove(new)
        if isinstance(error, OSError) and error.filename is None:  # of a full disk, whose error names no file
            error.filename = str(path)
        raise
    if durable:
        for written in [*new.rglob("*"), new]:
            flush_to_disk(written)
    if path.is_dir() or new.is_dir():
        remove(path) if path.is_symlink() or new.is_dir() else quarantine(path)  # a folder that no run has made
    os.replace(new, path)
    if durable:
        flush_to_disk(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with atomic(path) as new:
        new.write_text(text, encoding="utf-8")


def flush_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(file: IO[str], wait: bool = False) -> bool:
    """Lock an open file; False where another process has it, unless this may wait. Raises SettingError if none can."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if not wait and isinstance(error, BlockingIOError | PermissionError):
            return False
        raise SettingError(
            f"{file.name} cannot be locked ({error.strerror}): mount its file system with flock, or name another place"
        ) from error
    return True


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """A context in which one process of all holds the lock `path`; the file is gone when the last of them has left.

    The lock goes with the process that holds it, so that a killed one blocks nobody. Without `wait` the context begins
    at once, with False where another process is in its own. Raises SettingError where the file system has no locks.
    """
    while True:
        with path.open("a") as file:
            if not try_lock(file, wait):
                yield False
                return
            is_there = False
            with suppress(FileNotFoundError):
                is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
            if not is_there:  # another process has left, and removed what this one has locked
                continue
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
            return


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The digests of these files of a folder by their names."""
    return {name: sha256(folder / name) for name in sorted(names)}


def write_manifest(folder: Path, ready: dict[str, str] | None = None) -> None:
    """Write the SHA-256 of all files of `folder` into SHA256SUMS, for `sha256sum -c` too; `ready`: of some, by name."""
    by_name = dict(ready or {})
    by_name |= digests(folder, [path.name for path in folder.iterdir() if path.name not in by_name])
    (folder / MANIFEST).write_text("".join(f"{digest}  {name}\n" for name, digest in by_name.items()), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, str]:
    """The digests that SHA256SUMS lists, by file. Raises Damaged where there is no such file."""
    try:
        lines = (folder / MANIFEST).read_text("utf-8", errors="replace").split("\n")
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        raise Damaged(folder, f"{MANIFEST} is missing") from None
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines if line)}


def check_digests(folder: Path, expected: dict[str, str]) -> None:
    """Raises Damaged for the first file of `folder` that is not there, or does not have its digest."""
    for name, digest in expected.items():
        if not (folder / name).is_file():
            raise Damaged(folder, f"{name} is missing")
        if sha256(folder / name) != digest:
            raise Damaged(folder, f"{name} is not as it was written: its SHA-256 differs")


def read_yaml(path: Path) -> Any:
    """What a file of YAML holds that a run has written: it is small, and without aliases, whose content may not be.

    Raises OSError where it cannot be read, ValueError where it is no text, or not what a run writes.
    """
    import yaml

    if path.stat().st_size > MAX_YAML:
        raise ValueError(f"it has more than {MAX_YAML >> 20} MB")
    text = path.read_text(encoding="utf-8")
    try:
        if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("it has aliases, which no run writes")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(first_line(error)) from None


def read_settings(file: Path) -> dict[str, Any]:
    """The settings in config.yaml of a run; none where the file is missing, cannot be read, or holds no mapping."""
    try:
        content = read_yaml(file) if file.is_file() else None  # a pipe would be waited for
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
