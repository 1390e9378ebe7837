"""Checkpoints that are either whole or absent: saved atomically, verified when read, pruned to the newest few."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distill.distributed import Ranks
from distill.distributed.shard import local
from distill.optim.optimizer_state import SLOT, check_slots, optimizer_state, restore_optimizer
from distill.runs.checkpoint_files import (
    FORMAT,
    RECORD,
    STEMS,
    STEP,
    damage_of,
    memory_for,
    read_record,
    read_tensors,
    refuse_other_weights,
    shard_name,
    stored_tensors,
    write_shard,
)
from distill.runs.facts import Best, HistoryPoint
from distill.runs.identity import refuse_other_settings
from distill.runs.run_files import HISTORY
from distill.runs.state import State
from distill.runtime.errors import Damaged, StorageFailed
from distill.runtime.files import MANIFEST, digests, flush_to_disk, quarantine, remove, write_manifest
from distill.runtime.host import require_room, storage_failure
from distill.runtime.jsonl import read_lines


class Checkpoints:
    """The folder `checkpoints/` of a run.

    Rank 0 saves what all ranks hold. Where each holds a shard of the student they save together, on storage that all of
    them see. A checkpoint of either kind can be read by any number of ranks, sharded or not.
    """

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any], ranks: Ranks) -> None:
        """`identity`: what must match to resume from a checkpoint (settings and corpus)."""
        self.folder, self.keep, self.identity, self.ranks = folder, keep, identity, ranks
        self._formats: dict[str, Any] = {}
        self._choice: Best | None = None
        self._beginning: str | None = None

    def begin(self, formats: dict[str, Any], choice: Best | None = None, beginning: str | None = None) -> None:
        """Take in what is known once a run is about to train.

        Args:
            formats: number formats and threads in force, which each checkpoint keeps for a resume.
            choice: by which measure the checkpoint of the best evaluation stays, however many others follow it.
            beginning: the checkpoint that the run has begun from, where `resume` named one.
        """
        self._formats, self._choice, self._beginning = formats, choice, beginning

    @property
    def by_all_ranks(self) -> bool:
        """Whether all ranks save together; else rank 0 does."""
        return self.ranks.shards_student

    def saved(self, after: int = -1) -> list[Path]:
        """All of later steps that are there by their names, oldest first; those that were renamed have other names."""
        folders = [path for path in self.folder.glob("step-*") if STEP.fullmatch(path.name) and _step_of(path) > after]
        return sorted(folders, key=_step_of)

    def newest(self) -> Path | None:
        saved = self.saved()
        return saved[-1] if saved else None

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, state: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Write all that is trained, flush it to the disk, rename: a kill at any moment leaves the older ones whole.

        The newest one that a later loss has shown to be good stays, however many others follow it. All ranks that save
        call it, and get the same answer or error.

        Returns:
            Whether it is there: weights that are not finite are not written, as no run could resume from them.

        Raises:
            StorageFailed: there is no room for it.
        """
        weights, final = model_tensors(model), self.path_of(state.step)
        found = self._on_each(lambda: [weights_are_finite(weights), final.exists()])
        if not all(finite for finite, _ in found):
            return False
        if found[0][1]:  # written before an interrupted evaluation: nothing has changed since
            return True
        slots, numbers = optimizer_state(model, optimizer)
        self._on_first(lambda: self._make_room(state, {**weights, **slots}))
        shards = self._on_each(lambda: self._write_shards(state, weights, slots))
        self._on_first(lambda: self._publish(state, numbers, shards))
        return True

    def _unfinished(self, state: State) -> Path:
        """What the checkpoint is called until it is whole."""
        return self.folder / f".{self.path_of(state.step).name}.new"

    def _make_room(self, state: State, tensors: dict[str, torch.Tensor]) -> None:
        """Remove what was left half-written. Raises StorageFailed where there is no room for a checkpoint of these."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".step-*.new"):
            remove(leftover)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        require_room(self.folder, num_bytes, f"the checkpoint of step {state.step}")
        self._unfinished(state).mkdir()

    def _write_shards(
        self, state: State, weights: dict[str, torch.Tensor], slots: dict[str, torch.Tensor]
    ) -> dict[str, str]:
        """Write and flush what this rank writes of weights and optimizer; gives the digests of its files by name."""
        rank, size = (self.ranks.rank, self.ranks.size) if self.by_all_ranks else (0, 1)
        folder, names = self._unfinished(state), [shard_name(stem, rank, size) for stem in STEMS]
        for name, tensors in zip(names, (weights, slots), strict=True):
            write_shard(folder / name, tensors, first=rank == 0)
            flush_to_disk(folder / name)
        return digests(folder, names)

    def _publish(self, state: State, numbers: dict[str, Any], shards: list[dict[str, str]]) -> None:
        """Write the record and the digests beside the shards, flush all that is new, and give the folder its name."""
        new, final = self._unfinished(state), self.path_of(state.step)
        record = {"format": FORMAT, "state": asdict(state), "identity": self.identity, "precision": self._formats}
        record |= {"optimizer": numbers, "began_from": self._beginning}
        (new / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
        write_manifest(new, {name: digest for shard in shards for name, digest in shard.items()})
        for written in (new / RECORD, new / MANIFEST, new):
            flush_to_disk(written)
        new.rename(final)
        flush_to_disk(self.folder)
        self.prune(state)

    def _on_first(self, work: Callable[[], None]) -> None:
        """Let rank 0 do `work`, while the others that save wait. Raises as `_on_each` does."""
        self._on_each(lambda: work() if self.ranks.rank == 0 else None)

    def _on_each(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` gives on each rank that saves, as JSON holds it.

        Raises:
            StorageFailed: on all of them, what storage one of them lacks; what is half-written is removed.
        """
        result, problem = None, ""
        try:
            result = work()
        except Exception as error:
            if (failure := storage_failure(error, str(self.folder))) is None:
                raise
            problem = str(failure)
        reports = [(result, problem)]
        if self.by_all_ranks:
            self.ranks.barrier()  # one may write for longer than the others wait in an exchange
            reports = self.ranks.gather((result, problem))
        if first := next((problem for _, problem in reports if problem), ""):
            for half_written in self.folder.glob(".step-*.new") if self.ranks.rank == 0 else ():
                with suppress(OSError):  # of a file system that fails: what it failed at is the error to report
                    remove(half_written)
            raise StorageFailed(first)
        return [result for result, _ in reports]

    def best(self) -> Best | None:
        """The best evaluation so far whose checkpoint is there; None where the run chooses none. Rank 0 reads it."""
        if self._choice is None:
            return None
        points = [HistoryPoint.of(line) for line in read_lines(self.folder.parent / HISTORY)]
        return self._choice.among(points, {_step_of(path) for path in self.saved()})

    def prune(self, state: State) -> None:
        """Remove the older ones, but for the newest that is known to be good, and that of the best evaluation."""
        good = [path for path in self.saved() if _step_of(path) < state.last_good_step]
        best = self.best()
        for old in self.saved()[: -self.keep]:
            if old not in good[-1:] and (best is None or _step_of(old) != best.step):
                remove(old)

    def rename_diverged(self, last_good_step: int) -> None:
        """Rename the checkpoints of a training that may have diverged by then to `diverged-step-N`.

        Args:
            last_good_step: as in `State`; the checkpoints before it are good.
        """
        diverged = [path for path in self.saved() if _step_of(path) >= last_good_step]
        for earlier in self.folder.glob("diverged-step-*") if diverged else []:
            remove(earlier)
        for path in diverged:
            quarantine(path, "diverged")

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, when a run resumes from an earlier one."""
        for later in self.saved(step):
            remove(later)

    def check(self, path: Path) -> None:
        """Compare the files of a checkpoint with their digests; all ranks call it.

        Each file is read once, by one rank; of a student that is not sharded by one on each machine, as machines may
        see it by disks or caches of their own.

        Raises:
            Damaged: on all ranks, what any of them has found.
            SettingError: as `damage_of` does.
        """
        ranks = self.ranks
        share = (ranks.rank, ranks.size) if self.by_all_ranks else (ranks.local_rank, ranks.local_size)
        reasons = ranks.gather(ranks.agree(lambda: damage_of(path, *share)))
        if first := next(filter(None, reasons), ""):
            raise Damaged(path, first)

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """Put weights and optimizer back as they were saved in a checkpoint, which `check` has found whole.

        Raises:
            SettingError: it is one of other settings or another student; nothing has changed then.
        """
        record, stored, weights = read_record(path), stored_tensors(path), model_tensors(model)
        refuse_other_settings(record["identity"], self.identity, f"resume={path}", resumes=True)
        refuse_other_weights(path, {name: tensor for name, tensor in stored.items() if SLOT not in name}, weights)
        kept = {name: tensor for name, tensor in stored.items() if SLOT in name}
        check_slots(path, model, optimizer, kept.keys() | record["optimizer"].keys())
        slots = {name: memory_for(tensor, weights.get(name.rpartition(SLOT)[0])) for name, tensor in kept.items()}
        read_tensors(path, {**weights, **slots})  # weights in place
        restore_optimizer(model, optimizer, slots, record["optimizer"])
        return State.of(record["state"])


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def weights_are_finite(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether every weight is a number, of sharded ones this rank's part; integer buffers always are."""
    return all(bool(local(tensor).isfinite().all()) for tensor in tensors.values() if tensor.is_floating_point())


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and the buffers that belong to the state."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in {**dict(model.named_parameters()), **buffers}.items()}
