"""Stateless random streams from one seed: numbers that are a pure function of (seed, purpose, indices).

A counter-based generator has no state to save: the mask of row 17 in epoch 2, the order of an epoch or the dropout of
step 900 can be recomputed at any time, on any rank, after any interruption. The mixing function is SplitMix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

import zlib

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FEISTEL_ROUNDS = 6


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, elementwise on uint64."""
    with np.errstate(over="ignore"):
        x = x + GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def key(seed: int, purpose: str, *indices: int | np.ndarray) -> np.ndarray:
    """A uint64 for every element of the broadcast `indices`, one stream per `purpose`."""
    h = _mix(np.asarray(seed, np.int64).astype(np.uint64) ^ np.uint64(zlib.crc32(purpose.encode())) << np.uint64(32))
    for index in indices:
        h = _mix(h ^ _mix(np.asarray(index).astype(np.uint64)))
    return h


def uniform(keys: np.ndarray) -> np.ndarray:
    """Doubles in the open interval (0, 1), one for every key."""
    # 52 bits: with 53 the half would be rounded away, and the largest key would give 1.
    return ((keys >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def shuffled(positions: np.ndarray, size: int, order: np.ndarray) -> np.ndarray:
    """Where `positions` (int64, each below `size`) land in the permutation of range(size) named by the key `order`.

    A Feistel network over the next even number of bits, walked until the value is below `size` again: a permutation
    that can be evaluated at any position without being held in memory, whatever the size of the corpus.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)

    def permute(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & low
        for round_number in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(right ^ _mix(order ^ np.uint64(round_number))) & low)
        return (left << half) | right

    out = permute(positions.astype(np.uint64))
    while (outside := out >= size).any():
        out[outside] = permute(out[outside])
    return out.astype(np.int64)
