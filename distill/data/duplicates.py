"""Documents that occur several times, found by digests of their texts in bounded memory.

Whoever reads a unit of work writes the digests of its documents to `<stem>.digests.npy`. Those of the units of a group
are merged into one sorted file. Documents with the same digest are then found range by range of the digests, over all
groups at once, so that what is in memory at a time does not grow with the corpus. The result is the same for any number
of processes and hosts: of the documents with one digest the first counts as the original, by the order of the units
and of the documents in them.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np

from distill.data.shards.destination import WORK, Destination, LocalFolder
from distill.runtime.errors import Damaged
from distill.runtime.files import atomic
from distill.runtime.progress import counted

DIGEST_BYTES = 16  # 10^12 documents have two of the same digest by chance with a probability of 10^-15
DOCUMENT_ID = np.dtype([("unit", "<u4"), ("number", "<u4")])  # of the unit in the text, and of the document in its unit
RECORD = np.dtype([("digest", f"S{DIGEST_BYTES}"), ("document", DOCUMENT_ID)])
AT_ONCE = 64 << 20  # bytes of records that are sorted in memory at a time


def digest_of(text: str) -> bytes:
    """The digest of a text without the blanks at its ends; a document of several parts has one for them all."""
    return blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def digests_path(stem: str | Path) -> Path:
    """The file of a unit with the digests [n] of its documents, in their order."""
    return Path(f"{stem}.digests.npy")


def write_digests(stem: str | Path, digests: Sequence[bytes]) -> None:
    """Write the digests of the documents of a unit, given in the order of the documents."""
    save(digests_path(stem), np.array(digests, f"S{DIGEST_BYTES}"))


def save(path: Path, array: np.ndarray) -> None:
    with atomic(path) as new, new.open("wb") as file:
        np.save(file, array)


def load(path: Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
    """The array in a file. Raises FileNotFoundError, and Damaged where it is not as it was written."""
    try:
        array: np.ndarray = np.load(path, mmap_mode)
    except FileNotFoundError:
        raise
    except (ValueError, EOFError, OSError) as error:
        raise Damaged(path, "it is not the array that was written") from error
    return array


def document_ids_of(counts: Sequence[int], first: int) -> np.ndarray:
    """The ids [n] (`DOCUMENT_ID`) of all documents of consecutive units, `first` being the index of the first."""
    document_ids = np.empty(sum(counts), DOCUMENT_ID)
    document_ids["unit"] = np.repeat(np.arange(first, first + len(counts)), counts)
    document_ids["number"] = np.concatenate([np.arange(0), *map(np.arange, counts)])
    return document_ids


def merge_digests(stems: Sequence[str | Path], first: int) -> np.ndarray:
    """Merge the digests of the units of a group into records [n] (`RECORD`), sorted by digest, then by document id."""
    digests = [load(digests_path(stem)) for stem in stems]
    records = np.empty(sum(map(len, digests)), RECORD)
    records["document"] = document_ids_of([len(unit) for unit in digests], first)
    records["digest"] = np.concatenate([np.empty(0, f"S{DIGEST_BYTES}"), *digests])
    return records[np.argsort(records["digest"], kind="stable")]


def find_repeated(files: Sequence[Path], at_once: int = AT_ONCE) -> Iterator[np.ndarray]:
    """Find all documents whose text came before; gives their ids [n], range by range of the digests.

    Args:
        files: with the records of each group, in the order of the groups.
        at_once: bytes of records that are in memory at a time.
    """
    groups: list[np.ndarray] = [load(file, "r") for file in files]
    ranges = -(-sum(map(len, groups)) * RECORD.itemsize // at_once)
    for number in range(ranges):
        low, high = (bound * 2**64 // ranges for bound in (number, number + 1))
        yield _find_repeated_between(groups, low, high)


def _find_repeated_between(groups: Sequence[np.ndarray], low: int, high: int) -> np.ndarray:
    """Find the repeated ones whose digest begins with 64 bits from `low` to below `high`."""
    records = np.concatenate([group[_first_from(group, low) : _first_from(group, high)] for group in groups])
    digests = records["digest"].copy()
    order = np.argsort(digests, kind="stable")  # within a digest they stay in the order of the groups
    digests = digests[order]
    document_ids: np.ndarray = records["document"][order[1:][digests[1:] == digests[:-1]]]
    return document_ids


def _first_from(records: np.ndarray, low: int) -> int:
    """The number of records whose digest begins with less than `low`."""
    if low >= 2**64:
        return len(records)
    return bisect_left(records, low.to_bytes(8, "big").rstrip(b"\0"), key=lambda record: bytes(record["digest"]))


# What several hosts share.


def records_name(number: int) -> str:
    """The file of a group's records in the folder of the sequences."""
    return f"{WORK}/{number:05d}.digests.npy"


def fetch_files(folder: Destination, names: Sequence[str], scratch: Path) -> list[Path]:
    """Fetch published files; returns their paths on this machine. Those at a URL are copied to its folder `scratch`."""
    if isinstance(folder, LocalFolder):
        return [folder.folder / name for name in names]
    paths = [scratch / name.replace("/", "-") for name in names]
    for name, path in zip(names, paths, strict=True):
        if not path.exists():
            with atomic(path) as new:
                new.write_bytes(folder.read(name))
    return paths


def count_duplicates(folder: Destination, num_groups: int, scratch: Path) -> dict[str, int]:
    """Count the documents of all groups, and those that have the text of an earlier one."""
    files = fetch_files(folder, [records_name(number) for number in range(num_groups)], scratch)
    documents = sum(len(load(file, "r")) for file in files)
    return {"documents": documents, "exact": sum(map(len, find_repeated(files)))}


def describe_duplicates(counts: dict[str, int]) -> str:
    """Describe counts of duplicates, as `count_duplicates` and `FirstPass.find` give them."""
    text = f"{counts['exact']:,} of {counted(counts['documents'], 'document')} have the text of an earlier one"
    if counts.get("near"):
        text += f", and {counts['near']:,} more are near duplicates of one"
    if not counts["exact"] + counts.get("near", 0):
        return text
    return f"{text}; {'left out' if counts.get('dropped') else 'kept (corpus.duplicates=drop leaves them out)'}"


# What is left out of the units that this host packs.


def dropped_path(stem: str | Path) -> Path:
    """The file of a unit with the sorted indices of its documents that are left out."""
    return Path(f"{stem}.dropped.npy")


def write_dropped(stems: Iterable[str | Path], document_ids: np.ndarray) -> None:
    """Write for each unit of the text, by its stem, which documents are to be left out, from their ids."""
    document_ids = np.sort(document_ids, order=("unit", "number"))
    for unit, stem in enumerate(stems):
        begin, end = np.searchsorted(document_ids["unit"], [unit, unit + 1])
        dropped_path(stem).parent.mkdir(parents=True, exist_ok=True)
        save(dropped_path(stem), document_ids["number"][begin:end])


def read_dropped(stem: str | Path) -> frozenset[int]:
    """The indices of the documents of a unit that are left out; none where duplicates were not searched."""
    path = dropped_path(stem)
    return frozenset(load(path).tolist()) if path.exists() else frozenset()
