"""The identity of a model, wherever it lies: a digest of its weights and tokenizer, computed once and kept."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from distill.data.disk_cache import folder_of, once_with_digest
from distill.distributed.mapped import release
from distill.models.load import model_folder


def model_digest(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """sha256 of a model's class, configuration and weights, and of the tokenizer's vocabulary."""
    digest = hashlib.sha256(_description(model).encode())
    for name, tensor in sorted(model.state_dict().items()):
        # As it is in training, whatever format it is saved in.
        value = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else None)
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
        release(tensor)
    if tokenizer is not None:
        digest.update(_tokenizer_text(tokenizer).encode())
    return digest.hexdigest()


def saved_digest(path: str, model: Any, tokenizer: PreTrainedTokenizerBase | None, cache: str) -> str:
    """`model_digest` of a model that was loaded from `path`.

    For a local folder it is kept in `cache`, beside names, sizes and times of the files that it was computed from.
    """
    folder = Path(model_folder(path))
    files = sorted(file for file in folder.glob("*") if file.is_file()) if folder.is_dir() else []
    if not files:
        return model_digest(model, tokenizer)
    # 3: of this function's outcome. A folder gives other models where it is read for another task.
    inputs: list[Any] = [3, _description(model), _tokenizer_text(tokenizer) if tokenizer is not None else ""]
    inputs += [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    cached = folder_of(cache, "digests", hashlib.sha256(repr(inputs).encode()).hexdigest()[:32])
    with once_with_digest(cached, quiet=True) as new:  # the ranks of a machine come at the same time
        if new is not None:
            new.write_text(model_digest(model, tokenizer) + "\n", encoding="utf-8")
    return cached.read_text(encoding="utf-8").strip()


def _description(model: Any) -> str:
    """Class and configuration of a model, without what depends on where it lies and how it was saved."""
    config: Any = getattr(model, "config", None)
    described = config.to_diff_dict() if hasattr(config, "to_diff_dict") else {}
    elsewhere = ("_name_or_path", "transformers_version", "dtype", "architectures")
    fields = {name: value for name, value in described.items() if name not in elsewhere}
    return json.dumps([type(model).__name__, fields], sort_keys=True, default=str)


def _tokenizer_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that decides which ids a text gets, without padding and truncation that were left set."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps(sorted(tokenizer.get_vocab().items()))
    return json.dumps(json.loads(backend.to_str()) | {"padding": None, "truncation": None}, sort_keys=True)
