"""Settings of documents that are there several times: what becomes of them, and which are alike."""

from dataclasses import dataclass
from enum import Enum


class Duplicates(Enum):
    """What becomes of documents that are there several times."""

    keep = "keep"  # nothing: they are not even counted
    count = "count"  # they are counted, and stay
    drop = "drop"  # the first of those with the same text stays
    near = "near"  # and of those with almost the same text; one that is held out before one that is trained on


@dataclass
class NearConfig:
    """When two documents are near duplicates, for `corpus.duplicates=near`."""

    threshold: float = 0.8  # least share of their shingles that they have in common (Jaccard similarity)
    shingle: int = 5  # words in a row, without case and signs, that are one shingle
    permutations: int = 128  # numbers of a MinHash signature: more of them estimate the similarity better
