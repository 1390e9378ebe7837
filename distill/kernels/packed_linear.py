"""Models that only go forward, on the CPU: linear layers rounded and laid out once instead of in every forward."""

import copy
from typing import Any

import torch
from torch import nn

from distill.config import Precision
from distill.kernels import int8
from distill.kernels.attention import use_batched_products
from distill.models.load import TRANSFORMS


class PackedLinear(nn.Module):
    """A linear layer on the CPU whose weight lies as oneDNN's kernels want it, in fp32 or bf16.

    Torch's own layer lays the weight out anew in every call, and under autocast rounds it anew, since autocast only
    keeps the copies of weights that are trained.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = layer.weight  # as it was, for whoever computes with it in another way
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype))
        self.bias = None if layer.bias is None else layer.bias.detach().to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]"""
        # The operator that torch.compile makes of frozen linear layers; it is the same in torch 2.11 to 2.13.
        return torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, "none", [], "")


def for_training(teacher: Any, precision: Precision, device: torch.device) -> Any:
    """A copy of `teacher`, which is in evaluation mode, for training's forward passes under `precision.teacher`.

    Families that are not known are given back as they are; int8 takes any family.
    """
    dtype = torch.float32 if precision.teacher == "fp32" else torch.bfloat16
    # Inductor lays out what it compiles itself.
    packs = device.type == "cpu" and not precision.compile and _can_pack(dtype)
    if precision.teacher == "int8":
        return _lay_out(int8.quantize(teacher), dtype, packs)
    return _lay_out(_share(teacher), dtype, packs) if _is_known(teacher) else teacher


def for_evaluation(model: Any, precision: str, device: torch.device) -> Any:
    """A copy of `model` with its present weights, for many forward passes in fp32 or bf16; or `model` itself.

    It is the latter on a GPU, which lays out nothing, where torch.compile has laid out what it wants, and for families
    that are not known.
    """
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    if device.type != "cpu" or not _can_pack(dtype) or not _is_known(model):
        return model
    if model.base_model._compiled_call_impl is not None:
        return model
    laid_out = _lay_out(_share(model), dtype, packs=True)
    use_batched_products(laid_out)  # a student in training does already: teacher and twin are scored as it is
    return laid_out


def _is_known(model: Any) -> bool:
    """Others may use their layers' weights in ways of their own."""
    return getattr(getattr(model, "config", None), "model_type", None) in TRANSFORMS


def _share(model: Any) -> Any:
    """A copy of the modules, over the same weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})


def _lay_out(model: Any, dtype: torch.dtype, packs: bool) -> Any:
    """`model`, changed: every linear layer in `dtype`, and packed, but for the head."""
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            # What inherits from a linear layer may compute something else; the head is multiplied by the objective.
            if type(layer) is nn.Linear:
                new = PackedLinear(layer, dtype) if packs and layer is not head else _rounded(layer, dtype)
                setattr(parent, name, new)
    return model


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _rounded(layer: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    """A layer with the same weights in `dtype`; the very same tensors where they have it already."""
    new = nn.Linear(1, 1, bias=layer.bias is not None, device="meta")  # draws no random numbers
    new.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
    new.in_features, new.out_features = layer.in_features, layer.out_features
    return new.eval()
