"""Models that only go forward, on the CPU: linear layers rounded and laid out once instead of in every forward."""

import copy
import functools
from typing import Any

import torch
from torch import nn

from distill.config.settings import PrecisionConfig
from distill.distributed.shard import is_sharded
from distill.models.kernels import FAMILIES, family_of, int8
from distill.models.kernels.activations import is_tanh_gelu, use_one_gelu
from distill.models.kernels.attention import use_batched_products
from distill.models.kernels.linear_layers import linear_layers
from distill.models.kernels.precision import dtype_of


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


def pack_teacher(
    teacher: Any, precision: PrecisionConfig, device: torch.device, setting: str = "precision.teacher"
) -> Any:
    """A copy of `teacher`, which is in evaluation mode, for training's forward passes under `precision.teacher`.

    A sharded model and unsupported families are returned as they are; int8 takes any family. Error lines call
    the format `setting`.
    """
    dtype = dtype_of(precision.teacher)
    # Inductor lays out what it compiles itself.
    packs = device.type == "cpu" and not precision.compile and precision.kernels != "plain" and can_pack(dtype)
    if is_sharded(teacher) or (precision.teacher != "int8" and family_of(teacher) not in FAMILIES):
        return teacher
    frozen = int8.quantize(teacher, setting) if precision.teacher == "int8" else _aliased(teacher)
    if precision.kernels != "plain" and not precision.compile:
        use_one_gelu(frozen)
    return _pack(frozen, dtype, packs)


def pack_for_evaluation(model: Any, precision: PrecisionConfig, device: torch.device) -> Any:
    """A copy of `model` with its present weights, for many forward passes in fp32 or bf16; or `model` itself.

    It is the latter on a CPU in fp16, where torch.compile has laid out its own, with `precision.kernels=plain`, for
    unsupported families, and where it is sharded over ranks. A GPU lays out nothing: there the copy has torch's
    activation alone.
    """
    dtype = dtype_of(precision.evaluate)
    if precision.kernels == "plain" or precision.compile or is_sharded(model) or family_of(model) not in FAMILIES:
        return model
    if device.type == "cpu" and not can_pack(dtype):
        return model
    packed = _aliased(model)
    use_one_gelu(packed)
    if device.type != "cpu":
        return packed
    packed = _pack(packed, dtype, packs=True)
    use_batched_products(packed)  # a student in training does already: teacher and baseline are scored as it is
    return packed


def _aliased(model: Any) -> Any:
    """A copy of the modules, over the same weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})


def _pack(model: Any, dtype: torch.dtype, packs: bool) -> Any:
    """`model`, changed: every linear layer in `dtype`, and packed, but for the head."""
    head = model.get_output_embeddings()
    for parent, name, layer, linear in linear_layers(model):
        # The head is multiplied by the objective.
        new = PackedLinear(linear, dtype) if packs and layer is not head else _rounded(linear, dtype)
        setattr(parent, name, new)
    for module in model.modules():
        if type(module).__name__ == "GPT2MLP" and isinstance(module.c_fc, PackedLinear) and is_tanh_gelu(module.act):
            # torch's own activation takes half as long as the product.
            module.c_fc, module.act = module.c_fc.with_gelu(), nn.Identity()
    return model


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
    new = nn.Linear(1, 1, bias=layer.bias is not None, device="meta")  # draws no random numbers
    new.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
    new.in_features, new.out_features = layer.in_features, layer.out_features
    return new.eval()
