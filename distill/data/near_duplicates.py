"""Documents of almost the same text: MinHash signatures, and the search for similar ones among them, by datasketch.

Two documents are compared by the sets of their shingles (words in a row). The fraction of equal numbers in two
signatures estimates the fraction of the shingles that two documents have in common (Broder 1997, "On the resemblance
and containment of documents"); locality-sensitive hashing finds the candidates (Leskovec, Rajaraman, Ullman, "Mining of
Massive Datasets", chapter 3).

n documents, P permutations.
"""

import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from distill.config.data import NearConfig
from distill.runtime.errors import SettingError
from distill.runtime.host import free_memory
from distill.runtime.version import pip_install

if TYPE_CHECKING:
    from datasketch import MinHash, MinHashLSH

SEED = 1  # of the permutations: part of what decides which documents stay
SHINGLES = 10_000  # of one document that are hashed at a time
# What datasketch weighs: candidates that are no pair, which only cost a comparison, and pairs that are missed.
WEIGHTS = (0.1, 0.9)
BYTES_OF_DOCUMENT = 5 << 10  # of memory for each that stays: 4.3 kB were measured, datasketch 2.0, 128 permutations

_WORD = re.compile(r"\w+")


def require_datasketch() -> None:
    """Raises SettingError where it is not installed."""
    try:
        import datasketch  # noqa: F401
    except ImportError as error:
        raise SettingError(
            f"corpus.duplicates=near needs datasketch ({error}): {pip_install('near')}, or set "
            "corpus.duplicates=drop, which leaves out equal documents only"
        ) from error


def make_index(settings: NearConfig) -> "MinHashLSH":
    """An empty index of signatures. Raises SettingError where datasketch makes none of so few bands."""
    from datasketch import MinHashLSH

    try:
        return MinHashLSH(settings.threshold, settings.permutations, WEIGHTS)
    except ValueError as error:
        raise SettingError(
            f"corpus.near.threshold={settings.threshold} is too near to 1 for {settings.permutations} numbers of a "
            "document: lower it, raise corpus.near.permutations, or set corpus.duplicates=drop, which leaves out equal "
            "documents only"
        ) from error


def shingles(text: str, length: int) -> Iterator[bytes]:
    """So many words in a row, from each word on, without case and signs; of a shorter text all of its words.

    A text without any word is a shingle as it is.
    """
    words = _WORD.findall(text.lower()) or [text.strip()]
    for begin in range(max(len(words) - length, 0) + 1):
        yield " ".join(words[begin : begin + length]).encode("utf-8", "surrogatepass")


class Signatures:
    """The signatures of the documents of a unit, as they come in."""

    def __init__(self, settings: NearConfig) -> None:
        require_datasketch()
        import xxhash
        from datasketch import MinHash

        self.settings = settings
        self._sketch = MinHash(settings.permutations, SEED, hashfunc=xxhash.xxh32_intdigest)
        self._signatures: list[np.ndarray] = []

    def add(self, text: str) -> None:
        """The next document."""
        self._sketch.clear()
        rest = shingles(text, self.settings.shingle)
        while chunk := list(islice(rest, SHINGLES)):
            self._sketch.update_batch(chunk)
        self._signatures.append(self._sketch.digest())

    def array(self) -> np.ndarray:
        """The signatures of all documents so far, [n, P] uint32."""
        empty = np.empty((0, self.settings.permutations), np.uint32)
        return np.stack(self._signatures) if self._signatures else empty


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
    _require_memory(len(stays))
    index = _Index(signatures, settings)
    order = np.concatenate([np.flatnonzero(stays & is_held_out), np.flatnonzero(stays & ~is_held_out)])
    return np.array([document for document in order.tolist() if index.has_near(document)], np.int64)


class _Index:
    """The documents that stay, by their signatures."""

    def __init__(self, signatures: np.ndarray, settings: NearConfig) -> None:
        from datasketch import MinHash

        self.signatures, self.threshold = signatures, settings.threshold
        self._like = MinHash(settings.permutations, SEED)
        self._lsh = make_index(settings)

    def has_near(self, document: int) -> bool:
        """Whether a document is near to one that stays; if not, it stays too."""
        signature = np.array(self.signatures[document])
        sketch = self._sketch(signature)
        for candidate in self._lsh.query(sketch):
            if np.mean(self.signatures[candidate] == signature) >= self.threshold:
                return True
        self._lsh.insert(document, sketch, check_duplication=False)
        return False

    def _sketch(self, values: np.ndarray) -> "MinHash":
        from datasketch import MinHash

        return MinHash(hashvalues=values, permutations=self._like.permutations, scheme=self._like.scheme)


def _require_memory(documents: int) -> None:
    """Raises SettingError where so many documents might not fit into half of what is free."""
    free = free_memory()
    if documents * BYTES_OF_DOCUMENT > free / 2:
        raise SettingError(
            f"corpus.duplicates=near: {documents:,} documents may take {documents * BYTES_OF_DOCUMENT / 1e9:.3g} GB of "
            f"memory, and {free / 1e9:.3g} GB are free: set corpus.duplicates=drop, give a smaller corpus, or take "
            "them out by datatrove before"
        )
