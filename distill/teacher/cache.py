"""The teacher's top-k on disk: where a cache lies, what it was made from, whether it is whole, and how it is read.

Shapes: R training rows, N positions with soft targets in all of them, n in some, K kept entries, V vocabulary.

A cache is a folder `<corpus.cache>/teacher/<key>`:

    ids          [N, K] uint16, or int32 for V > 65536: the teacher's largest entries, largest first
    log_probs    [N, K + 1] float16, at the run's temperature; the last column is the joint mass of all other entries
    offsets.npy  [R + 1] int64: the positions of row r lie at offsets[r] to offsets[r + 1], in their order
    meta.json    what the cache was made from, and checksums; written last: without it the cache is unfinished
    parts/       what is known of the parts that are done, so that an interrupted `build_cache` goes on
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill.config import TeacherCacheConfig
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.data.disk_cache import folder_of
from distill.errors import SettingError

FORMAT = 2  # raise it when the same teacher, rows and settings would give other files
MOST_PARTS = 1000
FEWEST_ROWS = 128  # of a part
COUNTED_ROWS = 1024  # at once
FILES = ("ids", "log_probs")


@dataclass(frozen=True)
class Cache:
    """One cache; `find` gives it."""

    folder: Path
    origin: dict[str, Any]  # what it is made from
    offsets: np.ndarray  # [R + 1] int64
    ready: bool  # complete and checked; else still to be made

    @property
    def top_k(self) -> int:
        return int(self.origin["top_k"])

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_positions(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_bytes(self) -> int:
        """Of the three files that are read in training."""
        return self.offsets.nbytes + sum(self.num_positions * self.stride(name) for name in FILES)

    @property
    def meta_path(self) -> Path:
        return self.folder / "meta.json"

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ids [n, K] int32 and log_probs [n, K + 1] float16 at the positions of these rows, row by row."""
        spans = [np.arange(self.offsets[row], self.offsets[row + 1]) for row in numbers]
        positions = np.concatenate(spans or [np.arange(0)])
        ids, log_probs = self._maps
        return ids[positions].astype(np.int32), log_probs[positions]

    def facts(self) -> dict[str, Any]:
        """For results.json. kept_mass: the mean share of the teacher's probability that the kept entries hold."""
        return {
            "top_k": self.top_k,
            "positions": self.num_positions,
            "bytes": self.num_bytes,
            "bytes_per_token": self.num_bytes / self.num_positions,
            **{name: self._meta[name] for name in ("kept_mass", "seconds")},
        }

    def check(self) -> None:
        """Raises SettingError where the finished files do not match their checksums and `origin`."""
        try:
            if self._meta["origin"] != self.origin:
                raise self.refusal("made from something else than its name stands for")
            for name in FILES:
                if (self.folder / name).stat().st_size != self.num_positions * self.stride(name):
                    raise self.refusal(f"damaged ({name} has the wrong size)")
            if self._meta["sha256"] != [self.digest(part) for part in range(self.num_parts)]:
                raise self.refusal("damaged (its content has changed)")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self.refusal(f"damaged ({error})") from error

    def refusal(self, what: str) -> SettingError:
        return SettingError(
            f"teacher.cache.top_k={self.top_k}: the cache {self.folder} is {what}; delete that folder, and it is made "
            "anew"
        )

    # The rows are made and checked in parts.

    @property
    def rows_per_part(self) -> int:
        return max(FEWEST_ROWS, -(-self.num_rows // MOST_PARTS))

    @property
    def num_parts(self) -> int:
        return -(-self.num_rows // self.rows_per_part)

    def rows_of(self, part: int) -> range:
        start = part * self.rows_per_part
        return range(start, min(start + self.rows_per_part, self.num_rows))

    def span_of(self, part: int) -> slice:
        """The positions of a part's rows."""
        rows = self.rows_of(part)
        return slice(int(self.offsets[rows.start]), int(self.offsets[rows.stop]))

    def digest(self, part: int) -> str:
        """sha256 of what the three files hold of a part."""
        rows, span = self.rows_of(part), self.span_of(part)
        digest = hashlib.sha256(self.offsets[rows.start : rows.stop + 1].tobytes())
        for values in self._maps:
            digest.update(values[span].data)
        return digest.hexdigest()

    # The form of the two large files.

    def dtype(self, name: str) -> np.dtype:
        small = self.origin["vocabulary"] <= 1 << 16
        return np.dtype(np.float16 if name == "log_probs" else np.uint16 if small else np.int32)

    def width(self, name: str) -> int:
        return self.top_k + (name == "log_probs")

    def stride(self, name: str) -> int:
        """Bytes of one position."""
        return self.width(name) * self.dtype(name).itemsize

    @cached_property
    def _maps(self) -> list[np.ndarray]:
        return [
            np.memmap(self.folder / name, self.dtype(name), "r", shape=(self.num_positions, self.width(name)))
            for name in FILES
        ]

    @cached_property
    def _meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = json.loads(self.meta_path.read_text(encoding="utf-8"))
        return meta


# Flat positions of a micro-batch that carry soft targets, [n] int64 in ascending order; None: all of them.
Positions = Callable[[Batch], torch.Tensor | None]


def find(
    settings: TeacherCacheConfig, origin: dict[str, Any], batches: Batches, positions: Positions, folder: str
) -> Cache:
    """The cache that these settings want: checked if it is there, else to be made by `build_cache.build`.

    Args:
        origin: everything that decides what the cache holds; what it is computed on, and how many at once, is no part.
        positions: which positions of a batch carry soft targets.
        folder: where caches are kept (`corpus.cache`).

    Raises:
        SettingError: `top_k` does not fit the vocabulary, the cache would be larger than `teacher.cache.gigabytes`, or
            the one that is there is wrong or damaged.
    """
    assert settings.top_k is not None
    if settings.top_k >= (vocab := origin["vocabulary"]):
        raise SettingError(f"teacher.cache.top_k={settings.top_k}: the vocabulary has {vocab} tokens; give fewer")
    origin = {"format": FORMAT, **origin, "top_k": settings.top_k, "rows": len(batches.rows)}
    key = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:32]
    path = folder_of(folder, "teacher", key)
    if (path / "meta.json").exists():
        return _checked(path, origin, len(batches.rows))
    cache = Cache(path, origin, _offsets(batches, positions), False)
    _check_size(cache, settings.gigabytes)
    return cache


def _checked(path: Path, origin: dict[str, Any], num_rows: int) -> Cache:
    """The finished cache at `path`. Raises SettingError where it is damaged."""
    cache = Cache(path, origin, np.zeros(1, np.int64), True)
    try:
        offsets = np.load(path / "offsets.npy")
    except (OSError, ValueError) as error:
        raise cache.refusal(f"damaged ({error})") from error
    if offsets.shape != (num_rows + 1,):
        raise cache.refusal("damaged (offsets.npy has the wrong size)")
    cache = Cache(path, origin, offsets, True)
    cache.check()
    return cache


def _check_size(cache: Cache, gigabytes: float) -> None:
    if cache.num_bytes > gigabytes * 1e9:
        raise SettingError(
            f"teacher.cache.gigabytes={gigabytes}: top_k={cache.top_k} at {cache.num_positions:,} positions takes "
            f"{cache.num_bytes / 1e9:.3g} GB; allow that much, or lower teacher.cache.top_k or corpus.rows, or set "
            "objective.soft.rows=masked"
        )


def _offsets(batches: Batches, positions: Positions) -> np.ndarray:
    counts = [np.zeros(1, np.int64)]
    length = batches.rows.shape[1]
    for start in range(0, len(batches.rows), COUNTED_ROWS):
        numbers = np.arange(start, min(start + COUNTED_ROWS, len(batches.rows)))
        flat = positions(batches.batch(numbers, 0))
        of_row = (
            np.full(len(numbers), length)
            if flat is None
            else np.bincount(flat.numpy() // length, minlength=len(numbers))
        )
        counts.append(of_row)
    return np.concatenate(counts).cumsum()
