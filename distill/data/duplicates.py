"""Documents that occur several times, or almost so: found in one pass over a text before any of it is packed.

Of the documents with one text the first stays, by the order of the units of work and of the documents in them, so the
result is the same for any number of processes and hosts. Memory takes 16 bytes a document, and about 5 kB for each
where near duplicates are looked for; for a text beyond that, datatrove does both before it is prepared here.

Near duplicates are found by datasketch. Two documents are compared by the sets of their shingles (words in a row). The
fraction of equal numbers in two MinHash signatures estimates the fraction of the shingles that two documents have in
common (Broder 1997, "On the resemblance and containment of documents"); locality-sensitive hashing finds the candidates
(Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", chapter 3).

n documents, P permutations.
"""

import logging
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from distill.config.data import Duplicates, NearConfig
from distill.data.sources import read
from distill.data.work import Work
from distill.runtime.errors import SettingError
from distill.runtime.host import free_memory
from distill.runtime.progress import Progress, counted
from distill.runtime.version import pip_install

if TYPE_CHECKING:
    from datasketch import MinHash, MinHashLSH

DIGEST_BYTES = 16  # 10^12 documents have two of the same digest by chance with a probability of 10^-15
SEED = 1  # of the permutations: part of what decides which documents stay
SHINGLES = 10_000  # of one document that are hashed at a time
# What datasketch weighs: candidates that are no pair, which only cost a comparison, and pairs that are missed.
WEIGHTS = (0.1, 0.9)
BYTES_OF_DOCUMENT = 5 << 10  # of memory for each that stays: 4.3 kB were measured, datasketch 2.0, 128 permutations
_WORD = re.compile(r"\w+")

logger = logging.getLogger(__name__)


def digest_of(text: str) -> bytes:
    """The digest of a text without the blanks at its ends; a document of several parts has one for them all."""
    return blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def find_duplicates(
    work: Sequence[Work], how: Duplicates, near: NearConfig, pool: Executor | None
) -> tuple[dict[str, int], tuple[np.ndarray, ...]]:
    """Counts of duplicates, and the indices of the documents of each unit of work that are to be left out, [k] each.

    The counts are of documents, all that were read; exact, those of them whose text came before; near, further ones
    that are near duplicates of one that stays; dropped, those of them that are left out.

    Raises:
        SettingError: datasketch is not installed or refuses the settings, or there is no memory for so many documents.
    """
    is_near = how is Duplicates.near
    if is_near:
        make_lsh(near)  # which may refuse the settings
    begun = time.perf_counter()
    look_at = partial(look, near=near if is_near else None)
    with Progress("duplicates", len(work), "units of the text") as progress:
        units = []
        for unit in pool.map(look_at, work) if pool else map(look_at, work):
            units.append(unit)
            progress.update(len(units))
    digests = np.concatenate([found for found, _, _ in units] or [np.empty(0, f"S{DIGEST_BYTES}")])
    stays = np.zeros(len(digests), bool)
    stays[np.unique(digests, return_index=True)[1]] = True
    counts = {"documents": len(digests), "exact": int((~stays).sum())}
    if is_near and units:
        _, is_held_out, signatures = map(np.concatenate, zip(*units, strict=True))
        close = find_near(signatures, is_held_out, stays, near)
        stays[close] = False
        counts["near"] = len(close)
    logger.info(f"looked for duplicates in {time.perf_counter() - begun:.1f} s")
    if how is Duplicates.count:
        stays[:] = True
    else:
        counts["dropped"] = int((~stays).sum())
    bounds = np.cumsum([len(found) for found, _, _ in units])[:-1]
    return counts, tuple(np.flatnonzero(~of_unit) for of_unit in np.split(stays, bounds))


def look(unit: Work, near: NearConfig | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The digests of a unit's documents [n], which are held out [n] bool, and their signatures [n, P] uint32.

    The last two are empty where near duplicates are not looked for.
    """
    digests, is_held_out, signatures = list[bytes](), list[bool](), list[np.ndarray]()
    sketch = None if near is None else _sketch(near)
    for document in read(unit.source, unit.shard):
        digests.append(digest_of(document.key))
        if near is not None and sketch is not None:
            sketch.clear()
            rest = shingles(document.key, near.shingle)
            while chunk := list(islice(rest, SHINGLES)):
                sketch.update_batch(chunk)
            signatures.append(sketch.digest())
            is_held_out.append(any(is_out for is_out, _ in unit.held_out.parts(document)))
    width = 0 if near is None else near.permutations
    found = np.array(signatures, np.uint32).reshape(len(signatures), width)
    return np.array(digests, f"S{DIGEST_BYTES}"), np.array(is_held_out, bool), found


def shingles(text: str, length: int) -> Iterator[bytes]:
    """So many words in a row, from each word on, without case and signs; of a shorter text all of its words.

    A text without any word is a shingle as it is.
    """
    words = _WORD.findall(text.lower()) or [text.strip()]
    for begin in range(max(len(words) - length, 0) + 1):
        yield " ".join(words[begin : begin + length]).encode("utf-8", "surrogatepass")


def find_near(signatures: np.ndarray, is_held_out: np.ndarray, stays: np.ndarray, settings: NearConfig) -> np.ndarray:
    """The indices [m] of documents that are near duplicates of ones that stay.

    Documents that are held out come first: what is near to one of them leaves the training text. Then they stay or go
    in the order of the text. In memory is about `BYTES_OF_DOCUMENT` for each document that stays.

    Args:
        signatures: [n, P] uint32.
        is_held_out: [n] bool.
        stays: [n] bool; those that are gone already are equal to earlier ones.

    Raises:
        SettingError: there is no memory for that.
    """
    needed, free = len(stays) * BYTES_OF_DOCUMENT, free_memory()
    if needed > free / 2:
        raise SettingError(
            f"{len(stays):,} documents may take {needed / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free",
            setting="corpus.duplicates", value="near",
            cure="set corpus.duplicates=drop, give a smaller corpus, or take them out by datatrove before",
        )  # fmt: skip
    from datasketch import MinHash

    lsh, like, close = make_lsh(settings), _sketch(settings), list[int]()
    for document in np.concatenate(
        [np.flatnonzero(stays & is_held_out), np.flatnonzero(stays & ~is_held_out)]
    ).tolist():
        signature = np.array(signatures[document])
        sketch = MinHash(hashvalues=signature, permutations=like.permutations, scheme=like.scheme)
        if any(np.mean(signatures[other] == signature) >= settings.threshold for other in lsh.query(sketch)):
            close.append(document)
        else:
            lsh.insert(document, sketch, check_duplication=False)
    return np.array(close, np.int64)


def make_lsh(settings: NearConfig) -> "MinHashLSH":
    """An empty index of signatures. Raises SettingError without datasketch, or where it makes none of so few bands."""
    try:
        from datasketch import MinHashLSH

        return MinHashLSH(settings.threshold, settings.permutations, WEIGHTS)
    except ImportError as error:
        raise SettingError(
            f"needs datasketch ({error})", setting="corpus.duplicates", value="near",
            cure=f"{pip_install('near')}, or set corpus.duplicates=drop, which leaves out equal documents only",
        ) from error  # fmt: skip
    except ValueError as error:
        raise SettingError(
            f"too near to 1 for {settings.permutations} numbers of a document",
            setting="corpus.near.threshold", value=settings.threshold,
            cure="lower it, or raise corpus.near.permutations",
        ) from error  # fmt: skip


def _sketch(settings: NearConfig) -> "MinHash":
    import xxhash
    from datasketch import MinHash

    return MinHash(settings.permutations, SEED, hashfunc=xxhash.xxh32_intdigest)


def describe_duplicates(counts: dict[str, int]) -> str:
    """Describe counts of duplicates, as `find_duplicates` gives them."""
    text = f"{counts['exact']:,} of {counted(counts['documents'], 'document')} have the text of an earlier one"
    if counts.get("near"):
        text += f", and {counts['near']:,} more are near duplicates of one"
    if not counts["exact"] + counts.get("near", 0):
        return text
    return f"{text}; {'left out' if counts.get('dropped') else 'kept (corpus.duplicates=drop leaves them out)'}"
