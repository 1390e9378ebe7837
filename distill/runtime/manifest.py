"""A manifest of a folder: the SHA-256 of each of its files, in a text that `sha256sum -c` reads too."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from distill.runtime.errors import Damaged

MANIFEST = "SHA256SUMS"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The digests of these files of a folder by their names."""
    return {name: sha256(folder / name) for name in sorted(names)}


def write_manifest(folder: Path, ready: dict[str, str] | None = None) -> None:
    """Write the digests of all files of `folder` into SHA256SUMS, the last of its files.

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
    listed = _read(folder, set(names))
    check_digests(folder, listed if compared is None else {name: listed[name] for name in compared})


def check_digests(folder: Path, expected: dict[str, str]) -> None:
    """Raises Damaged for the first file of `folder` that is not there, or does not have its digest."""
    for name, digest in expected.items():
        if not (folder / name).is_file():
            raise Damaged(folder, f"{name} is missing")
        if sha256(folder / name) != digest:
            raise Damaged(folder, f"{name} is not as it was written: its SHA-256 differs")


def _read(folder: Path, names: set[str]) -> dict[str, str]:
    path = folder / MANIFEST
    if not path.is_file():
        raise Damaged(folder, f"{MANIFEST} is missing")
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    pairs = [line.partition("  ") for line in lines if line]
    listed = {name: digest for digest, _, name in pairs}
    if listed.keys() != names or len(pairs) != len(names):
        raise Damaged(folder, f"{MANIFEST} does not list {', '.join(sorted(names))}")
    return listed
