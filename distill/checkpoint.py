"""Checkpoints that are either whole or absent: saved atomically, verified when read, pruned to the newest few."""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from distill.errors import SettingError

FORMAT = 1


@dataclass
class State:
    """What a run has done so far. Everything random is a function of seed and step, so no generator is kept."""

    step: int = 0
    tokens: int = 0  # positions seen, padding not counted, all ranks
    seconds: float = 0.0  # of training; evaluation and saving not counted
    syncs: int = 0  # exchanges of gradients
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: int = 0
    epoch_sums: list[float] = field(default_factory=lambda: [0.0] * 3)  # of the loss terms, since the epoch began
    epoch_counts: list[float] = field(default_factory=lambda: [0.0] * 3)  # their positions


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any]) -> None:
        """`identity`: what a checkpoint must agree with to be gone on from (settings and corpus)."""
        self.folder, self.keep, self.identity = folder, keep, identity

    def newest(self) -> Path | None:
        found = sorted(self.folder.glob("step-*"))
        return found[-1] if found else None

    def save(self, state: State, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write under a temporary name, bring it to disk, rename: a kill at any moment leaves the older ones whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"step-{state.step:08d}"
        if final.exists():  # written before an interrupted evaluation: nothing has changed since
            return
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover)
        new = self.folder / f".writing-{final.name}"
        new.mkdir()
        save_file(_student_tensors(student), new / "student.safetensors")
        save_file(_optimizer_tensors(optimizer), new / "optimizer.safetensors")
        digests = {path.name: _sha256(path) for path in sorted(new.iterdir())}
        record = {"format": FORMAT, "state": asdict(state), "identity": self.identity, "sha256": digests}
        (new / "state.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        for path in [*new.iterdir(), new]:
            _to_disk(path)
        os.replace(new, final)
        _to_disk(self.folder)
        for old in sorted(self.folder.glob("step-*"))[: -self.keep]:
            shutil.rmtree(old)

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, when a run goes on from an earlier one."""
        for later in self.folder.glob("step-*"):
            if int(later.name.removeprefix("step-")) > step:
                shutil.rmtree(later)

    def load(self, path: Path, student: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """Put weights and optimizer back as they were saved.

        Raises:
            SettingError: no checkpoint there, a damaged one, or one of other settings.
        """
        record = read_record(path)
        refuse_other_settings(record["identity"], self.identity, f"resume={path}")
        for name, digest in record["sha256"].items():
            if not (path / name).is_file() or _sha256(path / name) != digest:
                raise SettingError(
                    f"resume={path}: damaged checkpoint ({name}); delete that folder to go on from the one before"
                )
        tensors = load_file(path / "student.safetensors")
        with torch.no_grad():
            for name, tensor in _student_tensors(student).items():
                tensor.copy_(tensors[name])
        _restore_optimizer(optimizer, load_file(path / "optimizer.safetensors"))
        return State(**record["state"])


def refuse_other_settings(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """Raises SettingError when a run would be gone on from with settings that its student depends on changed."""
    differing = [
        f"{name} was {before.get(name)} and is now {now.get(name)}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise SettingError(
            f"{where} belongs to other settings ({'; '.join(differing[:3])}{more}): go back to them, or start another "
            "run with hydra.run.dir=DIR"
        )


def read_record(path: Path) -> dict[str, Any]:
    """The readable part of a checkpoint. Raises SettingError where there is none."""
    try:
        record = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingError(f"resume={path} holds no checkpoint: give a folder runs/NAME/checkpoints/step-N") from None
    except (OSError, ValueError) as error:
        raise SettingError(
            f"resume={path}: damaged checkpoint (state.json: {error}); delete it to go on from the one before"
        ) from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise SettingError(f"resume={path}: written in another format; it needs the release that wrote it")
    if lacking := {"state", "identity", "sha256"} - record.keys():
        raise SettingError(
            f"resume={path}: damaged checkpoint (state.json lacks {', '.join(sorted(lacking))}); delete it to go on "
            "from the one before"
        )
    return record


def _student_tensors(student: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and the buffers that belong to the state."""
    persistent = student.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in student.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in {**dict(student.named_parameters()), **buffers}.items()}


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": tensor for index, slots in state.items() for name, tensor in slots.items()}


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def export(student: Any, tokenizer: Any, folder: Path, card: str) -> None:
    """The student as a folder that `AutoModelForMaskedLM` and `AutoTokenizer` load, model card inside."""
    student.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
