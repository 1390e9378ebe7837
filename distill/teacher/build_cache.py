"""The one pass of the teacher over all training rows that makes a cache, shared between all processes that want it.

The rows are cut into parts; every process takes the next part that is neither done nor in another's hands. So the ranks
of a run share the work, on one machine or on several with a common file system, without a message between them; what is
done stays done when a run is killed; and machines with disks of their own make a cache each.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill.backends import Workers
from distill.config import Config
from distill.data.batches import Batches
from distill.data.disk_cache import once
from distill.errors import SettingError
from distill.kernels.precision import autocast
from distill.models.load import hidden_states, logits
from distill.objective.losses import strongest
from distill.progress import Progress
from distill.teacher.cache import FILES, Cache, taught_places

FORWARD_TOKENS = 4096  # of one forward: the teacher keeps no activations
LOGITS_BYTES = 64 << 20  # that exist at once
LOWEST = -6e4  # log-probability: float16 ends at -65504
WAIT = 0.2  # seconds between two looks at the parts that others have in hand


def build(cache: Cache, config: Config, teacher: Any, batches: Batches, backend: Workers) -> None:
    """Make the cache, if it is not ready, together with all other processes that come here, and check it.

    All ranks have to call it, with the teacher on the backend's device.

    Raises:
        SettingError: no room on the disk, or what was written does not read back.
    """
    if not cache.ready:
        try:
            _make_room(cache, config.corpus.cache)
            with Progress("teacher cache", cache.num_positions, "tokens", quiet=backend.rank != 0) as progress:
                asker = Asker(cache, config, teacher, batches, backend.device, progress)
                _fill_all(asker, backend.rank * cache.num_parts // backend.size)
            _finish(cache)
        except OSError as error:
            raise SettingError(
                f"corpus.cache={config.corpus.cache}: {cache.folder} cannot be written ({error.strerror}); give another"
            ) from error
        cache.check()
    backend.barrier()  # other machines may be slower


@dataclass
class Asker:
    """Asks the teacher for the parts of a cache and writes down what it says."""

    cache: Cache
    config: Config
    teacher: Any
    batches: Batches
    device: torch.device
    progress: Progress

    def fill(self, part: int) -> None:
        """Ask for a part, write it, and only then write that it is done."""
        began, rows, span = time.monotonic(), self.cache.rows_of(part), self.cache.span_of(part)
        at_once = max(1, FORWARD_TOKENS // self.batches.rows.shape[1])
        answers = []
        for start in range(rows.start, rows.stop, at_once):
            answers.append(self.ask(np.arange(start, min(start + at_once, rows.stop))))
            self.progress.update(self.progress.done + len(answers[-1][0]))
        ids, log_probs = (np.concatenate(pieces) for pieces in zip(*answers, strict=True))
        assert len(ids) == span.stop - span.start
        for name, values in zip(FILES, (ids, log_probs), strict=True):
            with (self.cache.folder / name).open("r+b") as file:
                file.seek(span.start * self.cache.stride(name))
                file.write(values.astype(self.cache.dtype(name)).tobytes())
                file.flush()
                os.fsync(file.fileno())
        kept = float(-np.expm1(log_probs[:, -1].astype(np.float64)).sum())
        _write(_path_of(self.cache, part), {"kept": kept, "seconds": time.monotonic() - began})

    @torch.inference_mode()
    def ask(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ids [n, K] int64 and log_probs [n, K + 1] float16 at the positions of these rows."""
        objective, vocab = self.config.objective, self.cache.origin["vocabulary"]
        batch = self.batches.batch(numbers, 0).to(self.device)
        with autocast(self.config.precision.teacher, self.device):
            hidden = hidden_states(self.teacher, batch.inputs, batch.attention).flatten(0, 1)
            rows = hidden[taught_places(batch, objective.soft.rows)]
            pieces = [
                strongest(logits(self.teacher, chunk, vocab), self.cache.top_k, objective.temperature)
                for chunk in rows.split(max(1, LOGITS_BYTES // (4 * vocab)))
            ]
        ids, log_probs = (torch.cat(values) for values in zip(*pieces, strict=True))
        return ids.cpu().numpy(), log_probs.clamp(min=LOWEST).half().cpu().numpy()


def _fill_all(asker: Asker, first: int) -> None:
    """Go round the parts from `first` on, until each is done, by this process or by another."""
    cache, progress = asker.cache, asker.progress
    waiting = [*range(first, cache.num_parts), *range(first)]
    while waiting:
        others = []
        for part in waiting:
            path = _path_of(cache, part)
            with _claim(path) as ours:
                if path.exists():
                    span = cache.span_of(part)
                    progress.update(progress.done + span.stop - span.start)
                elif ours:
                    asker.fill(part)
                else:
                    others.append(part)
        waiting = others
        time.sleep(WAIT if waiting else 0)


def _finish(cache: Cache) -> None:
    """Put offsets and meta.json beside the parts; one process does, the others wait."""
    with once(cache.meta_path, log=lambda _: None) as missing:
        if not missing:
            return
        parts = [json.loads(_path_of(cache, part).read_text(encoding="utf-8")) for part in range(cache.num_parts)]
        np.save(cache.folder / "offsets.npy", cache.offsets)
        meta = {
            "origin": cache.origin,
            "kept_mass": sum(part["kept"] for part in parts) / cache.num_positions,
            "seconds": sum(part["seconds"] for part in parts),
            "sha256": [cache.digest(part) for part in range(cache.num_parts)],
        }
        _write(cache.meta_path, meta)


def _make_room(cache: Cache, setting: str) -> None:
    """Raises SettingError where the disk has no room for what is still to be written."""
    (cache.folder / "parts").mkdir(parents=True, exist_ok=True)
    files = [cache.folder / name for name in FILES]
    for file in files:
        file.touch()
    missing = cache.num_bytes - sum(file.stat().st_blocks * 512 for file in files)
    free = shutil.disk_usage(cache.folder).free
    if missing > free:
        raise SettingError(
            f"corpus.cache={setting}: the teacher cache takes {missing / 1e9:.3g} GB more and there is room for "
            f"{free / 1e9:.3g} GB; give another folder, or lower teacher.cache.top_k"
        )


def _path_of(cache: Cache, part: int) -> Path:
    """The record that a part is done."""
    return cache.folder / "parts" / f"{part:06d}.json"


def _write(path: Path, content: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content), encoding="utf-8")
    os.replace(new, path)


@contextmanager
def _claim(path: Path) -> Iterator[bool]:
    """Whether what is recorded at `path` is this process's to make; never waits."""
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
