"""Checkpoints that are either whole or absent: saved atomically, verified when read, pruned to the newest few."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from distill.divergence import LossLevel, weights_are_finite
from distill.files import atomic, remove, set_aside
from distill.identity import refuse_other_settings
from distill.loss_scale import LossScale
from distill.manifest import write_manifest
from distill.objective.tally import Tally
from distill.optimizer_state import check_slots, optimizer_state, restore_optimizer
from distill.record import (
    FORMAT,
    OLDER_FORMAT,
    OPTIMIZER,
    RECORD,
    STEP,
    WEIGHTS,
    check_state,
    check_weights,
    layout,
    load_tensors,
    read_record,
)
from distill.storage import require_room


@dataclass
class State:
    """What a run has done so far. Everything random is a function of seed and step, so no generator is kept."""

    step: int = 0
    tokens: int = 0  # positions seen, padding not counted, all ranks
    seconds: float = 0.0  # of training; evaluation and saving not counted
    syncs: int = 0  # exchanges of gradients
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: int = 0
    tally: Tally = field(default_factory=Tally)  # of the loss terms, since the last point of the history
    overflows: int = 0  # further steps left out, whose gradient overflowed by the loss scale
    loss_scale: LossScale = field(default_factory=LossScale)
    level: LossLevel = field(default_factory=LossLevel)


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any]) -> None:
        """`identity`: what must match to resume from a checkpoint (settings and corpus)."""
        self.folder, self.keep, self.identity = folder, keep, identity
        self.precision: dict[str, str] = {}  # number formats in force; kept with each checkpoint

    def found(self) -> list[Path]:
        """All that are there by their names, oldest first; those that were set aside have other names."""
        named = [path for path in self.folder.glob("step-*") if STEP.fullmatch(path.name)]
        return sorted(named, key=_step_of)

    def newest(self) -> Path | None:
        found = self.found()
        return found[-1] if found else None

    def save(self, state: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Write all that is trained, flush it to the disk, rename: a kill at any moment leaves the older ones whole.

        The newest one that a later loss has shown to be good stays, however many others follow it.

        Returns:
            Whether it is there: weights that are not finite are not written, as nothing could go on from them.

        Raises:
            StorageFailed: there is no room for it.
        """
        weights = _model_tensors(model)
        if not weights_are_finite(weights):
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"step-{state.step:08d}"
        if final.exists():  # written before an interrupted evaluation: nothing has changed since
            return True
        for leftover in self.folder.glob(".step-*.new"):
            remove(leftover)
        tensors, numbers = optimizer_state(model, optimizer)
        num_bytes = sum(tensor.nbytes for tensor in [*weights.values(), *tensors.values()])
        require_room(self.folder, num_bytes, f"the checkpoint of step {state.step}")
        with atomic(final, durable=True) as new:
            new.mkdir()
            save_file(weights, new / WEIGHTS)
            save_file(tensors, new / OPTIMIZER)
            record = {"format": FORMAT, "state": asdict(state), "identity": self.identity, "precision": self.precision}
            record |= {"optimizer": numbers, "tensors": {WEIGHTS: layout(weights), OPTIMIZER: layout(tensors)}}
            (new / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
            write_manifest(new)
        good = [path for path in self.found() if _step_of(path) < state.level.sane_step]
        for old in self.found()[: -self.keep]:
            if old not in good[-1:]:
                remove(old)
        return True

    def set_ruined_aside(self, sane_step: int) -> None:
        """Rename the checkpoints that may be ruined, of a training that has diverged, to `diverged-step-N`.

        Args:
            sane_step: the last step with a sane loss, which speaks for the checkpoints before it.
        """
        ruined = [path for path in self.found() if _step_of(path) >= sane_step]
        for earlier in self.folder.glob("diverged-step-*") if ruined else []:
            remove(earlier)
        for path in ruined:
            set_aside(path, "diverged")

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, when a run resumes from an earlier one."""
        for later in self.found():
            if _step_of(later) > step:
                remove(later)

    def check(self, path: Path) -> None:
        """Raises Damaged, or SettingError for a format of another release, unless `path` is whole in itself."""
        record = read_record(path)
        check_state(path, _state(record), asdict(State()))
        for name in (WEIGHTS, OPTIMIZER):
            load_tensors(path, name, record)

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """Put weights and optimizer back as they were saved.

        Raises:
            Damaged: no checkpoint there, or a damaged one.
            SettingError: one of other settings or another student.
        """
        record = read_record(path)
        state = _state(record)
        check_state(path, state, asdict(State()))
        refuse_other_settings(record["identity"], self.identity, f"resume={path}")
        weights, slots = (load_tensors(path, name, record) for name in (WEIGHTS, OPTIMIZER))
        check_weights(path, weights, _model_tensors(model))
        check_slots(path, model, optimizer, slots.keys() | record["optimizer"].keys())
        with torch.no_grad():
            for name, tensor in _model_tensors(model).items():
                tensor.copy_(weights[name])
        restore_optimizer(model, optimizer, slots, record["optimizer"])
        parts = {"tally": Tally(**state["tally"]), "loss_scale": LossScale(**state["loss_scale"])}
        parts["level"] = LossLevel(**state["level"])
        return State(**{**state, **parts})


def _state(record: dict[str, Any]) -> dict[str, Any]:
    """The state of a record; the older format knows no level of the loss."""
    older = {"level": asdict(LossLevel())} if record["format"] == OLDER_FORMAT else {}
    return older | record["state"]


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and the buffers that belong to the state."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in {**dict(model.named_parameters()), **buffers}.items()}
