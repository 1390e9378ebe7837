"""The folder $DISTILL_DATA, and the files behind a path or URL that is a file, a folder or a glob."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from distill.data.remote import file_system, is_url, is_web, reachable, retried
from distill.runtime.errors import SettingError

# Endings of files that are unpacked as they are read, and what fsspec calls their compression.
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd", ".lz4": "lz4"}
# What the files of a split are usually called, before a dot, a dash or an underscore.
SPLITS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev", "eval", "heldout"),
    "test": ("test",),
    "validation_matched": ("validation_matched", "dev_matched"),
    "validation_mismatched": ("validation_mismatched", "dev_mismatched"),
    "unlabelled": ("unlabelled", "unlabeled", "unsupervised"),
}


class File(NamedTuple):
    """A file of text."""

    place: str  # path or URL
    size: int  # stored bytes; 0: its server does not report it
    below: str = ""  # its name within the folder that it was found in; empty where it was named itself

    @property
    def name(self) -> str:
        return file_name(self.place)


def file_name(place: str) -> str:
    """The name of the file at a path or URL."""
    return (place.partition("?")[0] if is_url(place) and is_web(place) else place).rpartition("/")[2]


def plain_name(place: str) -> str:
    """The name of a file in small letters, without the ending of a compression: `A.TXT.gz` -> `a.txt`."""
    name = file_name(place).lower()
    return next((name.removesuffix(ending) for ending in COMPRESSED if name.endswith(ending)), name)


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


def find_files(pattern: str, setting: str, endings: tuple[str, ...]) -> list[File]:
    """The files behind a path as the user gave it, sorted by name; of a folder those that end so and are not hidden.

    Args:
        pattern: a file, a folder or a glob, or the URL of one.
        setting: which names it, such as `corpus.path`.

    Raises:
        SettingError: there is no such file or folder, or it cannot be reached.
    """
    with reachable(setting, pattern):
        found = _found(pattern, setting)
    if found is None:
        raise SettingError("no such file or folder", setting=setting, value=pattern, cure="correct the path")
    return sorted(
        (file for file in found if not file.below or _is_wanted(file, endings)), key=lambda file: file.place.split("/")
    )


def _is_wanted(file: File, endings: tuple[str, ...]) -> bool:
    ends = file.name.lower().endswith(endings) or plain_name(file.name).endswith(endings)
    return ends and not is_hidden(file.below)


def _found(pattern: str, setting: str) -> list[File] | None:
    """All files behind it; None where nothing is there."""
    system, path = file_system(pattern, setting)
    if is_web(pattern):  # a page is a folder, and what it has links to are its files
        is_folder = pattern.endswith("/")
        is_file = not is_folder and "*" not in pattern
    else:
        is_file = bool(retried(lambda: system.isfile(path), pattern))
        is_folder = not is_file and bool(retried(lambda: system.isdir(path), pattern))
    if is_file:
        size = retried(lambda: system.info(path), pattern).get("size") or 0
        return [File(pattern if is_url(pattern) else path, size)]
    if is_folder and not is_url(pattern):
        return [File(place, os.path.getsize(place), os.path.relpath(place, path)) for place in _walked(path)]
    found = retried(lambda: (system.find if is_folder else system.glob)(path, detail=True), pattern)
    fixed = len(path) if is_folder else len(re.split(r"[*?\[]", path)[0])  # characters that all have in common
    files = []
    for name, info in found.items():
        if (info.get("type") != "directory" if is_url(pattern) else os.path.isfile(name)) and not is_hidden(
            name[fixed:].lstrip("/")
        ):
            place = system.unstrip_protocol(name) if is_url(pattern) else name
            if is_url(pattern) and not is_web(pattern):  # where fsspec has one of several names, as s3 of s3a
                place = f"{pattern.partition('://')[0]}://{place.partition('://')[2]}"
            files.append(File(place, info.get("size") or 0, name[fixed:].lstrip("/") if is_folder else ""))
    return files if is_folder else files or None


def _walked(root: str) -> Iterator[str]:
    """The files below a folder of this machine, also in linked folders, each of which is entered once."""
    entered = {os.path.realpath(root)}
    for folder, folders, files in os.walk(root, followlinks=True):
        for name in sorted(folders):
            place = os.path.realpath(os.path.join(folder, name))
            if is_hidden(name) or place in entered:
                folders.remove(name)
            entered.add(place)
        folders.sort()
        yield from (path for name in files if os.path.isfile(path := os.path.normpath(os.path.join(folder, name))))


def of_split(files: Iterable[File], split: str) -> list[File]:
    """The files of a folder that are called like the split; all of them where none is called like any split."""
    files = [*files]
    if not any(_is_called(file.name, name) for file in files for names in SPLITS.values() for name in names):
        return files
    return [file for file in files if not file.below or any(_is_called(file.name, name) for name in _names_of(split))]


def without_other_splits(files: list[File], split: str) -> list[File]:
    """Those of the files of a folder that are not called like another split, and lie in no folder called so.

    Where all of them are of one other split, and `split` is the default, that one is meant.
    """
    others: dict[File, str] = {}
    for file in files:
        parts = file.below.split("/")[::-1]  # the file, then the folders around it
        called = (name for part in parts for name in _split_names(part))
        if (first := next(called, None)) is not None and first not in _names_of(split):
            others[file] = first
    if split == "train" and len(others) == len(files) and len({*others.values()}) == 1:
        return files
    return [file for file in files if file not in others]


def has_split(files: Iterable[File], split: str) -> bool:
    """Whether one of the files, or a folder that they lie in, is called like a split and nothing else."""
    parts = {part for file in files for part in (file.name, *file.below.split("/"))}
    return any(part.split(".")[0].lower() in _names_of(split) for part in parts)


def _names_of(split: str) -> tuple[str, ...]:
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
