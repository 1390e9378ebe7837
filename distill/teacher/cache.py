"""What is kept of a teacher on disk: its layout, where it lies, what it was made from, and how training reads it.

Shapes: R training sequences, N positions with soft targets in all of them, n in some, M entries kept exactly, K draws,
V vocabulary, H width of a hidden state.

A cache is a folder `<data.cache>/teacher/<key>`:

    part-00000.bin  records of some sequences, one for each position, behind a digest of them (`HEADER`)
    offsets.npy     [R + 1] int64: the positions of sequence r are at offsets[r] to offsets[r + 1], in their order
    meta.json       what the cache was made from; written last: without it the cache is unfinished

The key is a digest of contents: of the teacher's weights and tokenizer, of the sequences and masks, and of the settings
that decide what is kept. No path, device or number format is part of it, so that the folder can be copied to another
machine's `data.cache` and is found there.
"""

import fcntl
import hashlib
import io
import json
import logging
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from mmap import mmap
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from distill.config.models import KEPT
from distill.config.settings import TeacherCacheConfig
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.data.disk_cache import folder_of
from distill.data.file_maps import read_rows, state_of
from distill.distributed import Ranks
from distill.models.language_model import LAST, NO_OUTPUTS, LanguageModel, Outputs, OutputSpec
from distill.runtime.errors import SettingError, StorageFailed
from distill.teacher.distributions import TopK
from distill.teacher.output import TeacherOutput, Wanted
from distill.teacher.sampling import as_samples

FORMAT = 2  # raise it when the same teacher, sequences and settings would give other records
META, OFFSETS = "meta.json", "offsets.npy"
MEASURED = Struct("<dd")  # of a part: the sum of the probability that its exact entries hold, and seconds it took
HEADER = 32 + MEASURED.size  # bytes of a part: the SHA-256 of all behind it, and `MEASURED`
PARTS, PART_BYTES = 128, 64 << 20  # so many parts, or more that are about so large ...
FEWEST_SEQUENCES = 128  # ... of so many sequences at least
COUNTED_SEQUENCES = 1024  # at once
BF16 = np.int16  # the bits of numbers in bf16, which numpy lacks; no other field has this type
SMALL_VOCABULARY = 1 << 16  # ids of more tokens do not fit into 16 bits
AGAIN = "the same command makes it again and resumes"

logger = logging.getLogger(__name__)

# Flat positions of a micro-batch that carry soft targets, [n] int64 in ascending order; None: all of them.
Positions = Callable[[Batch], torch.Tensor | None]


@dataclass(frozen=True)
class Layout:
    """What is kept of a position.

    Attributes:
        top_k: M, the largest entries that are kept exactly; 0: none.
        sampled: K, the tokens that are drawn from all others; 0: none, and all others share one entry.
        vocabulary: V.
        states: H of the last hidden state, which then is all that is kept; 0: it is not kept.
    """

    top_k: int
    sampled: int
    vocabulary: int
    states: int = 0

    @cached_property
    def record(self) -> np.dtype:
        """A position, without gaps between its fields.

        ids [M]: the teacher's largest entries, largest first. log_probs [M + 1]: at the run's temperature, the last of
        all other entries together. draws [K]: tokens drawn from all others, as `sampling` describes. neg_entropy [1]:
        the sum of p log p, where there are draws. states [H]: the last hidden state.
        """
        if self.states:
            return np.dtype([("states", BF16, (self.states,))])
        ids, half = np.uint16 if self.vocabulary <= SMALL_VOCABULARY else np.int32, np.float16
        exact = [("ids", ids, (self.top_k,)), ("log_probs", half, (self.top_k + 1,))]
        drawn = [("draws", ids, (self.sampled,)), ("neg_entropy", half, (1,))]
        return np.dtype(exact * bool(self.top_k) + drawn * bool(self.sampled))


class CacheMeta(BaseModel):
    """The content of meta.json."""

    origin: dict[str, Any]  # what the cache is made from
    offsets: str  # SHA-256 of offsets.npy
    kept_mass: float  # the mean fraction of the probability that the entries hold which are kept exactly
    seconds: float  # of all parts, on whatever machine
    precision: str  # the number format that the teacher ran in


@dataclass(frozen=True)
class Cache:
    """One cache, whose sequences are made and verified in parts; `find` gives it."""

    folder: Path
    identity: dict[str, Any]  # what it is made from
    offsets: np.ndarray  # [R + 1] int64
    layout: Layout  # what is kept of a position
    ready: bool  # complete; else some of it is still to be made
    setting: str = "teacher.cache"  # what error lines call its settings

    @property
    def key(self) -> str:
        """Its name among the caches of any machine."""
        return self.folder.name

    @property
    def num_positions(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_bytes(self) -> int:
        """The bytes that are read in training."""
        return self.offsets.nbytes + self.num_positions * self.layout.record.itemsize

    @cached_property
    def meta(self) -> CacheMeta:
        """What its meta.json has, once it is finished."""
        return CacheMeta.model_validate_json((self.folder / META).read_bytes())

    @cached_property
    def sequences_per_part(self) -> int:
        parts = max(PARTS, -(-self.num_bytes // PART_BYTES))
        return max(FEWEST_SEQUENCES, -(-(len(self.offsets) - 1) // parts))

    @property
    def num_parts(self) -> int:
        return -(-(len(self.offsets) - 1) // self.sequences_per_part)

    def sequences_of(self, part: int) -> range:
        start = part * self.sequences_per_part
        return range(start, min(start + self.sequences_per_part, len(self.offsets) - 1))

    def positions_of(self, part: int) -> int:
        """How many positions a part's sequences have."""
        sequences = self.sequences_of(part)
        return int(self.offsets[sequences.stop] - self.offsets[sequences.start])

    def path_of(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}.bin"

    def bytes_of(self, part: int) -> int:
        """The size of a part's file."""
        return HEADER + self.positions_of(part) * self.layout.record.itemsize

    def has(self, part: int) -> bool:
        """Whether the file of a part is there, and as long as it should be."""
        path = self.path_of(part)
        return path.exists() and path.stat().st_size == self.bytes_of(part)


class CachedTeacher:
    """Reads the records of a batch's sequences; they are at the positions that carry soft targets, in their order.

    Last hidden states become distributions by the teacher's head, which is all that runs of it.
    A part is verified when it is first read, by one process of a machine: the ranks share, in a file without a name,
    the state that each part's file was in when it was verified.
    """

    def __init__(self, cache: Cache, ranks: Ranks, head: LanguageModel | None = None) -> None:
        """All ranks have to call it. `head`: of a model by `head_alone`, where last hidden states are kept."""
        self.cache, self.head = cache, head
        self._row = np.dtype((np.void, cache.layout.record.itemsize))  # numpy copies records field by field
        self._lock = Lock()  # a process's own locks of a file do not keep its threads apart
        shared = Path(tempfile.gettempdir()) / f"distill-{ranks.broadcast(secrets.token_hex(16))}"
        self._shared = shared.open("w+b")
        self._shared.truncate(size := 24 * cache.num_parts)
        ranks.barrier()
        shared.unlink(missing_ok=True)
        self._states = np.ndarray((cache.num_parts, 3), np.int64, mmap(self._shared.fileno(), size))

    def read_ahead(self, batch: Batch) -> Batch:
        records = self.read(batch.row_ids[:0] if batch.is_dummy else batch.row_ids)
        names = records.dtype.names or ()
        return batch.with_teacher_data(**{f"{self.cache.key}.{name}": _tensor(records[name]) for name in names})

    def outputs(self, window: list[Batch], spec_of: Wanted) -> Iterator[TeacherOutput]:
        layout = self.cache.layout
        for batch in window:
            data = {name: batch.teacher_data[f"{self.cache.key}.{name}"] for name in layout.record.names or ()}
            if self.head is not None:
                yield _of_states(data["states"], self.head, batch, spec_of(batch))
                continue
            source = as_samples(data) if layout.sampled else TopK(data["ids"], data["log_probs"])
            yield TeacherOutput(source, NO_OUTPUTS)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """The records [n] at the positions of these sequences, sequence by sequence.

        Raises:
            StorageFailed: a part is damaged, or cannot be read.
        """
        cache = self.cache
        counts = cache.offsets[indices + 1] - cache.offsets[indices]
        begins = cache.offsets[indices] - (counts.cumsum() - counts)
        positions = np.repeat(begins, counts) + np.arange(counts.sum())
        records = np.empty(len(positions), self._row)
        parts = np.repeat(indices // cache.sequences_per_part, counts)
        for part in np.unique(parts).tolist():
            here = parts == part
            records[here] = self._read_part(part, positions[here] - cache.offsets[cache.sequences_of(part).start])
        return records.view(cache.layout.record)

    def _read_part(self, part: int, positions: np.ndarray) -> np.ndarray:
        path = str(self.cache.path_of(part))
        while True:
            size, changed, inode = self._states[part].tolist()
            found = read_rows(path, (size, changed, inode) if size else None, self._row, positions, HEADER)
            if found is not None:
                return found
            self._verify(part)

    def _verify(self, part: int) -> None:
        """Notes the state of a part's file in which it is as it was written.

        Raises:
            StorageFailed: it is damaged, for which it is removed, or gone, or cannot be read.
        """
        path = self.cache.path_of(part)
        with self._lock:
            fcntl.lockf(self._shared, fcntl.LOCK_EX, 1, part)  # a killed process blocks nobody
            try:
                with path.open("rb", buffering=0) as file:
                    state = state_of(file.fileno())
                    if tuple(self._states[part].tolist()) == state:  # verified by another process
                        return
                    is_whole = file.read(32) == hashlib.file_digest(file, "sha256").digest()
                if not is_whole or state[0] != self.cache.bytes_of(part):
                    path.unlink(missing_ok=True)
                    raise StorageFailed(f"{path} is damaged (its SHA-256 differs), and removed: {AGAIN}")
                self._states[part] = state
            except FileNotFoundError:
                raise StorageFailed(f"{path} is missing, or was damaged and removed: {AGAIN}") from None
            except OSError as error:
                raise StorageFailed(f"{path} cannot be read ({error.strerror}): {AGAIN}") from error
            finally:
                fcntl.lockf(self._shared, fcntl.LOCK_UN, 1, part)


def _of_states(states: torch.Tensor, head: LanguageModel, batch: Batch, spec: OutputSpec) -> TeacherOutput:
    """What is requested, from states [n, H] at all non-padding positions or at those that are requested alone."""
    rows, hidden = batch.rows_at(states, spec.positions), {LAST: batch.whole(states)} if spec.layers else {}
    outputs = Outputs(None, hidden, last_rows=rows if spec.last_rows else None)
    return TeacherOutput(head.head_of(rows) if spec.head else None, outputs)


def _tensor(column: np.ndarray) -> torch.Tensor:
    """A field of records [n, width]; token ids as int32."""
    if column.dtype == BF16:
        return torch.from_numpy(column).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(column, np.float16 if column.dtype == np.float16 else np.int32))


def find(
    settings: TeacherCacheConfig,
    identity: dict[str, Any],
    batches: Batches,
    positions: Positions,
    folder: str,
    setting: str = "teacher.cache",
) -> Cache:
    """The cache of these settings; `build_cache.build` makes what is missing of it.

    Args:
        identity: everything that decides what the cache holds; what it is computed on, and how many at once, is no
            part.
        positions: which positions of a batch carry soft targets.
        folder: where caches are kept (`data.cache`).
        setting: what error lines call these settings.

    Raises:
        SettingError: `top_k` does not fit the vocabulary, or the cache would be larger than `teacher.cache.gigabytes`.
    """
    width = identity["hidden_states"] if settings.hidden_states else 0
    layout = Layout(settings.top_k or 0, settings.sampled or 0, identity["vocabulary"], width)
    if layout.top_k >= layout.vocabulary:
        raise SettingError(f"{setting}.top_k={layout.top_k}: the vocabulary has {layout.vocabulary} tokens; give fewer")
    identity = {"format": FORMAT, **identity, "top_k": layout.top_k, "rows": len(batches.sequences)}
    if layout.sampled:
        identity |= {"sampled": layout.sampled, "sample_seed": settings.seed}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    path = folder_of(folder, "teacher", key)
    if (finished := _finished(Cache(path, identity, np.zeros(1, np.int64), layout, True, setting))) is not None:
        return finished
    cache = Cache(path, identity, _offsets(batches, positions), layout, False, setting)
    if cache.num_bytes > settings.gigabytes * 1e9:
        kept = settings.given(*KEPT)
        shown = " with ".join(f"{name}={str(value).lower()}" for name, value in kept.items())
        lower = " or ".join([*(f"{setting}.{name}" for name in kept if not width), "corpus.max_sequences"])
        instead = f", or keep {setting}.sampled in place of hidden_states" if width else ""
        raise SettingError(
            f"{shown} at {cache.num_positions:,} positions takes {cache.num_bytes / 1e9:.3g} GB",
            setting=f"{setting}.gigabytes",
            value=settings.gigabytes,
            cure=f"allow that much, lower {lower}{instead}, or keep losses of a masked model to positions: masked",
        )
    return cache


def _finished(cache: Cache) -> Cache | None:
    """The cache with its offsets where all of it is there; None where it is not, or some of it is damaged."""
    if not (cache.folder / META).exists():
        return None
    with suppress(OSError, ValueError):
        content = (cache.folder / OFFSETS).read_bytes()
        if hashlib.sha256(content).hexdigest() == cache.meta.offsets:
            whole = replace(cache, offsets=np.load(io.BytesIO(content)))
            if all(map(whole.has, range(whole.num_parts))):
                return whole
    logger.warning(f"the cache {cache.folder} is damaged: what is not as it was written is made again")
    return None


def _offsets(batches: Batches, positions: Positions) -> np.ndarray:
    counts = [np.zeros(1, np.int64)]
    length = batches.sequences.shape[1]
    for start in range(0, len(batches.sequences), COUNTED_SEQUENCES):
        numbers = np.arange(start, min(start + COUNTED_SEQUENCES, len(batches.sequences)))
        flat = positions(batches.batch(numbers, 0))
        counts.append(
            np.full(len(numbers), length)
            if flat is None
            else np.bincount(flat.numpy() // length, minlength=len(numbers))
        )
    return np.concatenate(counts).cumsum()


def put(path: Path, content: bytes) -> None:
    """Write a file at once, though other processes put the same one there."""
    new = path.with_name(f".{path.name}-{secrets.token_hex(6)}.new")
    new.write_bytes(content)
    new.replace(path)


@contextmanager
def writing(cache: Cache) -> Iterator[None]:
    """Turns an error of the disk into a SettingError."""
    try:
        yield
    except OSError as error:
        problem = f"{cache.folder} cannot be written ({error.strerror})"
        raise SettingError(problem, setting="data.cache", cure="give another folder") from error
