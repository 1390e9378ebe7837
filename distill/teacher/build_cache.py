"""The one pass of the teacher over all training sequences that makes a cache, divided between the ranks.

Each part is a file that appears whole, so what is done stays done when a run is killed, and two runs that make the same
cache at the same time replace a file by its like.
"""

import hashlib
import io
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distill.data.batches import Batches
from distill.distributed import Ranks
from distill.models.language_model import LanguageModel, OutputSpec, idle_forward
from distill.runtime.errors import SettingError
from distill.runtime.progress import Progress
from distill.teacher.cache import HEADER, MEASURED, META, OFFSETS, Cache, CacheMeta, Positions, put, writing
from distill.teacher.sampling import kept_entries, offsets_of, stored
from distill.teacher.served import ServedRecorder

FORWARD_TOKENS = 4096  # of one forward: the teacher keeps no activations
LOGITS_BYTES = 64 << 20  # that exist at once
OLD = 3600.0  # seconds without a change, after which a file that is being written was left by a killed process


@dataclass(frozen=True)
class Recorder:
    """What a cache keeps of a teacher, by sequence."""

    cache: Cache
    teacher: LanguageModel  # on the device of this rank
    batches: Batches
    positions: Positions
    temperature: float | None  # None: last hidden states are kept, which have none
    device: torch.device

    @property
    def precision(self) -> str:
        return self.teacher.precision

    @property
    def models(self) -> list[Any]:
        return [self.teacher]

    @property
    def at_once(self) -> int:
        return max(1, FORWARD_TOKENS // self.batches.sequences.shape[1])

    @torch.no_grad()
    def records(self, indices: np.ndarray) -> np.ndarray:
        """The records [n] at the positions of these sequences. Raises SettingError where one is not finite."""
        layout, batch = self.cache.layout, self.batches.batch(indices, 0).to(self.device)
        spec = OutputSpec(not layout.states, self.positions(batch), last_rows=layout.states > 0)
        outputs = self.teacher(batch.inputs, batch.documents, spec)
        if outputs.last_rows is not None:
            states, what = outputs.last_rows.bfloat16(), "last hidden states"
            records, is_finite = (
                stored({"states": states.view(torch.int16)}, layout.record),
                bool(states.isfinite().all()),
            )
        else:
            records, what = self._entries(outputs.head_rows, indices), "logits"
            is_finite = not any(np.isnan(records[name]).any() for name in layout.record.names or ())
        if not is_finite:
            setting = self.cache.setting.removesuffix(".cache")
            name = "precision.teacher" if setting == "teacher" else f"{setting}.precision"
            of_format = "" if self.teacher.precision == "fp32" else f"set {name}=fp32, or "
            problem = f"its {what} are not finite in one of the sequences {indices[0]} to {indices[-1]}"
            raise SettingError(problem, setting=setting, cure=f"{of_format}take another teacher")
        return records

    def _entries(self, rows: torch.Tensor | None, indices: np.ndarray) -> np.ndarray:
        """The records [n] of the head's input [n, E] at the positions of these sequences."""
        layout, offsets = self.cache.layout, self.cache.offsets
        assert rows is not None and self.temperature is not None
        # The draws of a position depend on the cache and on where the position stands, not on who computes them.
        counts = offsets[indices + 1] - offsets[indices]
        draws = torch.from_numpy(offsets_of(indices, counts, f"teacher sample {self.cache.key}")).to(self.device)
        size = max(1, LOGITS_BYTES // (4 * layout.vocabulary))
        found = []
        for few, starts in zip(rows.split(size), draws.split(size), strict=True):
            logits = self.teacher.logits(few, layout.vocabulary)
            entries = kept_entries(logits, layout.top_k, layout.sampled, self.temperature, starts)
            found.append(stored(entries, layout.record))
        return np.concatenate(found)


def build(recorder: Recorder | ServedRecorder, ranks: Ranks) -> None:
    """Make what is missing of a cache; all ranks have to call it.

    Each rank makes some of all parts, and then, where hosts have disks of their own, some of those that its host lacks.
    A rank's parts follow from their numbers, and not from which are missing, in which ranks might differ.

    Raises:
        SettingError: no room on the disk, it cannot be written, or the teacher gives no numbers.
    """
    cache = recorder.cache
    if not float(ranks.sum(torch.tensor(float(not cache.ready)))):
        return
    ranks.agree(lambda: _make_room(cache))
    ranks.agree(lambda: _make_parts(recorder, range(ranks.rank, cache.num_parts, ranks.size), ranks))
    ranks.agree(lambda: _make_parts(recorder, range(ranks.local_rank, cache.num_parts, ranks.local_size), ranks))
    ranks.agree(lambda: None if ranks.local_rank else _finish(cache, recorder.precision))


def _make_parts(recorder: Recorder | ServedRecorder, parts: range, ranks: Ranks) -> None:
    """Those of these parts that are missing; ranks that shard the teacher compute their forwards together."""
    cache = recorder.cache
    missing = [part for part in parts if not cache.has(part)]
    with ranks.in_lockstep(recorder.models, idle_forward):
        if not missing:
            return
        with Progress("teacher cache", sum(map(cache.positions_of, missing)), "tokens") as progress:
            for part in missing:
                _make_part(recorder, part, progress)


def _make_part(recorder: Recorder | ServedRecorder, part: int, progress: Progress) -> None:
    began, cache, sequences, found = time.monotonic(), recorder.cache, recorder.cache.sequences_of(part), []
    for start in range(sequences.start, sequences.stop, recorder.at_once):
        found.append(recorder.records(np.arange(start, min(start + recorder.at_once, sequences.stop))))
        progress.update(progress.n + len(found[-1]))
    records = np.concatenate(found)
    kept = float(-np.expm1(records["log_probs"][:, -1].astype(np.float64)).sum()) if cache.layout.top_k else 0.0
    content = MEASURED.pack(kept, time.monotonic() - began) + records.tobytes()
    with writing(cache):
        put(cache.path_of(part), hashlib.sha256(content).digest() + content)


def _finish(cache: Cache, precision: str) -> None:
    """Put offsets and meta.json beside the parts. `precision`: of the teacher."""
    with writing(cache):
        measured = []
        for part in range(cache.num_parts):
            with cache.path_of(part).open("rb") as file:
                measured.append(MEASURED.unpack(file.read(HEADER)[-MEASURED.size :]))
        np.save(array := io.BytesIO(), cache.offsets)
        content = array.getvalue()
        meta = CacheMeta(
            origin=cache.identity,
            offsets=hashlib.sha256(content).hexdigest(),
            kept_mass=sum(kept for kept, _ in measured) / cache.num_positions,
            seconds=sum(seconds for _, seconds in measured),
            precision=precision,
        )
        put(cache.folder / OFFSETS, content)
        put(cache.folder / META, meta.model_dump_json().encode())


def _make_room(cache: Cache) -> None:
    """Raises SettingError where the disk has no room for what is still to be written."""
    with writing(cache):
        cache.folder.mkdir(exist_ok=True)
        for left in cache.folder.glob(".*.new"):
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > OLD:
                    left.unlink()
        missing = sum(cache.bytes_of(part) for part in range(cache.num_parts) if not cache.has(part))
        free = shutil.disk_usage(cache.folder).free
    if missing > free:
        raise SettingError(
            f"data.cache: the teacher cache {cache.folder} takes {missing / 1e9:.3g} GB more and there is room for "
            f"{free / 1e9:.3g} GB; give another folder, or keep less ({cache.setting}, corpus.max_sequences)"
        )
