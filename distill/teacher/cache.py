"""What is kept of a teacher on disk: where a cache lies, what it was made from, whether it is whole, how it is read.

Shapes: R training sequences, N positions with soft targets in all of them, n in some, M entries kept exactly, K draws,
V vocabulary.

A cache is a folder `<data.cache>/teacher/<key>`:

    ids          [N, M] uint16, or int32 for V > 65536: the teacher's largest entries, largest first
    log_probs    [N, M + 1] float16, at the run's temperature; the last column is the joint mass of all other entries
    draws        [N, K] as ids: tokens drawn from all others, as `sampling` describes
    neg_entropy  [N, 1] float16: the sum of p log p, where there are draws
    offsets.npy  [R + 1] int64: the positions of sequence r are at offsets[r] to offsets[r + 1], in their order
    meta.json    what the cache was made from, and checksums; written last: without it the cache is unfinished
    parts/       the records of the parts that are done, so that an interrupted `build_cache` resumes

Files of width 0 are left out. The key is a digest of contents: of the teacher's weights and tokenizer, of the sequences
and masks, and of the settings that decide what is kept. No path, device or number format is part of it (but for int8,
which gives other probabilities), so that the folder can be copied to another machine's `data.cache` and is found there.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch

from distill.config.settings import TeacherCacheConfig
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.data.disk_cache import folder_of
from distill.distributed import Ranks
from distill.models.language_model import NO_OUTPUTS
from distill.runtime.errors import SettingError
from distill.runtime.files import FileInUse
from distill.teacher.distributions import TopK
from distill.teacher.layout import Layout, layout_of
from distill.teacher.output import TeacherOutput, Wanted
from distill.teacher.sampling import as_samples

FORMAT = 2  # raise it when the same teacher, sequences and settings would give other files
MAX_PARTS = 1000
FEWEST_SEQUENCES = 128  # of a part
COUNTED_SEQUENCES = 1024  # at once


class CacheMeta(TypedDict):
    """The content of meta.json."""

    origin: dict[str, Any]  # what the cache is made from
    sha256: list[str]  # of each part
    kept_mass: float  # the mean fraction of the probability that the entries hold which are kept exactly
    seconds: float  # of all parts, on whatever machine
    precision: str  # the number format that the teacher ran in


@dataclass(frozen=True)
class Cache:
    """One cache; `find` gives it."""

    folder: Path
    identity: dict[str, Any]  # what it is made from
    offsets: np.ndarray  # [R + 1] int64
    layout: Layout  # what is kept of a position
    ready: bool  # complete; else still to be made
    setting: str = "teacher.cache"  # what error lines call its settings

    @property
    def smaller_by(self) -> str:
        """The setting that makes it smaller soonest."""
        return f"{self.setting}.{self.layout.largest}"

    @property
    def key(self) -> str:
        """Its name among the caches of any machine."""
        return self.folder.name

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_positions(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_bytes(self) -> int:
        """The bytes of the files that are read in training."""
        return self.offsets.nbytes + self.num_positions * self.layout.position_bytes

    @property
    def meta_path(self) -> Path:
        return self.folder / "meta.json"

    def read(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """The columns by name at the positions of these sequences, sequence by sequence; token ids as int32."""
        spans = [slice(int(self.offsets[row]), int(self.offsets[row + 1])) for row in numbers]
        columns = {}
        for name, column in self.layout.columns.items():
            data = bytearray().join([self._bytes(name, span) for span in spans])
            self._files[name].require_unchanged()
            values = np.frombuffer(data, column.dtype).reshape(-1, column.width)
            columns[name] = values if values.dtype == np.float16 else values.astype(np.int32)
        return columns

    def open(self) -> None:
        """Raises SettingError where a file is missing."""
        try:
            _ = self._files
        except OSError as error:
            raise self.refusal(f"damaged ({error})") from error

    def check(self) -> None:
        """Raises SettingError where the finished files do not match their checksums and `identity`."""
        try:
            if self.meta["origin"] != self.identity:
                raise self.refusal("made from something else than its name stands for")
            if lacking := CacheMeta.__required_keys__ - self.meta.keys():
                raise self.refusal(f"damaged ({self.meta_path.name} has no {', '.join(sorted(lacking))})")
            for name, column in self.layout.columns.items():
                if (self.folder / name).stat().st_size != self.num_positions * column.stride:
                    raise self.refusal(f"damaged ({name} has the wrong size)")
            if self.meta["sha256"] != [self.digest(part) for part in range(self.num_parts)]:
                raise self.refusal("damaged (its content has changed)")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self.refusal(f"damaged ({error})") from error

    def refusal(self, what: str) -> SettingError:
        return SettingError(
            f"{self.setting}.{self.layout.title}: the cache {self.folder} is {what}; delete that folder, and it is "
            "made anew"
        )

    # The sequences are made and checked in parts.

    @property
    def sequences_per_part(self) -> int:
        return max(FEWEST_SEQUENCES, -(-self.num_sequences // MAX_PARTS))

    @property
    def num_parts(self) -> int:
        return -(-self.num_sequences // self.sequences_per_part)

    def sequences_of(self, part: int) -> range:
        start = part * self.sequences_per_part
        return range(start, min(start + self.sequences_per_part, self.num_sequences))

    def span_of(self, part: int) -> slice:
        """The positions of a part's sequences."""
        sequences = self.sequences_of(part)
        return slice(int(self.offsets[sequences.start]), int(self.offsets[sequences.stop]))

    def digest(self, part: int) -> str:
        """sha256 of what the files hold of a part."""
        sequences, span = self.sequences_of(part), self.span_of(part)
        digest = hashlib.sha256(self.offsets[sequences.start : sequences.stop + 1].tobytes())
        for name in self.layout.columns:
            digest.update(self._bytes(name, span))
        return digest.hexdigest()

    def _bytes(self, name: str, span: slice) -> bytes:
        """What the file of a column holds of these positions."""
        stride = self.layout.columns[name].stride
        return self._files[name].read(span.start * stride, (span.stop - span.start) * stride)

    @cached_property
    def _files(self) -> dict[str, FileInUse]:
        """The columns. Opened when they are first read: then they are finished."""
        return {name: FileInUse(self.folder / name) for name in self.layout.columns}

    @cached_property
    def meta(self) -> CacheMeta:
        """What its meta.json has; of one that is ready."""
        meta: CacheMeta = json.loads(self.meta_path.read_text(encoding="utf-8"))
        return meta


# Flat positions of a micro-batch that carry soft targets, [n] int64 in ascending order; None: all of them.
Positions = Callable[[Batch], torch.Tensor | None]


class CachedTeacher:
    """Reads the entries of a batch's sequences; they are at the positions that carry soft targets, in their order."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def read_ahead(self, batch: Batch) -> Batch:
        numbers = batch.row_ids[:0] if batch.is_dummy else batch.row_ids
        columns = self.cache.read(numbers)
        return batch.with_teacher_data(**{name: torch.from_numpy(values) for name, values in columns.items()})

    def outputs(self, window: list[Batch], spec_of: Wanted) -> Iterator[TeacherOutput]:
        layout = self.cache.layout
        for batch in window:
            data = batch.teacher_data
            source = as_samples(data, layout) if layout.sampled else TopK(data["ids"], data["log_probs"])
            yield TeacherOutput(source, NO_OUTPUTS)


def find(
    settings: TeacherCacheConfig,
    identity: dict[str, Any],
    batches: Batches,
    positions: Positions,
    folder: str,
    setting: str = "teacher.cache",
) -> Cache:
    """The cache of these settings: `check_together` checks one that is there, `build_cache.build` makes it else.

    Args:
        identity: everything that decides what the cache holds; what it is computed on, and how many at once, is no
            part.
        positions: which positions of a batch carry soft targets.
        folder: where caches are kept (`data.cache`).
        setting: what error lines call these settings.

    Raises:
        SettingError: `top_k` does not fit the vocabulary, or the cache would be larger than `teacher.cache.gigabytes`,
            or the offsets of the one that is there are damaged.
    """
    layout = layout_of(settings, identity["vocabulary"])
    if layout.top_k >= layout.vocabulary:
        raise SettingError(f"{setting}.top_k={layout.top_k}: the vocabulary has {layout.vocabulary} tokens; give fewer")
    identity = {"format": FORMAT, **identity, "top_k": layout.top_k, "rows": len(batches.sequences)}
    if layout.sampled:
        identity |= {"sampled": layout.sampled, "sample_seed": settings.seed}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    path = folder_of(folder, "teacher", key)
    if (path / "meta.json").exists():
        return _opened(path, identity, layout, len(batches.sequences), setting)
    cache = Cache(path, identity, _offsets(batches, positions), layout, False, setting)
    _check_size(cache, settings.gigabytes)
    return cache


def check_together(caches: Sequence[Cache], ranks: Ranks) -> None:
    """Check finished caches: one rank of each machine reads them, and all learn of damage. All ranks call this.

    Raises:
        SettingError: a file does not match its checksum or the settings.
    """
    damage = ""
    try:
        for cache in caches:
            cache.open()  # before they are read: what is written to them from now on is noticed by all ranks
            if ranks.local_rank == 0:
                cache.check()
    except SettingError as error:
        damage = str(error)
    ranks.barrier()  # reading may take longer than ranks wait in an exchange
    if found := next(filter(None, ranks.gather(damage)), None):
        raise SettingError(found)


def _opened(path: Path, identity: dict[str, Any], layout: Layout, num_sequences: int, setting: str) -> Cache:
    """The finished cache at `path`. Raises SettingError where its offsets are damaged."""
    cache = Cache(path, identity, np.zeros(1, np.int64), layout, True, setting)
    try:
        offsets = np.load(path / "offsets.npy")
    except (OSError, ValueError, EOFError) as error:
        raise cache.refusal(f"damaged ({error})") from error
    if offsets.shape != (num_sequences + 1,):
        raise cache.refusal("damaged (offsets.npy has the wrong size)")
    return Cache(path, identity, offsets, layout, True, setting)


def _check_size(cache: Cache, gigabytes: float) -> None:
    if cache.num_bytes > gigabytes * 1e9:
        raise SettingError(
            f"{cache.setting}.gigabytes={gigabytes}: {cache.layout.title} at {cache.num_positions:,} positions takes "
            f"{cache.num_bytes / 1e9:.3g} GB; allow that much, or lower {cache.smaller_by} or "
            "corpus.max_sequences, or set objective.soft.positions=masked"
        )


def _offsets(batches: Batches, positions: Positions) -> np.ndarray:
    counts = [np.zeros(1, np.int64)]
    length = batches.sequences.shape[1]
    for start in range(0, len(batches.sequences), COUNTED_SEQUENCES):
        numbers = np.arange(start, min(start + COUNTED_SEQUENCES, len(batches.sequences)))
        flat = positions(batches.batch(numbers, 0))
        of_row = (
            np.full(len(numbers), length)
            if flat is None
            else np.bincount(flat.numpy() // length, minlength=len(numbers))
        )
        counts.append(of_row)
    return np.concatenate(counts).cumsum()
