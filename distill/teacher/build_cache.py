"""The one pass of the teacher over all training sequences that makes a cache, divided between its processes.

The sequences are cut into parts; every process takes the next part that is neither done nor in another's hands. So the
ranks of a run share the work, on one machine or on several with a common file system, without a message between them;
what is done stays done when a run is killed; and machines with disks of their own make a cache each.
"""

import json
import os
import shutil
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from distill.data.batches import Batches
from distill.data.disk_cache import once
from distill.distributed import Ranks
from distill.distributed.shard import is_sharded
from distill.models.language_model import LanguageModel, OutputSpec, idle_forward
from distill.runtime.errors import SettingError
from distill.runtime.files import atomic, locked
from distill.runtime.progress import Progress
from distill.teacher.cache import Cache, CacheMeta, Positions, check_together
from distill.teacher.sampling import kept_entries, offsets_of, stored

FORWARD_TOKENS = 4096  # of one forward: the teacher keeps no activations
LOGITS_BYTES = 64 << 20  # that exist at once
WAIT = 0.2  # seconds between two looks at the parts that others have in hand


def build(
    cache: Cache, teacher: LanguageModel, batches: Batches, positions: Positions, temperature: float, ranks: Ranks
) -> None:
    """Make the cache, if it is not ready, together with all other processes that come here, and check it.

    All ranks have to call it, with the teacher on the device of its rank.

    Raises:
        SettingError: no room on the disk, or what was written does not read back.
    """
    sharded, is_missing = is_sharded(teacher), not cache.ready
    if sharded:  # all ranks compute, whichever of them finds no cache on its disk
        is_missing = float(ranks.sum(torch.tensor(float(is_missing)))) > 0
    if is_missing:
        try:
            _make_room(cache)
            with Progress("teacher cache", cache.num_positions, "tokens") as progress:
                builder = CacheBuilder(cache, teacher, batches, positions, temperature, ranks.device, progress)
                if sharded:
                    _fill_together(builder, ranks)
                else:
                    _fill_all(builder, ranks.rank * cache.num_parts // ranks.size)
            _finish(cache, teacher.precision)
        except OSError as error:
            raise SettingError(
                f"data.cache: {cache.folder} cannot be written ({error.strerror}); give another folder"
            ) from error
    check_together([cache] if is_missing else [], ranks)  # where other machines may be slower


@dataclass
class CacheBuilder:
    """Runs the teacher over the parts of a cache and writes down what is kept of it."""

    cache: Cache
    teacher: LanguageModel
    batches: Batches
    positions: Positions
    temperature: float
    device: torch.device
    progress: Progress

    def fill(self, part: int) -> None:
        """Compute a part, write it, and only then write that it is done."""
        began, sequences, span = time.monotonic(), self.cache.sequences_of(part), self.cache.span_of(part)
        at_once = max(1, FORWARD_TOKENS // self.batches.sequences.shape[1])
        pieces = []
        for start in range(sequences.start, sequences.stop, at_once):
            numbers = np.arange(start, min(start + at_once, sequences.stop))
            pieces.append(self.entries(numbers))
            self.progress.update(self.progress.n + int(self._counts(numbers).sum()))
        kept_mass = 0.0
        for name, column in self.cache.layout.columns.items():
            values = np.concatenate([piece[name] for piece in pieces])
            assert values.shape == (span.stop - span.start, column.width)
            with (self.cache.folder / name).open("r+b") as file:
                file.seek(span.start * column.stride)
                file.write(values.astype(column.dtype).tobytes())
                file.flush()
                os.fsync(file.fileno())
            if name == "log_probs":
                kept_mass = float(-np.expm1(values[:, -1].astype(np.float64)).sum())
        with atomic(_record_of(self.cache, part), durable=True) as new:
            new.write_text(json.dumps({"kept": kept_mass, "seconds": time.monotonic() - began}), encoding="utf-8")

    @torch.no_grad()
    def entries(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of the cache by name, at the positions of these sequences; ids as int64."""
        layout = self.cache.layout
        batch = self.batches.batch(numbers, 0).to(self.device)
        outputs = self.teacher(batch.inputs, batch.documents, OutputSpec(True, self.positions(batch)))
        assert outputs.head_rows is not None
        size = max(1, LOGITS_BYTES // (4 * layout.vocabulary))
        # The draws of a position depend on the cache and on where the position stands, not on who computes them.
        offsets = torch.from_numpy(offsets_of(numbers, self._counts(numbers), f"teacher sample {self.cache.key}"))
        pieces = []
        for rows, starts in zip(outputs.head_rows.split(size), offsets.to(self.device).split(size), strict=True):
            logits = self.teacher.logits(rows, layout.vocabulary)
            pieces.append(stored(kept_entries(logits, layout, self.temperature, starts), layout))
            if any(np.isnan(column).any() for column in pieces[-1].values() if column.dtype.kind == "f"):
                of_format = "" if self.teacher.precision == "fp32" else "set precision.teacher=fp32, or "
                raise SettingError(
                    f"its logits are not finite in one of the sequences {numbers[0]} to {numbers[-1]}, so that no "
                    "cache can be made of them",
                    setting="teacher",
                    cure=f"{of_format}take another teacher",
                )
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in layout.columns}

    def _counts(self, numbers: np.ndarray) -> np.ndarray:
        """How many positions each of these sequences has."""
        return self.cache.offsets[numbers + 1] - self.cache.offsets[numbers]


def _fill_all(builder: CacheBuilder, first: int) -> None:
    """Go round the parts from `first` on, until each is done, by this process or by another."""
    cache, progress = builder.cache, builder.progress
    waiting = [*range(first, cache.num_parts), *range(first)]
    while waiting:
        remaining = []
        for part in waiting:
            path = _record_of(cache, part)
            with _claim(path) as claimed:
                if path.exists():
                    span = cache.span_of(part)
                    progress.update(progress.n + span.stop - span.start)
                elif claimed:
                    builder.fill(part)
                else:
                    remaining.append(part)
        waiting = remaining
        time.sleep(WAIT if waiting else 0)


def _fill_together(builder: CacheBuilder, ranks: Ranks) -> None:
    """Fill all parts with a teacher that is sharded over the ranks, each of which computes a part of them.

    First of all parts; then, where hosts have disks of their own, of those that this host lacks. What another run does
    with the same cache at the same time may be done twice. A rank's share is by the numbers of the parts, and not of
    those that are missing, which another rank might find to be others.
    """
    for rank, size in ((ranks.rank, ranks.size), (ranks.local_rank, ranks.local_size)):
        with ranks.in_lockstep([builder.teacher], idle_forward):
            for part in range(rank, builder.cache.num_parts, size):
                if not _record_of(builder.cache, part).exists():
                    builder.fill(part)
        ranks.barrier()


def _finish(cache: Cache, precision: str) -> None:
    """Put offsets and meta.json beside the parts; one process does, the others wait. `precision`: of the teacher."""
    with once(cache.meta_path, quiet=True) as missing:
        if not missing:
            return
        parts = [json.loads(_record_of(cache, part).read_text(encoding="utf-8")) for part in range(cache.num_parts)]
        np.save(cache.folder / "offsets.npy", cache.offsets)
        meta = CacheMeta(
            origin=cache.identity,
            kept_mass=sum(part["kept"] for part in parts) / cache.num_positions,
            seconds=sum(part["seconds"] for part in parts),
            precision=precision,
            sha256=[cache.digest(part) for part in range(cache.num_parts)],
        )
        with atomic(cache.meta_path) as new:
            new.write_text(json.dumps(meta), encoding="utf-8")


def _make_room(cache: Cache) -> None:
    """Raises SettingError where the disk has no room for what is still to be written."""
    (cache.folder / "parts").mkdir(parents=True, exist_ok=True)
    files = [cache.folder / name for name in cache.layout.columns]
    for file in files:
        file.touch()
    missing = cache.num_bytes - sum(file.stat().st_blocks * 512 for file in files)
    free = shutil.disk_usage(cache.folder).free
    if missing > free:
        raise SettingError(
            f"data.cache: the teacher cache {cache.folder} takes {missing / 1e9:.3g} GB more and there is room for "
            f"{free / 1e9:.3g} GB; give another folder, or lower {cache.smaller_by}"
        )


def _record_of(cache: Cache, part: int) -> Path:
    """The record that a part is done."""
    return cache.folder / "parts" / f"{part:06d}.json"


def _claim(path: Path) -> AbstractContextManager[bool]:
    """Whether what is recorded at `path` is this process's to make; never waits."""
    return locked(path.with_suffix(".lock"), wait=False)
