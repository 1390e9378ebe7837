"""Checkpoints that are either whole or absent: saved atomically, verified when read, pruned to the newest few."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from distill.errors import SettingError
from distill.files import atomic, remove
from distill.identity import refuse_other_settings
from distill.loss_scale import LossScale
from distill.objective.tally import Tally

FORMAT = 4
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
GROUPS = "groups."  # before the number of a group of parameters


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


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any]) -> None:
        """`identity`: what must match to resume from a checkpoint (settings and corpus)."""
        self.folder, self.keep, self.identity = folder, keep, identity
        self.precision: dict[str, str] = {}  # number formats in force; kept with each checkpoint

    def newest(self) -> Path | None:
        found = sorted(self.folder.glob("step-*"))
        return found[-1] if found else None

    def save(self, state: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write all that is trained, flush it to the disk, rename: a kill at any moment leaves the older ones whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"step-{state.step:08d}"
        if final.exists():  # written before an interrupted evaluation: nothing has changed since
            return
        for leftover in self.folder.glob(".step-*.new"):
            remove(leftover)
        with atomic(final, durable=True) as new:
            new.mkdir()
            save_file(_model_tensors(model), new / WEIGHTS)
            tensors, numbers = optimizer_state(model, optimizer)
            save_file(tensors, new / OPTIMIZER)
            digests = {path.name: _sha256(path) for path in sorted(new.iterdir())}
            record = {"format": FORMAT, "state": asdict(state), "identity": self.identity, "sha256": digests}
            record |= {"optimizer": numbers, "precision": self.precision}
            (new / "state.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        for old in sorted(self.folder.glob("step-*"))[: -self.keep]:
            shutil.rmtree(old)

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, when a run resumes from an earlier one."""
        for later in self.folder.glob("step-*"):
            if int(later.name.removeprefix("step-")) > step:
                shutil.rmtree(later)

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """Put weights and optimizer back as they were saved.

        Raises:
            SettingError: no checkpoint there, a damaged one, or one of other settings.
        """
        record = read_record(path)
        refuse_other_settings(record["identity"], self.identity, f"resume={path}")
        for name, digest in record["sha256"].items():
            if not (path / name).is_file() or _sha256(path / name) != digest:
                raise SettingError(
                    f"resume={path}: damaged checkpoint ({name}); delete that folder to resume from the one before"
                )
        tensors = load_file(path / WEIGHTS)
        with torch.no_grad():
            for name, tensor in _model_tensors(model).items():
                tensor.copy_(tensors[name])
        _restore_optimizer(model, optimizer, load_file(path / OPTIMIZER), record["optimizer"])
        state = record["state"]
        parts = {"tally": Tally(**state["tally"]), "loss_scale": LossScale(**state["loss_scale"])}
        return State(**{**state, **parts})


def read_record(path: Path) -> dict[str, Any]:
    """The readable part of a checkpoint. Raises SettingError where there is none."""
    try:
        record = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingError(f"resume={path} holds no checkpoint: give a folder runs/NAME/checkpoints/step-N") from None
    except (OSError, ValueError) as error:
        raise SettingError(
            f"resume={path}: damaged checkpoint (state.json: {error}); delete it to resume from the one before"
        ) from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise SettingError(f"resume={path}: written in another format; it needs the release that wrote it")
    if lacking := {"state", "identity", "sha256", "optimizer"} - record.keys():
        raise SettingError(
            f"resume={path}: damaged checkpoint (state.json lacks {', '.join(sorted(lacking))}); delete it to resume "
            "from the one before"
        )
    return record


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and the buffers that belong to the state."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in {**dict(model.named_parameters()), **buffers}.items()}


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, float | str | None]]:
    """What an optimizer keeps from step to step: tensors, and numbers, by `name//slot`.

    The name is that of the parameter, or `groups.N` for what a group of parameters keeps: its tensors and numbers. The
    rest of a group is settings.

    Raises:
        SettingError: it keeps something that is neither a tensor nor a number, or not of a parameter.
    """
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, float | str | None] = {}
    for name, slot, value in _slots(model, optimizer):
        if isinstance(value, torch.Tensor):
            tensors[f"{name}//{slot}"] = _on_its_own(value.detach())
        elif value is None or isinstance(value, int | float | str):
            numbers[f"{name}//{slot}"] = value
        else:
            raise SettingError(
                f"the optimizer {type(optimizer).__name__} keeps a {type(value).__name__} as {slot!r} of a parameter, "
                "but checkpoints hold tensors and numbers alone: keep it as such"
            )
    return tensors, numbers


def _slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Any]]:
    """Owner, slot and value of all that the optimizer keeps."""
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, slots in optimizer.state.items():
        if parameter not in names:
            raise SettingError(
                f"the optimizer {type(optimizer).__name__} keeps {str(parameter)[:40]!r} in its state, which is no "
                "parameter, and checkpoints would lose it: keep it with the parameters, or in param_groups"
            )
        yield from ((names[parameter], slot, value) for slot, value in slots.items())
    for number, group in enumerate(optimizer.param_groups):
        for slot, value in group.items():
            if isinstance(value, torch.Tensor | int | float):
                yield f"{GROUPS}{number}", slot, value


def _on_its_own(value: torch.Tensor) -> torch.Tensor:
    """`value` as it can be saved: not a view of a larger tensor."""
    whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
    return value if whole else value.clone(memory_format=torch.contiguous_format)


def _restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]
) -> None:
    parameters = dict(model.named_parameters())
    indices: dict[torch.Tensor, int] = {}
    for group, saved in zip(optimizer.param_groups, optimizer.state_dict()["param_groups"], strict=True):
        indices |= dict(zip(group["params"], saved["params"], strict=True))
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **numbers}.items():
        name, slot = key.rsplit("//", 1)
        if name.startswith(GROUPS):
            group = optimizer.param_groups[int(name.removeprefix(GROUPS))]
            at = group.get(slot, group["params"][0])
            group[slot] = value.to(at.device) if isinstance(value, torch.Tensor) else value
        else:
            state.setdefault(indices[parameters[name]], {})[slot] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    # torch has moved each tensor to where it belongs, but also turned it into the number format of its parameter.
    for key, value in tensors.items():
        name, slot = key.rsplit("//", 1)
        if not name.startswith(GROUPS):
            slots = optimizer.state[parameters[name]]
            slots[slot] = value.to(slots[slot].device) if slots[slot].dtype != value.dtype else slots[slot]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
