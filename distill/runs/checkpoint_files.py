"""The files of a checkpoint: shards of the tensors in safetensors, the record in JSON, and the digests of all of them.

Each rank that saves writes one shard of the weights and one of the optimizer's state, in the form of torch's
distributed checkpoint (DCP): parts of tensors under the names of the whole ones and, in the header, where these parts
begin. A rank that saves alone writes everything as one shard. DCP's reader gives any number of ranks what each of them
needs, without a message between them. DCP's writer is not used: it holds the bytes of a file in memory once more, and
its ranks send each other pickled plans and wait in a collective while the slowest of them writes. Nor are its state
dicts of optimizers, for which an optimizer without a state takes a step.
"""

import json
import re
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

from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import MANIFEST, check_digests, read_manifest

FORMAT = 7  # of the record; a change of its fields is another one
RECORD, SUFFIX = "state.json", ".safetensors"
STEMS = ("model", "optimizer")  # of the files with the weights, and with the state of the optimizer
STEP = re.compile(r"step-(\d+)")
HEADER, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # names that DCP's reader looks for


def shard_name(stem: str, number: int, num_shards: int) -> str:
    """What a shard is called: `model-00001-of-00002.safetensors`, and `model.safetensors` where there is but one."""
    return f"{stem}{SUFFIX}" if num_shards == 1 else f"{stem}-{number + 1:05d}-of-{num_shards:05d}{SUFFIX}"


def write_shard(path: Path, tensors: dict[str, Tensor], first: bool) -> None:
    """Write this rank's parts of tensors; `first`: and those that are not sharded, which one rank writes for all."""
    parts, offsets = {}, {}
    for name, tensor in tensors.items():
        part, begin = tensor, (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            part = tensor.to_local()
        if first or (isinstance(tensor, DTensor) and part.numel()):
            part = part.detach().cpu().contiguous()
            is_view = part.untyped_storage().nbytes() != part.nbytes  # safetensors writes no part of a larger tensor
            parts[name] = part.clone() if is_view else part
            offsets[name] = {OFFSETS: list(begin)}
    save_file(parts, path, {"format": "pt", HEADER: json.dumps(offsets)})


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, without their values: of type and shape, on the meta device."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")  # type: ignore[union-attr]
        for name, each in metadata.items()
    }


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or not, from the shards in a folder, however many ranks have written them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no group of ranks is used, which is meant
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def memory_for(stored: Tensor, like: Tensor | None) -> Tensor:
    """Memory for a tensor of a checkpoint: sharded as `like` where it has its shape, else whole and on the CPU."""
    if isinstance(like, DTensor) and stored.shape == like.shape:
        return torch.zeros_like(like, dtype=stored.dtype)
    return torch.zeros(stored.shape, dtype=stored.dtype)


def refuse_other_weights(path: Path, stored: dict[str, Tensor], model: dict[str, Tensor]) -> None:
    """Raises SettingError where a checkpoint holds weights of another model than this one."""
    for name in sorted(stored.keys() | model.keys()):
        there, here = (_described(tensors.get(name)) for tensors in (stored, model))
        if there != here:
            raise SettingError(
                f"resume={path} holds other weights than this student has ({name} is {there} instead of {here}): take "
                "the release and the settings that wrote it, or start another run with hydra.run.dir=DIR"
            )


def _described(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def read_record(path: Path) -> dict[str, Any]:
    """The record of a checkpoint that is whole. Raises SettingError where another release has written it."""
    record: dict[str, Any] = json.loads((path / RECORD).read_bytes())
    if record.get("format") != FORMAT:
        raise SettingError(
            f"resume={path} has checkpoint format {record.get('format')}, which this release cannot read: use the "
            "release that wrote it, or start another run with hydra.run.dir=DIR"
        )
    return record


def damage_of(path: Path, number: int, num_readers: int) -> str:
    """What differs from the digests of a checkpoint; empty where nothing does.

    Args:
        number, num_readers: of so many that read at the same time this one reads its share of the files.

    Raises:
        SettingError: this user may not read it, which is no damage that another checkpoint could stand in for.
    """
    try:
        digests = read_manifest(path)
        names = sorted(digests)
        if names != sorted([RECORD, *(file.name for file in path.glob(f"*{SUFFIX}"))]):
            return f"{MANIFEST} does not list the files that are there"
        check_digests(path, {name: digests[name] for name in names[number::num_readers]})
    except Damaged as damage:
        return damage.reason
    except PermissionError as error:
        raise SettingError(
            f"{error.filename}: this user may not read the checkpoint: take ownership of its folder (`sudo chown -R "
            f"$USER {path.parent}`), or choose another hydra.run.dir"
        ) from None
    return ""
