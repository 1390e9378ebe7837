"""Files and folders that appear whole or not at all, locks, manifests of digests, and YAML that a run has written."""

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


def expanded(path: str) -> str:
    """A path with `~` and `~user` at its beginning as the home folders that they stand for, as a shell has them.

    Raises:
        SettingError: there is no such user.
    """
    home = os.path.expanduser(path)
    if home.startswith("~"):
        raise SettingError(f"{path} begins with ~, and {home.partition('/')[0][1:]} is no user here; give ./{path}")
    return home


def try_lock(file: IO[str], wait: bool = False) -> bool:
    """Lock an open file for this process; False where another one has it, unless this may wait.

    Raises:
        SettingError: its file system has no locks.
    """
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

    The lock goes with the process that holds it, so that a killed one blocks nobody.

    Args:
        wait: until others have left; else the context begins at once, with False where another process is in its own.

    Raises:
        SettingError: the file system has no locks.
    """
    while True:
        with path.open("a") as file:
            if not try_lock(file, wait):
                yield False
                return
            if not _is_at(file, path):  # another process has left, and removed what this one has locked
                continue
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one that has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def atomic(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield a path to create as a file or a folder; it becomes `path` in one step when the block ends without error.

    What stood at `path` is replaced. What an earlier process that was killed left half-written is removed first, so
    only one process at a time may write the same path.

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
        remove(path)
    os.replace(new, path)
    if durable:
        flush_to_disk(path.parent)


def make_folder(path: Path, setting: str) -> None:
    """Make a folder and those above it.

    Raises:
        SettingError: it lies where no folders can be made, such as in /proc; it names `setting`.
        OSError: storage that fails, or a file in the way.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise SettingError(f"{setting}: no folder can be made there ({error.strerror}): give another") from None


def remove(path: Path) -> None:
    """Remove a file or a folder with all that it holds; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def quarantine(path: Path, prefix: str = "damaged") -> Path:
    """Rename an unusable file or folder to `prefix`-NAME; returns the new path, which is numbered where it exists."""
    numbered = (f"{prefix}-{path.name}.{number}" for number in itertools.count(2))
    names = itertools.chain([f"{prefix}-{path.name}"], numbered)
    free = next(name for name in names if not os.path.lexists(path.with_name(name)))
    return path.rename(path.with_name(free))


def flush_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_overwriting(path: Path, setting: str, reads: Iterable[Path] = (), overwrite: bool = False) -> None:
    """Refuse an output in whose place something lies already.

    Args:
        setting: the output as it was given, such as `output=answers.jsonl`.
        reads: files that the command reads, which nothing may replace.
        overwrite: whether the user, or the fact that the same command wrote it, allows to replace all others.

    Raises:
        SettingError: it is read, is no file, or is there although `overwrite` is false.
    """
    if not os.path.lexists(path):
        return
    if any(_is_or_holds(path, source) for source in reads):
        raise SettingError(f"{setting}: this command reads {path}, and would write over it: give another name")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise SettingError(f"{setting}: {path} is a device or a pipe, and no file: give a file")
    if not overwrite:
        raise SettingError(f"{setting}: {path} exists: give another name, or overwrite=true to replace it")


def _is_or_holds(path: Path, source: Path) -> bool:
    """Whether a path is this file, under whatever name, or a folder that this file is in."""
    if not source.exists():
        return False
    return path.resolve() in [source.resolve(), *source.resolve().parents] or (path.exists() and path.samefile(source))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The digests of these files of a folder by their names."""
    return {name: sha256(folder / name) for name in sorted(names)}


def write_manifest(folder: Path, ready: dict[str, str] | None = None) -> None:
    """Write the SHA-256 of all files of `folder` into the last of them, SHA256SUMS, which `sha256sum -c` reads too.

    Args:
        ready: digests of some of them, by name, which are not computed again.
    """
    by_name = dict(ready or {})
    by_name |= digests(folder, [path.name for path in folder.iterdir() if path.name not in by_name])
    (folder / MANIFEST).write_text("".join(f"{digest}  {name}\n" for name, digest in by_name.items()), encoding="utf-8")


def check_manifest(folder: Path, names: Iterable[str], compared: Iterable[str] | None = None) -> None:
    """Raises Damaged unless the manifest lists exactly these files, and each of them is as it was written.

    Args:
        compared: the files whose digests are computed; None: of all.
    """
    listed = _listed(folder, set(names))
    check_digests(folder, listed if compared is None else {name: listed[name] for name in compared})


def check_digests(folder: Path, expected: dict[str, str]) -> None:
    """Raises Damaged for the first file of `folder` that is not there, or does not have its digest."""
    for name, digest in expected.items():
        if not (folder / name).is_file():
            raise Damaged(folder, f"{name} is missing")
        if sha256(folder / name) != digest:
            raise Damaged(folder, f"{name} is not as it was written: its SHA-256 differs")


def _listed(folder: Path, names: set[str]) -> dict[str, str]:
    path = folder / MANIFEST
    if not path.is_file():
        raise Damaged(folder, f"{MANIFEST} is missing")
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    pairs = [line.partition("  ") for line in lines if line]
    listed = {name: digest for digest, _, name in pairs}
    if listed.keys() != names or len(pairs) != len(names):
        raise Damaged(folder, f"{MANIFEST} does not list {', '.join(sorted(names))}")
    return listed


def bounded_text(path: Path) -> str:
    """The text of a file of YAML that a run has written: it is small, and without aliases, whose content may not be.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no text, or not what a run writes.
    """
    import yaml

    if path.stat().st_size > MAX_YAML:
        raise ValueError(f"it has more than {MAX_YAML >> 20} MB")
    text = path.read_text(encoding="utf-8")
    try:
        if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("it has aliases, which no run writes")
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(first_line(error)) from None
    return text


def read_yaml(path: Path) -> Any:
    """What such a file holds. Raises the same errors."""
    import yaml

    try:
        return yaml.safe_load(bounded_text(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(first_line(error)) from None


def read_settings(file: Path) -> dict[str, Any]:
    """The settings in config.yaml of a run; none where the file is missing, cannot be read, or holds no mapping."""
    try:
        content = read_yaml(file) if file.is_file() else None  # a pipe would be waited for
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
