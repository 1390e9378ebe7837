"""Shards a model over ranks: each holds a part of every weight, and has a block whole only while it computes it.

The sharded modules are the model itself and its blocks. What belongs to no block (embeddings, the output embedding,
the last norm) is made whole in the model's forward and stays so until the end of its backward pass, or until `reshard`:
that is what lets losses over the vocabulary read the output embedding after the forward.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distill.distributed.mapped import release, return_free_memory


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    calls: int,
    mesh: DeviceMesh,
    storage: torch.dtype | None = None,
    offload: bool = False,
) -> None:
    """Shard the parameters of `model` over the ranks of `mesh`, in place, and put them on its device.

    Every rank gives the same weights, which may be in memory or in mapped files: a rank keeps its part of one block
    after the other, so no rank ever holds all of a model that is mapped.

    Args:
        blocks: modules in `model` that are called one after the other; empty: the model is sharded as one.
        calls: how often the blocks are called in a forward; a block that is called several times stays whole between.
        storage: of the parts; None: that of the weights as they are.
        offload: the parts are in the memory of the host, and come to the device with each block.

    Weights are in fp32 while they are whole, until `compute_in` changes that.
    """
    # Gradients are added up in fp32, whatever they are computed in.
    formats = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    offloading = CPUOffloadPolicy() if offload else OffloadPolicy()
    for module in [*blocks, model]:
        mapped = [weight for weight in module.parameters() if not isinstance(weight, DTensor)]
        before = [weight.data for weight in mapped]
        for parameter in mapped:
            parameter.data = _converted(parameter.data, storage, mesh)
        # A model's own weights stay whole after its forward.
        reshards = module is not model and calls <= len(blocks)
        # A scalar cannot be sharded: each rank has it, and its gradient is in the bucket.
        scalars = {scalar for scalar in module.parameters() if scalar.dim() == 0}
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshards,
            mp_policy=formats,
            offload_policy=offloading,
            ignored_params=scalars,
        )
        for tensor in before:
            release(tensor)
        del mapped, before, scalars
        return_free_memory()
    if mesh.device_type == "cuda":
        _move_buffers(model, _device(mesh))
    for sharded in sharded_modules(model):
        # The objective divides by global counts, so ranks are summed. Both calls are needed: on Gloo, which has no
        # mean, a factor of 1 alone is refused.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _converted(data: Tensor, dtype: torch.dtype | None, mesh: DeviceMesh) -> Tensor:
    """Weights in the format and on the device in which they are sharded; those of one block exist twice meanwhile."""
    device = _device(mesh)
    return data.to(device, dtype if data.is_floating_point() else None).contiguous()


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def is_sharded(model: nn.Module) -> bool:
    """Whether a model, or one that it is made of, is sharded over ranks."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules of a model that are sharded on their own."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def plain_class(model: nn.Module) -> type[Any]:
    """The class of a model as it was before it was sharded: `fully_shard` puts one of its own before it."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


def is_root(model: nn.Module) -> bool:
    """Whether this very module is sharded, whatever it is made of."""
    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Give up what is whole after forward passes without a backward one."""
    for module in sharded_modules(model):
        module.reshard()


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes, which is not where its parts lie that are offloaded to the host."""
    weights = list(model.parameters())
    sharded = next((weight for weight in weights if isinstance(weight, DTensor)), None)
    return weights[0].device if sharded is None else _device(sharded.device_mesh)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; all of it where it is not sharded. Both share their memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replicas(tensor: DTensor) -> int:
    """How many ranks have each element of a sharded tensor."""
    return tensor.device_mesh.size(0) if tensor.device_mesh.ndim > 1 else 1


def is_first_replica(tensor: DTensor) -> bool:
    """Whether this rank is of the first group of ranks that have all of a sharded tensor."""
    return tensor.device_mesh.ndim == 1 or tensor.device_mesh.get_local_rank(0) == 0


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all ranks, which have to call this together; itself where it is not sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def join_outputs(output: Tensor, *inner: Tensor) -> tuple[Tensor, ...]:
    """The same tensors, for autograd one outcome: no gradient comes to the inner ones before one comes to the output.

    The weights of a sharded block are whole again once a gradient comes to its output. One that came to an inner
    tensor alone would meet parts of them.
    """
    joint: tuple[Tensor, ...] = _Joined.apply(output, *inner)
    return joint


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


# --- the plain model that a sharded one was


def skeleton_of(model: Any) -> Any:
    """A copy of a model that is not sharded yet, without memory for its parameters; ties between them are kept."""
    return _with_values(model, {name: each.detach().to("meta") for name, each in model.named_parameters()})


def empty_copy(skeleton: Any) -> Any:
    """Such a model with memory for its parameters, which are still to be read from somewhere."""
    return _with_values(skeleton, {n: torch.empty_like(each, device="cpu") for n, each in skeleton.named_parameters()})


def _with_values(model: Any, values: dict[str, Tensor]) -> Any:
    """A copy with parameters of these values, in their formats."""
    made = {id(each): nn.Parameter(values[name], each.requires_grad) for name, each in model.named_parameters()}
    return copy.deepcopy(model, dict(made))  # which takes for a parameter what it finds under its id


@torch.no_grad()
def put_together(model: nn.Module, skeleton: Any, keep: bool) -> Any | None:
    """The model with the present weights; all ranks call it, and those with `keep` get one.

    The weights are gathered one after the other, so that a rank that keeps none never holds more than one of them
    whole. (State dicts of DCP give a tied weight twice, and load in the format of the skeleton, not of training.)
    """
    gathered = {}
    for name, parameter in model.named_parameters():
        value = whole(parameter.detach())
        if keep:
            gathered[name] = value.to("cpu")
    if not keep:
        return None
    made = _with_values(skeleton, gathered)
    buffers = dict(made.named_buffers())
    for name, buffer in model.named_buffers():
        buffers[name].copy_(buffer)
    return made


# --- the format in which a sharded model computes: `fully_shard` takes it once, and scoring has one of its own. What is
# changed here are attributes that torch keeps to itself, the same in 2.11 to 2.13; a test fails where they are others.


@contextmanager
def without_gradients(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """While it is open no operation is recorded, and a sharded model computes in this format.

    No gradients may be under way, and what is whole of a sharded model is given up before and after.
    """
    if not is_sharded(model):
        with torch.inference_mode():
            yield
        return
    with torch.no_grad():  # its parts are put together into tensors that training continues with
        before = _formats(model)
        compute_in(model, dtype)
        try:
            yield
        finally:
            _set_formats(model, before)


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """From now on the weights of a sharded model are of this format when they are whole."""
    _set_formats(model, dict.fromkeys(_formats(model), dtype))


def _formats(model: nn.Module) -> dict[Any, torch.dtype | None]:
    return {module: module._get_fsdp_state()._mp_policy.param_dtype for module in sharded_modules(model)}


def _set_formats(model: nn.Module, formats: dict[Any, torch.dtype | None]) -> None:
    reshard(model)
    for module, dtype in formats.items():
        state: Any = module._get_fsdp_state()
        if state._mp_policy.param_dtype == dtype:
            continue
        state._mp_policy = policy = replace(state._mp_policy, param_dtype=dtype)
        for group in _groups(state):
            group.mp_policy = policy
            for parameter in group.fsdp_params:
                parameter.mp_policy = policy
                parameter.all_gather_outputs = []  # of the other format; they are made anew
                with suppress(AttributeError):
                    del parameter._unsharded_param
            group._init_mp_dtypes()


def _groups(state: Any) -> list[Any]:
    """The groups of parameters of a sharded module; older releases of torch have one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
