"""Models that only go forward: linear layers rounded and laid out once, one operator for GELU, memory that is kept.

Packing rests on private operators of torch, `torch.ops.mkldnn._reorder_linear_weight` and `_linear_pointwise`. They are
tried before they are used; where one is gone or computes something else, torch's own layers run.
"""

import copy
import ctypes
import functools
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from distill.config.settings import PrecisionConfig
from distill.distributed.shard import is_sharded
from distill.models.kernels import is_known
from distill.models.kernels.attention import use_batched_products
from distill.models.kernels.masks import use_known_masks
from distill.models.precision import dtype_of

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of glibc's malloc.h
_LARGEST = 2**31 - 1
_LARGE = 2**20  # bytes; what is larger gets a mapping of its own


class PackedLinear(nn.Module):
    """A linear layer on the CPU whose weight is in the layout of oneDNN's kernels, in fp32 or bf16.

    Torch's own layer lays the weight out anew in every call, and under autocast rounds it anew, since autocast only
    keeps the copies of weights that are trained.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = layer.weight  # as it was, for whoever computes with it in another way
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype).contiguous())
        self.bias = None if layer.bias is None else layer.bias.detach().to(dtype)
        self.then = ("none", "")  # what is done to the product: ("gelu", "tanh") is GPT-2's activation

    def with_gelu(self) -> "PackedLinear":
        """This layer, followed by GPT-2's activation."""
        followed = copy.copy(self)
        followed.then = ("gelu", "tanh")
        return followed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]"""
        # The operator that torch.compile makes of frozen linear layers; it is the same in torch 2.11 to 2.15.
        name, kind = self.then
        return torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, name, [], kind)


def pack_teacher(teacher: Any, precision: PrecisionConfig, device: torch.device) -> Any:
    """A copy of `teacher`, which is in evaluation mode, for training's forward passes under `precision.teacher`.

    A sharded model and unsupported families are returned as they are. Inductor lays out what it compiles itself.
    """
    if is_sharded(teacher) or not is_known(teacher):
        return teacher
    frozen, dtype = _aliased(teacher), dtype_of(precision.teacher)
    is_fast = precision.kernels != "plain" and not precision.compile
    if is_fast:
        use_one_gelu(frozen)
    return _pack(frozen, dtype, packs=is_fast and device.type == "cpu" and can_pack(dtype))


def pack_for_evaluation(model: Any, precision: PrecisionConfig, device: torch.device) -> Any:
    """A copy of `model` with its present weights, for many forward passes in fp32 or bf16; or `model` itself.

    It is the latter on a CPU in fp16, where torch.compile has laid out its own, with `precision.kernels=plain`, for
    unsupported families, and where it is sharded over ranks. A GPU lays out nothing: there the copy has torch's
    activation, and masks that are known.
    """
    dtype = dtype_of(precision.evaluate)
    if precision.kernels == "plain" or precision.compile or is_sharded(model) or not is_known(model):
        return model
    if device.type == "cpu" and not can_pack(dtype):
        return model
    packed = _aliased(model)
    use_one_gelu(packed)
    if device.type == "cpu":
        packed = _pack(packed, dtype, packs=True)
        use_batched_products(packed)  # a student in training does already: teacher and baseline are scored as it is
    else:
        use_known_masks(packed)
    return packed


def _aliased(model: Any) -> Any:
    """A copy of the modules, over the same weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})


def _pack(model: Any, dtype: torch.dtype, packs: bool) -> Any:
    """`model`, changed: every linear layer in `dtype`, and packed, but for the head, which the objective multiplies."""
    head = model.get_output_embeddings()
    for parent, name, layer, linear in linear_layers(model):
        new = PackedLinear(linear, dtype) if packs and layer is not head else _rounded(linear, dtype)
        setattr(parent, name, new)
    for module in model.modules():
        if type(module).__name__ != "GPT2MLP" or not isinstance(module.c_fc, PackedLinear):
            continue
        if isinstance(module.act, nn.GELU) and module.act.approximate == "tanh":
            # torch's own activation takes half as long as the product.
            module.c_fc, module.act = module.c_fc.with_gelu(), nn.Identity()
    return model


def linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module, nn.Linear]]:
    """Every linear layer with its parent, its name there, and as an `nn.Linear` over the same memory.

    What inherits from a linear layer may compute something else, and is left out.
    """
    children = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    for parent, name, child in children:
        if type(child) is nn.Linear:
            yield parent, name, child, child
        elif type(child) is Conv1D:  # of GPT-2, whose weight is transposed: [in, out]
            size_in, size_out = child.weight.shape
            made = nn.Linear(size_in, size_out, device="meta")  # draws no random numbers
            made.weight = nn.Parameter(child.weight.detach().t(), requires_grad=False)
            made.bias = nn.Parameter(child.bias.detach(), requires_grad=False)
            yield parent, name, child, made.train(child.training)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this processor has the format, and the private operators are there and multiply as torch's layer does."""
    if dtype == torch.float16 or not torch.backends.mkldnn.is_available():
        return False
    try:
        if dtype != torch.float32 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            layer, x = nn.Linear(48, 32), torch.randn(5, 48)
            close, packed = 1e-5 if dtype == torch.float32 else 0.05, PackedLinear(layer, dtype)
            plain = torch.allclose(packed(x).float(), layer(x), rtol=close, atol=close)
            expected = nn.functional.gelu(layer(x), approximate="tanh")
            return plain and torch.allclose(packed.with_gelu()(x).float(), expected, rtol=close, atol=close)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False


def _rounded(layer: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    """A layer with the same weights in `dtype`; the very same tensors where they have it already."""
    new = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    new.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
    return new.eval()


def use_one_gelu(model: Any) -> None:
    """Give a model of a known family torch's tanh approximation of GELU instead of transformers' formula for it.

    GPT-2 and ALBERT have it as eight operations, of which autograd keeps most for backward: three times as long.
    """
    if not is_known(model):
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is NewGELUActivation:
                setattr(module, name, nn.GELU(approximate="tanh"))


def retain_heap() -> None:
    """Give nothing back to the system: tensors come from memory that has pages already.

    By default glibc asks the system anew for every tensor above 32 MiB, and gives back what is free at the heap's end.
    Each page then costs a fault, again and again: a tenth of a training step. Elsewhere than under glibc nothing is
    changed.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _LARGEST)


def return_large_tensors() -> None:
    """Give every tensor above 1 MiB back to the system as soon as it is freed.

    By default glibc does so above 32 MiB alone. Smaller ones that live on, such as parts of a sharded model, then lie
    between those that were whole for a moment, whose memory nothing larger fits in: half a gigabyte and more for a
    model of 1.1 B parameters.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)
