"""Reads the record and the tensors of a checkpoint, and checks digests, types, shapes and ranges before any use."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from distill.distributed.parts import load_parts, template
from distill.optim.loss_scale import LARGEST, SMALLEST
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import MANIFEST, check_manifest

FORMAT = 5
MOST_PARTS = 100_000
IN_PARTS = 6  # the format where each rank has written its parts of the tensors
RECORD, WEIGHTS, OPTIMIZER = "state.json", "model.safetensors", "optimizer.safetensors"
STEP = re.compile(r"step-(\d+)")
# Number formats of torch by their names in safetensors.
DTYPES = {f"{kind}{bits}": f"{name}{bits}" for kind, name in (("F", "float"), ("I", "int")) for bits in (8, 16, 32, 64)}
DTYPES |= {"BF16": "bfloat16", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
# The parts of a record and the types of their values.
PARTS: dict[str, tuple[type, ...]] = {
    "state": (object,),
    "tensors": (object,),
    "identity": (object,),
    "optimizer": (int, float, str, type(None)),
    "precision": (bool, str, int, float, type(None)),
}

Tensors = dict[str, torch.Tensor]


def read_record(path: Path, checked: bool = False) -> dict[str, Any]:
    """The record of a checkpoint, after all of its files were compared with their digests.

    Args:
        checked: its tensors, which may be many gigabytes, were compared before, and only the record is now.

    Raises:
        Damaged: a file is missing or not as it was written, or the record does not have the parts of one.
        SettingError: it was written in a format of another release, or this user may not read it.
    """
    _refuse_unreadable(path)
    if not any((path / name).is_file() for name in (RECORD, WEIGHTS, MANIFEST)):
        raise Damaged(path, "it holds no checkpoint: name a folder such as runs/NAME/checkpoints/step-N")
    record = _parse(path)
    if (path / MANIFEST).exists():
        check_manifest(path, (RECORD, *tensor_files(record)), [RECORD] if checked else None)
    if record.get("format") in (FORMAT, IN_PARTS) and not (path / MANIFEST).is_file():
        raise Damaged(path, f"{MANIFEST} is missing")
    if record.get("format") not in (FORMAT, IN_PARTS):
        raise _unknown_format(path, record)
    _check_parts(path, record)
    return record


def began_from(path: Path) -> str | None:
    """The checkpoint that `resume` named when the run of this one, which is whole, began; None where it named none."""
    began = read_record(path, checked=True).get("began_from")
    return began if isinstance(began, str) else None


def _refuse_unreadable(path: Path) -> None:
    """Raises SettingError where this user may not read a checkpoint: that is no damage, for which another stands in."""
    may_read: Callable[[Path, int], bool] = lambda file, how: os.access(file, how, effective_ids=True)  # noqa: E731
    is_folder = os.path.isdir(path)
    files = sorted(path.iterdir()) if is_folder and may_read(path, os.R_OK | os.X_OK) else [path] if is_folder else []
    if (closed := next((file for file in files if os.path.exists(file) and not may_read(file, os.R_OK)), None)) is None:
        return
    raise SettingError(
        f"{closed}: this user may not read the checkpoint: take ownership of its folder (`sudo chown -R $USER "
        f"{path.parent}`), or choose another hydra.run.dir"
    )


def tensor_files(record: dict[str, Any]) -> list[str]:
    """The files of a checkpoint that hold tensors."""
    parts = record.get("parts")
    if record.get("format") != IN_PARTS or not isinstance(parts, int) or not 0 < parts < MOST_PARTS:
        return [WEIGHTS, OPTIMIZER]
    return [part_name(stem, number, parts) for number in range(parts) for stem in (WEIGHTS, OPTIMIZER)]


def part_name(file: str, number: int, parts: int) -> str:
    """What the part of a file is called that the rank with this number writes."""
    stem, suffix = file.rsplit(".", 1)
    return f"{stem}-{number + 1:05d}-of-{parts:05d}.{suffix}"


def _parse(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / RECORD).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(path, f"{RECORD}: {type(error).__name__}: {error}") from None
    if not isinstance(record, dict):
        raise Damaged(path, f"{RECORD} holds no JSON object")
    return record


def _unknown_format(path: Path, record: dict[str, Any]) -> SettingError:
    """Another number is that of another release where the digests vouch for it, and damage where they do not."""
    number = record.get("format")
    if isinstance(number, int) and (path / MANIFEST).is_file():
        return SettingError(
            f"resume={path} has checkpoint format {number}, which this release cannot read: use the release that wrote "
            "it, or start another run with hydra.run.dir=DIR"
        )
    return Damaged(path, f"{RECORD} names the format {str(number)[:20]!r}")


def _check_parts(path: Path, record: dict[str, Any]) -> None:
    for name, types in PARTS.items():
        part = record.get(name)
        if not isinstance(part, dict) or not all(isinstance(value, types) for value in part.values()):
            raise Damaged(path, f"{RECORD} has no {name} as checkpoints have it")


def check_state(path: Path, state: dict[str, Any], default: dict[str, Any]) -> None:
    """Raises Damaged unless `state` has the fields of `default`, with values of the same types and in their range.

    That is 0 or more for counts and seconds, any finite number in a mapping, and the step that the folder is named for.
    """
    if problem := _problem(state, default, "state"):
        raise Damaged(path, f"{RECORD}: {problem}")
    match = STEP.fullmatch(path.name)
    if match and int(match[1]) != state["step"]:
        raise Damaged(path, f"{RECORD}: state.step={state['step']} in the folder {path.name}")
    scale = state["loss_scale"]["value"]
    if scale is not None and not SMALLEST <= scale <= LARGEST:
        raise Damaged(path, f"{RECORD}: state.loss_scale.value={scale}")


def _problem(value: Any, default: Any, field: str) -> str | None:
    """What is wrong with a value that should be like `default`; None where nothing is."""
    if isinstance(default, dict):
        if not isinstance(value, dict) or (default and value.keys() != default.keys()):
            return f"{field} does not have the fields {', '.join(default) or 'of a mapping'}"
        if not default:
            good = all(_is_number(inner) for inner in value.values())
            return None if good else f"{field} holds other things than finite numbers"
        return next(filter(None, (_problem(value[name], default[name], f"{field}.{name}") for name in default)), None)
    if default is None and value is None:
        return None
    if _is_number(value) and value >= 0 and (isinstance(value, int) or not isinstance(default, int)):
        return None
    return f"{field}={str(value)[:40]!r}"


def _is_number(value: Any) -> bool:
    """Finite, and within what a float or a 64-bit integer holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def layout(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Number format and shape of each tensor, for the record."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in tensors.items()
    }


def load_tensors(path: Path, name: str, record: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of one file of a checkpoint. Raises Damaged where they are others than the record lists."""
    try:
        # Copies: `load_file` gives windows on the file, which change with it, or end the process where it is cut.
        tensors = {key: tensor.clone() for key, tensor in load_file(path / name).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise Damaged(path, f"{name}: {type(error).__name__}: {error}") from None
    if record["format"] == FORMAT and (different := _different(layout(tensors), record["tensors"].get(name))):
        raise Damaged(path, f"{name} holds other tensors than {RECORD} lists: {different}")
    return tensors


def check_layout(path: Path, name: str, record: dict[str, Any]) -> None:
    """Raises Damaged where the head of a file of tensors does not list those of the record; no tensor is read."""
    try:
        with safe_open(path / name, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            found = {key: f"{DTYPES.get(part.get_dtype())} {part.get_shape()}" for key, part in slices.items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise Damaged(path, f"{name}: {type(error).__name__}: {error}") from None
    if different := _different(found, record["tensors"].get(name)):
        raise Damaged(path, f"{name} holds other tensors than {RECORD} lists: {different}")


def check_weights(path: Path, described: dict[str, str], model: dict[str, torch.Tensor]) -> None:
    """Raises SettingError where a checkpoint holds weights, by `layout`, of another model than this one."""
    if different := _different(described, layout(model)):
        raise SettingError(
            f"resume={path} holds other weights than this student has ({different}): take the release and the settings "
            "that wrote it, or start another run with hydra.run.dir=DIR"
        )


def _different(actual: dict[str, str], expected: Any) -> str:
    """The first tensor in which two layouts differ, in words; empty where they agree."""
    if not isinstance(expected, dict):
        return "none are listed"
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            return f"{name} is {actual.get(name, 'missing')} instead of {expected.get(name, 'missing')}"
    return ""


def read_parts(
    path: Path, record: dict[str, Any], model: Tensors, check_slots: Callable[[Iterable[str]], None]
) -> tuple[Tensors, Tensors]:
    """Weights, and what an optimizer kept: of each tensor this rank's part, however many ranks have written it.

    Args:
        model: the weights that they are for, by name.
        check_slots: raises SettingError where a name is not one of this optimizer.

    Raises:
        Damaged: tensors are missing.
        SettingError: they belong to another model or optimizer.
    """
    described = {name: record["tensors"].get(name, {}) for name in (WEIGHTS, OPTIMIZER)}
    check_weights(path, described[WEIGHTS], model)
    check_slots({*described[OPTIMIZER], *record["optimizer"]})
    weights = {name: template(described[WEIGHTS][name], tensor) for name, tensor in model.items()}
    slots = {
        name: template(text, model.get(name.rpartition("//")[0], torch.empty(0)))
        for name, text in described[OPTIMIZER].items()
    }
    try:
        load_parts(path, {**weights, **slots})
    except ValueError as error:
        raise Damaged(path, f"its tensors do not load: {error}") from None
    return weights, slots
