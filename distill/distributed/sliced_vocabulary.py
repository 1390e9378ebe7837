"""Cuts the output embedding of a model, and an input embedding that is tied to it, into slices for a group of ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from distill.distributed.mapped import release
from distill.distributed.row_exchange import RowExchange, embed

COMPUTES_IN = "computes_in"
SLICED = "sliced_logits"  # attribute of an output embedding that is cut
REPLICAS, VOCABULARY = "replicas", "vocabulary"  # the axes of the ranks: who holds the same slice, and who holds which


def slice_vocabulary(model: Any, mesh: DeviceMesh, storage: torch.dtype | None = None) -> list[nn.Module]:
    """Leave each rank of `mesh` (of one dimension) its slice of the weights over the vocabulary, in place.

    Every rank gives the same weights. They become `DTensor`s, `Shard(0)`, under their names. From then on all ranks of
    the mesh have to run the model together, each on its own batch. Training needs no logits of the output embedding:
    its input is what `LanguageModel` records, and `LanguageModel.head` gives this rank's slice of it to
    `objective.vocabulary_parallel.sliced_loss`. Elsewhere it gives whole ones, by `SlicedLogits`.

    Args:
        storage: format of the slices; None: that of the weights.

    The gradient of a slice is that of all rows of the group's ranks: it is to be summed over other groups only, and
    no more over this mesh. The rest of the model may be divided or copied as if there were no slices.

    Returns:
        The modules with slices: the output embedding, and the input embedding where both are tied.

    Raises:
        ValueError: the input embedding is tied, and does more than look words up, as those that scale their vectors.
    """
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    vocab, tied = len(head.weight), table.weight is head.weight
    if tied and type(table).forward is not nn.Embedding.forward:
        raise ValueError(f"{type(table).__name__} does more than look words up, so it cannot be cut into slices")
    for whole in (head.weight, head.bias):
        if whole is not None:
            replace_everywhere(model, whole, _sliced(whole, mesh, storage))
            release(whole.data)
    group, padding = mesh.get_group(), table.padding_idx
    logits = SlicedLogits(head, group)
    object.__setattr__(head, SLICED, logits)  # past torch, which would make it a part of the head
    # Whatever a model does with its logits, it finds their number of columns.
    head.forward = lambda rows: rows.new_zeros(*rows.shape[:-1], vocab) if rows.numel() == 0 else logits(rows)
    if not tied:
        return [head]
    table.computes_in = None  # the format of its vectors, which `formats.compute_in` changes; None: that of the slices
    table.forward = lambda ids: embed(ids, local_slice(table.weight), group, padding).to(table.computes_in)
    return [head, table]


def local_slice(weight: Tensor) -> Tensor:
    """This rank's slice of a weight, with a way back for gradients; the weight itself where it is not cut."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def replace_everywhere(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a parameter in another one's place under each of its names: BERT has two for its output embedding's bias."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(module, name, new)


def divide_vocabulary(model: Any, axes: DeviceMesh, storage: torch.dtype | None = None) -> list[nn.Parameter]:
    """Cut the vocabulary into slices along an axis of the ranks, and divide each slice between those that hold it.

    Returns:
        The parameters that are slices now; nothing else is to divide them.
    """
    modules = slice_vocabulary(model, axes[VOCABULARY], storage)
    for module in modules:
        if hasattr(module, COMPUTES_IN):
            setattr(module, COMPUTES_IN, torch.float32)  # as all that is divided, until it is said otherwise
    slices = [parameter for module in modules for parameter in module.parameters()]
    if axes[REPLICAS].size() == 1:
        return slices
    formats = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    fully_shard(modules, mesh=axes[REPLICAS], reshard_after_forward=False, mp_policy=formats)
    divided = [parameter for module in modules for parameter in module.parameters()]
    for old, new in zip(slices, divided, strict=True):
        replace_everywhere(model, old, new)
    return divided


class SlicedLogits(nn.Module):
    """Whole logits of each rank's own rows from an output embedding in slices; a call is one exchange of the ranks."""

    def __init__(self, head: Any, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.head, self.group = (head,), group  # in a tuple, lest it be a part of this module

    def forward(self, rows: Tensor) -> Tensor:
        """[..., E] -> [..., V]"""
        (head,) = self.head
        weight = local_slice(head.weight).to(rows.dtype)
        bias = None if head.bias is None else local_slice(head.bias).to(rows.dtype)
        exchange = RowExchange(rows.shape[:-1].numel(), [len(weight)], self.group)
        everyones = exchange.gathered(rows.reshape(-1, rows.shape[-1]))
        return exchange.joined_columns(nn.functional.linear(everyones, weight, bias)).view(*rows.shape[:-1], -1)

    def idle(self) -> None:
        """A call with no rows, for a rank that takes part for the sake of the others."""
        weight = local_slice(self.head[0].weight)
        self(weight.new_zeros(0, weight.shape[1]))


def sliced_logits(model: Any) -> "SlicedLogits | None":
    """What gives whole logits of a model whose vocabulary is cut into slices; None for any other."""
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found: SlicedLogits | None = getattr(layer, SLICED, None)
    return found


def _sliced(whole: nn.Parameter, mesh: DeviceMesh, storage: torch.dtype | None) -> nn.Parameter:
    """A copy of this rank's slice, so that the whole, which may be a window on a file, need not stay."""
    step = -(-len(whole) // mesh.size())
    start = mesh.get_local_rank() * step
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else whole.device
    own = whole.detach()[start : start + step].to(device, storage, copy=True)
    slices = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(slices, whole.requires_grad)
