"""Documents that occur several times, or almost so: found in one pass over a text before any of it is packed.

Of the documents with one text the first stays, by the order of the units of work and of the documents in them, so the
result is the same for any number of processes and hosts. Memory takes 16 bytes a document, and `BYTES_OF_DOCUMENT` for
each where near duplicates are looked for; for a text beyond that, datatrove does both before it is prepared here.

n documents, P permutations.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from distill.config.data import Duplicates, NearConfig
from distill.data.near_duplicates import Signatures, find_near, make_index, require_datasketch
from distill.data.sources import read
from distill.data.work import Work
from distill.runtime.progress import Progress, counted

DIGEST_BYTES = 16  # 10^12 documents have two of the same digest by chance with a probability of 10^-15

logger = logging.getLogger(__name__)


class Looked(NamedTuple):
    """What is known of the documents of a unit of work."""

    digests: np.ndarray  # [n] bytes
    held_out: np.ndarray  # [n] bool; empty where near duplicates are not looked for, as are their signatures
    signatures: np.ndarray  # [n, P] uint32


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
        SettingError: datasketch is not installed, or there is no memory for so many documents.
    """
    is_near = how is Duplicates.near
    if is_near:
        require_datasketch()
        make_index(near)  # which may refuse the settings
    begun = time.perf_counter()
    look_at = partial(look, near=near if is_near else None)
    with Progress("duplicates", len(work), "parts of the text") as progress:
        units = []
        for unit in pool.map(look_at, work) if pool else map(look_at, work):
            units.append(unit)
            progress.update(len(units))
    digests = np.concatenate([unit.digests for unit in units] or [np.empty(0, f"S{DIGEST_BYTES}")])
    stays = np.zeros(len(digests), bool)
    stays[np.unique(digests, return_index=True)[1]] = True
    counts = {"documents": len(digests), "exact": int((~stays).sum())}
    if is_near and units:
        signatures, is_held_out = (np.concatenate(arrays) for arrays in list(zip(*units, strict=True))[:0:-1])
        close = find_near(signatures, is_held_out, stays, near)
        stays[close] = False
        counts["near"] = len(close)
    logger.info(f"looked for duplicates in {time.perf_counter() - begun:.1f} s")
    if how is Duplicates.count:
        stays[:] = True
    else:
        counts["dropped"] = int((~stays).sum())
    bounds = np.cumsum([len(unit.digests) for unit in units])[:-1]
    return counts, tuple(np.flatnonzero(~of_unit) for of_unit in np.split(stays, bounds))


def look(unit: Work, near: NearConfig | None) -> Looked:
    """The digests of a unit's documents, and their signatures where near duplicates are looked for."""
    digests, is_held_out = list[bytes](), list[bool]()
    signatures = Signatures(near) if near is not None else None
    for document in read(unit.source, unit.shard):
        digests.append(digest_of(document.key))
        if signatures is not None:
            signatures.add(document.key)
            is_held_out.append(any(is_out for is_out, _ in unit.held_out.parts(document)))
    found = np.empty((0, 0), np.uint32) if signatures is None else signatures.array()
    return Looked(np.array(digests, f"S{DIGEST_BYTES}"), np.array(is_held_out, bool), found)


def describe_duplicates(counts: dict[str, int]) -> str:
    """Describe counts of duplicates, as `find_duplicates` gives them."""
    text = f"{counts['exact']:,} of {counted(counts['documents'], 'document')} have the text of an earlier one"
    if counts.get("near"):
        text += f", and {counts['near']:,} more are near duplicates of one"
    if not counts["exact"] + counts.get("near", 0):
        return text
    return f"{text}; {'left out' if counts.get('dropped') else 'kept (corpus.duplicates=drop leaves them out)'}"
