"""Cuts the output embedding of a model, and an input embedding that is tied to it, into slices for a group of ranks."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from distill.models.row_exchange import embed


def slice_vocabulary(model: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Leave each rank of `mesh` (of one dimension) its slice of the weights over the vocabulary, in place.

    Every rank gives the same weights. They become `DTensor`s, `Shard(0)`, under their names. From then on all ranks of
    the mesh have to run the model together, each on its own batch. The output embedding gives no logits: its input is
    what `LanguageModel` records, and `LanguageModel.head` gives this rank's slice of it to
    `objective.vocabulary_parallel.sliced_loss`.

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
            replace_everywhere(model, whole, _sliced(whole, mesh))
    # Whatever a model does with its logits, it finds their number of columns.
    head.forward = lambda rows: rows.new_zeros(*rows.shape[:-1], vocab) if rows.numel() == 0 else _no_logits()
    if not tied:
        return [head]
    group, padding = mesh.get_group(), table.padding_idx
    table.forward = lambda ids: embed(ids, local_slice(table.weight), group, padding)
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


def _sliced(whole: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """A copy of this rank's slice, so that the whole, which may be a window on a file, need not stay."""
    step = -(-len(whole) // mesh.size())
    start = mesh.get_local_rank() * step
    own = whole.detach()[start : start + step].clone()
    slices = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(slices, whole.requires_grad)


def _no_logits() -> Tensor:
    raise RuntimeError("an output embedding in slices gives no logits; score with the whole of it")
