"""Checkpoints that are either whole or absent: saved atomically, verified when read, pruned to the newest few."""

import copy
import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import nn

from distill.distributed.shard import is_sharded
from distill.objective.running_mean import RunningMean
from distill.optim.loss_scale import LossScale
from distill.optim.optimizer_state import check_slots, optimizer_state, restore_optimizer
from distill.runs.checkpoint_record import (
    FORMAT,
    IN_PARTS,
    OPTIMIZER,
    RECORD,
    STEP,
    WEIGHTS,
    check_layout,
    check_state,
    check_weights,
    layout,
    load_tensors,
    read_parts,
    read_record,
)
from distill.runs.divergence import LossLevel, weights_are_finite
from distill.runs.facts import Best, HistoryPoint
from distill.runs.identity import refuse_other_settings
from distill.runs.run_files import HISTORY
from distill.runtime.files import atomic, quarantine, remove, write_manifest
from distill.runtime.host import require_room
from distill.runtime.jsonl import read_lines


@dataclass
class State:
    """What a run has done so far. Everything random is a function of seed and step, so no generator is kept."""

    step: int = 0
    tokens: int = 0  # positions seen, padding not counted, all ranks
    seconds: float = 0.0  # of training; evaluation and saving not counted
    syncs: int = 0  # exchanges of gradients
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: int = 0
    tally: RunningMean = field(default_factory=RunningMean)  # of the loss terms, since the last point of the history
    overflows: int = 0  # further steps left out, whose gradient overflowed by the loss scale
    loss_scale: LossScale = field(default_factory=LossScale)
    level: LossLevel = field(default_factory=LossLevel)

    def add(self, tokens: int, seconds: float, exchanges: int) -> None:
        """Take in a step, also one that is skipped."""
        self.step += 1
        self.tokens += tokens
        self.seconds += seconds
        self.syncs += exchanges

    def begin_interval(self) -> None:
        """Forget the losses up to a point of the history, which has reported them."""
        self.tally = RunningMean()

    def begin_start(self) -> None:
        """Count skipped steps in a row anew: a run that has diverged gets as many tries again when it is resumed."""
        self.skipped_in_a_row = 0

    def count_outcome(self, finite: bool, overflow: bool) -> None:
        """Count a step that was skipped; where the loss scale falls to its level that is no sign of divergence."""
        self.overflows += overflow
        if not overflow:
            self.skipped += not finite
            self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    by_all_ranks = False  # whether all ranks save together; else rank 0 does

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any]) -> None:
        """`identity`: what must match to resume from a checkpoint (settings and corpus)."""
        self.folder, self.keep, self.identity = folder, keep, identity
        self.formats: dict[str, Any] = {}  # number formats and threads in force, kept with each checkpoint
        self.choice: Best | None = None  # of the evaluation whose checkpoint stays
        self.beginning: str | None = None  # the checkpoint that `resume` named

    def with_metadata(self, formats: dict[str, Any], choice: Best | None = None, beginning: str | None = None) -> Self:
        """The same folder, where each checkpoint keeps these number formats and threads for a resume.

        Args:
            choice: by which measure the checkpoint of the best evaluation stays, however many others follow it.
            beginning: the checkpoint that the run has begun from, where `resume` named one.
        """
        other = copy.copy(self)
        other.formats, other.choice, other.beginning = formats, choice, beginning
        return other

    def saved(self, after: int = -1) -> list[Path]:
        """All of later steps that are there by their names, oldest first; those that were renamed have other names."""
        folders = [path for path in self.folder.glob("step-*") if STEP.fullmatch(path.name) and _step_of(path) > after]
        return sorted(folders, key=_step_of)

    def newest(self) -> Path | None:
        saved = self.saved()
        return saved[-1] if saved else None

    def save(self, state: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Write all that is trained, flush it to the disk, rename: a kill at any moment leaves the older ones whole.

        The newest one that a later loss has shown to be good stays, however many others follow it.

        Returns:
            Whether it is there: weights that are not finite are not written, as no run could resume from them.

        Raises:
            StorageFailed: there is no room for it.
        """
        weights = model_tensors(model)
        if not weights_are_finite(weights):
            return False
        final = self.path_of(state)
        if final.exists():  # written before an interrupted evaluation: nothing has changed since
            return True
        tensors, numbers = optimizer_state(model, optimizer)
        self.make_room(state, {**weights, **tensors})
        with atomic(final, durable=True) as new:
            new.mkdir()
            save_file(weights, new / WEIGHTS)
            save_file(tensors, new / OPTIMIZER)
            self.write_record(new, state, weights, tensors, numbers)
            write_manifest(new)
        self.prune(state)
        return True

    def path_of(self, state: State) -> Path:
        return self.path_of_step(state.step)

    def path_of_step(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def make_room(self, state: State, tensors: dict[str, torch.Tensor]) -> None:
        """Remove what was left half-written. Raises StorageFailed where there is no room for a checkpoint of these."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".step-*.new"):
            remove(leftover)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        require_room(self.folder, num_bytes, f"the checkpoint of step {state.step}")

    def write_record(
        self,
        folder: Path,
        state: State,
        weights: dict[str, torch.Tensor],
        tensors: dict[str, torch.Tensor],
        numbers: dict[str, Any],
        parts: int | None = None,
    ) -> None:
        """Write down what a checkpoint holds; `parts`: how many files each of its two is, where ranks write parts."""
        record = {"format": FORMAT, "state": asdict(state), "identity": self.identity, "precision": self.formats}
        record |= {"optimizer": numbers, "tensors": {WEIGHTS: layout(weights), OPTIMIZER: layout(tensors)}}
        record |= {} if parts is None else {"format": IN_PARTS, "parts": parts}
        record |= {} if self.beginning is None else {"began_from": self.beginning}
        (folder / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")

    def best(self) -> Best | None:
        """The best evaluation so far whose checkpoint is there; None where the run chooses none. Rank 0 reads it."""
        if self.choice is None:
            return None
        points = [HistoryPoint.of(line) for line in read_lines(self.folder.parent / HISTORY)]
        return self.choice.among(points, {_step_of(path) for path in self.saved()})

    def prune(self, state: State) -> None:
        """Remove the older ones, but for the newest that is known to be good, and that of the best evaluation."""
        good = [path for path in self.saved() if _step_of(path) < state.level.sane_step]
        best = self.best()
        for old in self.saved()[: -self.keep]:
            if old not in good[-1:] and (best is None or _step_of(old) != best.step):
                remove(old)

    def rename_diverged(self, sane_step: int) -> None:
        """Rename the checkpoints of a training that may have diverged by then to `diverged-step-N`.

        Args:
            sane_step: the last step with a sane loss; the checkpoints before it are good.
        """
        diverged = [path for path in self.saved() if _step_of(path) >= sane_step]
        for earlier in self.folder.glob("diverged-step-*") if diverged else []:
            remove(earlier)
        for path in diverged:
            quarantine(path, "diverged")

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, when a run resumes from an earlier one."""
        for later in self.saved(step):
            remove(later)

    def check(self, path: Path) -> None:
        """Raises Damaged, or SettingError for a format of another release, unless `path` is whole in itself."""
        record = read_record(path)
        check_state(path, record["state"], asdict(State()))
        if record["format"] != IN_PARTS:  # each part has the digest that its writer gave it
            for name in (WEIGHTS, OPTIMIZER):
                check_layout(path, name, record)

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, checked: bool = False) -> State:
        """Put weights and optimizer back as they were saved.

        Args:
            checked: `check` has compared its files with their digests on this machine, or on storage that all share.

        Raises:
            Damaged: no checkpoint there, or a damaged one.
            SettingError: one of other settings or another student.
        """
        record = read_record(path, checked)
        state = record["state"]
        check_state(path, state, asdict(State()))
        refuse_other_settings(record["identity"], self.identity, f"resume={path}", resumes=True)
        weights, slots = self.read_tensors(path, record, model, optimizer)
        with torch.no_grad():
            for name, tensor in model_tensors(model).items():
                tensor.copy_(weights[name])
        restore_optimizer(model, optimizer, slots, record["optimizer"])
        parts = {"tally": RunningMean(**state["tally"]), "loss_scale": LossScale(**state["loss_scale"])}
        parts["level"] = LossLevel(**state["level"])
        return State(**{**state, **parts})

    def read_tensors(
        self, path: Path, record: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The weights of a checkpoint, and what the optimizer kept.

        Raises:
            Damaged, SettingError: as `load`.
        """
        if record["format"] == IN_PARTS or is_sharded(model):
            return read_parts(path, record, model_tensors(model), partial(check_slots, path, model, optimizer))
        weights, slots = (load_tensors(path, name, record) for name in (WEIGHTS, OPTIMIZER))
        check_weights(path, layout(weights), model_tensors(model))
        check_slots(path, model, optimizer, slots.keys() | record["optimizer"].keys())
        return weights, slots


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and the buffers that belong to the state."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in {**dict(model.named_parameters()), **buffers}.items()}
