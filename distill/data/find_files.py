"""Where files lie: the folder $DISTILL_DATA, and the files behind a path or URL that is a file, a folder or a glob."""

import glob
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

from distill.data.lines import plain_name
from distill.data.remote import RemotePath, is_url, reachable, with_states
from distill.runtime.errors import SettingError

logger = logging.getLogger(__name__)

# What the files of a split are usually called, before a dot, a dash or an underscore.
SPLITS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev", "eval", "heldout"),
    "test": ("test",),
    "validation_matched": ("validation_matched", "dev_matched"),
    "validation_mismatched": ("validation_mismatched", "dev_mismatched"),
    "unlabelled": ("unlabelled", "unlabeled", "unsupervised"),
}


def data_folder() -> Path | None:
    """The folder that the environment variable DISTILL_DATA names; None where it is not set.

    Raises:
        SettingError: there is no such folder.
    """
    root = os.environ.get("DISTILL_DATA")
    if not root:
        return None
    data = Path(root).expanduser()
    if not data.is_dir():
        raise SettingError(f"DISTILL_DATA={root}: there is no such folder; correct the variable or unset it")
    return data


def find_files(pattern: str, setting: str, below: Callable[[Path], list[Path]]) -> list[Path]:
    """The files behind a path as the user gave it, sorted by name.

    Args:
        pattern: a file, a folder or a glob, or the URL of one.
        setting: which names it, such as `corpus.path`.
        below: the files of a folder that are wanted.

    Raises:
        SettingError: there is no such file or folder, or it cannot be reached.
    """
    if is_url(pattern):
        return _remote_files(RemotePath(pattern, setting), below)
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(below(path))
    if not (files := _matching(str(path))):
        problem = f"a link to {os.readlink(path)}, where nothing is" if path.is_symlink() else "no such file or folder"
        raise SettingError(problem, setting=setting, value=pattern, cure="correct the path")
    return files


def _matching(pattern: str) -> list[Path]:
    """The files behind a glob; one that links make reachable by several names, as in circles, is there once."""
    files: dict[str, Path] = {}
    for path in sorted(map(Path, _globbed(pattern)), key=lambda path: (len(path.parts), path)):
        if path.is_file():
            files.setdefault(os.path.join(os.path.realpath(path.parent), path.name), path)
        else:
            _report_broken(path)
    return sorted(files.values())


def _globbed(pattern: str) -> Iterator[str]:
    """The paths behind a glob; `glob.glob` itself follows links that lead in a circle some forty folders deep."""
    folders, stars, rest = re.sub(r"(^|/)\*\*$", r"\1**/*", pattern).partition("**/")
    if not stars or (folders and not folders.endswith("/")):
        yield from glob.iglob(pattern)
        return
    for start in glob.glob(folders) if folders else [""]:
        for folder in _folders(start, frozenset()):
            yield from _globbed(os.path.join(glob.escape(folder), rest))


def _folders(folder: str, around: frozenset[str]) -> Iterator[str]:
    """A folder and those in it, also linked ones, but for hidden ones and those that lie around it.

    As for `glob.glob`, a folder that cannot be listed has nothing in it.
    """
    around |= {os.path.realpath(folder or ".")}
    yield folder
    with suppress(OSError):
        for name in sorted(os.listdir(folder or ".")):
            path = os.path.join(folder, name)
            if not is_hidden(name) and os.path.isdir(path) and os.path.realpath(path) not in around:
                yield from _folders(path, around)


def files_below(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a folder and the folders in it whose names end so, without hidden ones; links are followed.

    A folder that is linked twice is read once, by the first of its names; a link to nothing is named in the log.
    """
    start = "" if str(folder) == "." else str(folder)
    paths = folder.rglob("*") if isinstance(folder, RemotePath) else _walked(folder)
    return [
        path
        for path in paths
        if (path.name.lower().endswith(suffixes) or plain_name(path.name).endswith(suffixes))
        and not is_hidden(str(path)[len(start) :])
        and path.is_file()
    ]


def _walked(root: Path) -> Iterator[Path]:
    """The files below a folder, also in linked folders, each of which is entered once."""
    entered = set[tuple[int, int]]()
    for name, folders, files in os.walk(root, followlinks=True):
        if not entered:  # a folder that is not there has no files, and is none of those
            entered.add((root.stat().st_dev, root.stat().st_ino))
        folders.sort()  # which of two names of a folder is the first does not depend on the disk
        folder = Path(name)
        for path in [folder / each for each in folders if not is_hidden(each)]:
            status = path.stat()
            if (status.st_dev, status.st_ino) in entered:
                folders.remove(path.name)
            entered.add((status.st_dev, status.st_ino))
        folders[:] = [each for each in folders if not is_hidden(each)]
        for path in sorted(folder / each for each in files):
            _report_broken(path)
            yield path


def _report_broken(path: Path) -> None:
    if path.is_symlink() and not path.exists() and not is_hidden(path.name):
        logger.warning(f"{path} is a link to {os.readlink(path)}, where nothing is: it is left out")


def files_of_split(folder: Path, split: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a folder that are called like the split; all of them where none is called like any split."""
    files = sorted(files_below(folder, suffixes))
    if not any(_is_called(path.name, name) for path in files for names in SPLITS.values() for name in names):
        return files
    return [path for path in files if any(_is_called(path.name, name) for name in names_of_split(split))]


def without_other_splits(files: list[Path], folder: Path, split: str) -> list[Path]:
    """Those of the files below a folder that are not called like another split, and lie in no folder called so.

    Where all of them are of one other split, and `split` is the default, that one is meant.
    """
    start = len(str(folder)) if str(folder) != "." else 0
    wanted = names_of_split(split)
    others: dict[Path, str] = {}
    for path in files:
        parts = [part for part in str(path)[start:].split("/") if part][::-1]  # the file, then the folders around it
        named = (name for part in parts for name in _split_names(part))
        if (first := next(named, None)) is not None and first not in wanted:
            others[path] = first
    if split == "train" and len(others) == len(files) and len({*others.values()}) == 1:
        return files
    return [path for path in files if path not in others]


def has_split(files: list[Path], split: str) -> bool:
    """Whether one of the files is called like a split and nothing else."""
    return any(path.name.split(".")[0].lower() in names_of_split(split) for path in files)


def names_of_split(split: str) -> tuple[str, ...]:
    """What its files are usually called."""
    return SPLITS.get(split, (split,))


def _split_names(part: str) -> list[str]:
    """What a file or folder is called of all that splits are called, the longest first."""
    names = [name for names in SPLITS.values() for name in names if _is_called(part, name)]
    return sorted(names, key=len, reverse=True)


def _is_called(file: str, name: str) -> bool:
    stem = file.lower().removeprefix("wiki.").split(".")[0]  # WikiText has wiki.train.raw
    # GLUE has numbers of rows beside a split, in `dev_ids.tsv`.
    return stem == name or (stem.startswith((f"{name}-", f"{name}_")) and stem != f"{name}_ids")


def is_hidden(name: str) -> bool:
    """Whether a program has put this file beside the user's, as Jupyter and macOS do: copies and descriptions."""
    parts = [part for part in name.split("/") if part not in (".", "..")]
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def _remote_files(remote: RemotePath, below: Callable[[Path], list[Path]]) -> list[Path]:
    with reachable(remote.setting, remote.url):
        if remote.is_file():
            return with_states([cast(Path, remote)])
        if remote.is_dir():
            return with_states(sorted(below(cast(Path, remote))))
        files = with_states(sorted(cast(list[Path], remote.expanded()))) if glob.has_magic(remote.url) else []
    if not files:
        raise SettingError(f"{remote.setting}={remote.url}: no such file or folder; correct the URL")
    return files
