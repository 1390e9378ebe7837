"""One vector for a sequence, as sentence-transformers pools, and what a folder of it says of its own vectors.

Shapes: B sequences, S positions, H hidden size.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import cached_file

from distill.models.precision import at_least_fp32
from distill.runtime.hub import is_hub_reached

MEAN, CLS = "mean", "cls"
POOLING_FILE, MODULES = "config.json", "modules.json"
OF_EXPORT = (MODULES, "1_Pooling", f"1_Pooling/{POOLING_FILE}")  # what `save_pooling` writes
# By name: what sentence-transformers calls it in 1_Pooling/config.json, there behind `pooling_mode_` or on its own.
SAVED_AS = {
    "mean": "mean_tokens",
    "cls": "cls_token",
    "last": "lasttoken",
    "max": "max_tokens",
    "mean_sqrt_len": "mean_sqrt_len_tokens",
    "weighted_mean": "weightedmean_tokens",
}


def pooled(kind: str, last: Tensor, documents: Tensor | None) -> Tensor:
    """One vector a sequence, in at least fp32: last hidden states [B, S, H], documents [B, S] or None -> [B, H].

    `mean` of all positions but padding, `cls` the first and `last` the last of these, `max` the largest value of each
    component, `mean_sqrt_len` their sum by the root of their number, `weighted_mean` with the weights 1, 2, 3, ...
    """
    last = at_least_fp32(last)
    if kind == CLS:
        return last[:, 0]
    if kind == MEAN and documents is None:
        return last.mean(1)
    is_text = torch.ones(last.shape[:2], dtype=torch.bool, device=last.device) if documents is None else documents >= 0
    valid = is_text.to(last.dtype)[..., None]  # [B, S, 1]
    columns = torch.arange(1, last.shape[1] + 1, device=last.device)
    match kind:
        case "max":
            return last.masked_fill(valid == 0, -torch.inf).amax(1)
        case "last":
            places = (is_text * columns).argmax(1)
            return last[torch.arange(len(last), device=last.device), places]
        case "mean_sqrt_len":
            return (last * valid).sum(1) / valid.sum(1).clamp(min=1).sqrt()
        case "weighted_mean":
            valid = valid * columns[None, :, None]
    return (last * valid).sum(1) / valid.sum(1).clamp(min=1)


class SavedPooling(NamedTuple):
    """How the folder of a sentence encoder makes its vectors."""

    place: str  # of the folder, or a name on the Hub
    kind: str | None  # one of `SAVED_AS`; None: of what `unsupported` names
    unsupported: str = ""  # what else it does with hidden states, in words
    normalizes: bool = False  # whether vectors get the length 1 at last


def saved_pooling(model: Any) -> SavedPooling | None:
    """What modules.json beside a model of transformers says; None where it has no such file."""
    place = getattr(getattr(model, "config", None), "name_or_path", "") or ""
    modules = _json(model, place, MODULES)
    if not isinstance(modules, list):
        return None
    kind, unsupported, normalizes = None, "", False
    for module in modules:
        name, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if name == "Pooling":
            kind = _kind_of(_json(model, place, f"{path}/{POOLING_FILE}" if path else POOLING_FILE) or {})
            unsupported = unsupported or ("" if kind else f"{path} (none of {', '.join(SAVED_AS)})")
        elif name == "Normalize":
            normalizes = True
        elif name != "Transformer":
            unsupported = unsupported or f"{path or name} ({name})"
    return SavedPooling(place, kind, unsupported or ("" if kind else "no 1_Pooling"), normalizes)


def save_pooling(folder: Path, saved: SavedPooling, width: int) -> None:
    """Write beside a model of transformers how its vectors are made, for sentence-transformers of any version.

    Args:
        saved: of one kind, and without `unsupported`.
        width: of the vectors.
    """
    modules = ["Transformer", "Pooling", *["Normalize"] * saved.normalizes]
    paths = ["", *(f"{number}_{name}" for number, name in enumerate(modules[1:], 1))]
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (name, path) in enumerate(zip(modules, paths, strict=True))
    ]
    (folder / MODULES).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    (folder / paths[1]).mkdir()
    fields = {f"pooling_mode_{name}": kind == saved.kind for kind, name in SAVED_AS.items()}
    text = json.dumps({"word_embedding_dimension": width, **fields}, indent=2) + "\n"
    (folder / paths[1] / POOLING_FILE).write_text(text, encoding="utf-8")


def _kind_of(fields: dict[str, Any]) -> str | None:
    """The only kind of pooling that a config.json of it names; None for several, which are joined, or another one."""
    named, flag = fields.get("pooling_mode") or (), "pooling_mode_"
    modes = {named} if isinstance(named, str) else {*named}
    modes |= {name.removeprefix(flag) for name, is_on in fields.items() if is_on is True and name.startswith(flag)}
    known = {alias: kind for kind, name in SAVED_AS.items() for alias in (name, name.removesuffix("_tokens"), kind)}
    kinds = {known.get(mode) for mode in modes}
    return kinds.pop() if len(kinds) == 1 else None


def _json(model: Any, place: str, name: str) -> Any:
    """A file of JSON beside a model, fetched where it lies on the Hub; None where there is none that can be read."""
    with suppress(Exception):  # of the file system, of JSON, and of whichever client the Hub's is built on
        file: Any = Path(place) / name
        if not Path(place).exists():
            commit = getattr(model.config, "_commit_hash", None)
            file = Path(str(cached_file(place, name, revision=commit, local_files_only=not is_hub_reached())))
        content = json.loads(file.read_text(encoding="utf-8"))
        return content if place else None
    return None
