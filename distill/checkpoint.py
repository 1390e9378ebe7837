"""Checkpoints that are either whole or absent: saved atomically, verified when read, pruned to the newest few."""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from distill.errors import SettingError
from distill.files import atomic, remove
from distill.identity import refuse_other_settings
from distill.objective.tally import Tally

FORMAT = 2
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


@dataclass
class State:
    """What a run has done so far. Everything random is a function of seed and step, so no generator is kept."""

    step: int = 0
    tokens: int = 0  # positions seen, padding not counted, all ranks
    seconds: float = 0.0  # of training; evaluation and saving not counted
    syncs: int = 0  # exchanges of gradients
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: int = 0
    epoch: Tally = field(default_factory=Tally)  # of the loss terms, since the epoch began


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
            save_file(_optimizer_tensors(model, optimizer), new / OPTIMIZER)
            digests = {path.name: _sha256(path) for path in sorted(new.iterdir())}
            record = {"format": FORMAT, "state": asdict(state), "identity": self.identity, "sha256": digests}
            record["precision"] = self.precision
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
        _restore_optimizer(model, optimizer, load_file(path / OPTIMIZER))
        state = record["state"]
        return State(**{**state, "epoch": Tally(**state["epoch"])})


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
    if lacking := {"state", "identity", "sha256"} - record.keys():
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


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by the name of the parameter that it belongs to, `name//slot`."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}//{slot}": torch.as_tensor(value)
        for parameter, slots in optimizer.state.items()
        for slot, value in slots.items()
    }


def _restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    numbers: dict[str, int] = {}
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for group, saved in zip(optimizer.param_groups, optimizer.state_dict()["param_groups"], strict=True):
        numbers |= {
            names[parameter]: number for parameter, number in zip(group["params"], saved["params"], strict=True)
        }
    for key, tensor in tensors.items():
        name, slot = key.rsplit("//", 1)
        slots.setdefault(numbers[name], {})[slot] = tensor
    optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})


def export(student: Any, tokenizer: Any, folder: Path, card: str) -> None:
    """The student as a folder that `AutoModelForMaskedLM` and `AutoTokenizer` load, model card inside."""
    with atomic(folder) as new:
        student.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / "README.md").write_text(card, encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
