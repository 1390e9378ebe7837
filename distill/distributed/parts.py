"""Tensors that are sharded over ranks as files of parts: every rank writes its own, any number of ranks reads them.

The files are those of torch's distributed checkpoint in safetensors: each holds parts under the names of the whole
tensors and, in its header, where these parts begin. They are read by torch's own reader, without any message between
ranks; `torch.distributed.checkpoint.save` is not used, as its ranks send each other pickled objects.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

HEADER, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # names that torch's reader looks for


def save_part(path: Path, tensors: dict[str, Tensor], rank: int) -> None:
    """Write this rank's parts of tensors; those that are not sharded are written by rank 0 alone."""
    parts, offsets = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            _, offsets_of = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            part = tensor.to_local()
        elif rank == 0:
            offsets_of, part = (0,) * tensor.ndim, tensor
        else:
            continue
        if part.numel() or not isinstance(tensor, DTensor):
            parts[name] = part.detach().cpu().contiguous()
            offsets[name] = {OFFSETS: list(offsets_of)}
    save_file(parts, path, {"format": "pt", HEADER: json.dumps(offsets)})


def load_parts(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or not, from the files in a folder, whichever number of ranks wrote these.

    Raises:
        ValueError: a tensor is not there, or not whole.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no group of ranks is used, which is meant
        try:
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ValueError(str(error)) from error


def template(described: str, like: Tensor) -> Tensor:
    """Room for a tensor that a record describes as "float32 [8, 4]": sharded as `like` where it has its shape."""
    dtype, _, shape = described.partition(" ")
    sizes: list[Any] = json.loads(shape)
    kind = getattr(torch, dtype)
    if isinstance(like, DTensor) and sizes == list(like.shape):
        return torch.zeros_like(like, dtype=kind)
    return torch.zeros(sizes, dtype=kind)
