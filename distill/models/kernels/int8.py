"""The frozen teacher with its encoder in int8, for the forward passes of training on a CPU.

Linear layers of the encoder multiply integers: weights rounded once, with a scale for every output channel, inputs at
every call, with a scale for every position, so that the outcome for a sequence does not depend on its batch.
Everything else, the head above all, is the teacher's own and runs under bf16 autocast. This is dynamic quantisation
without calibration; for rounding and integer products see Jacob et al. 2018, section 2.
"""

import copy
import functools
from typing import Any

import torch
from torch import nn

from distill.models.kernels.linear_layers import linear_layers
from distill.runtime.errors import SettingError

LARGEST = 127  # of a rounded weight or input
ZERO = 128  # stands for 0 in the inputs: the processor multiplies unsigned inputs with signed weights
TINY = 1e-30  # keeps the scale of zeros away from 0


class Int8Linear(nn.Module):
    """A linear layer that rounds its inputs to 8 bits and multiplies integers."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        self.scales = weight.abs().amax(1).clamp(min=TINY) / LARGEST  # [out]
        rounded = (weight / self.scales[:, None]).round().to(torch.int8).contiguous()  # the operator heeds no strides
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self.zeros = torch.zeros(len(weight), dtype=torch.int32)
        self.bias = torch.zeros(len(weight)) if layer.bias is None else layer.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out] fp32."""
        x = x.float()
        # Two reductions and not one of |x|: this way is many times faster.
        scales = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)).clamp_(min=TINY).div_(LARGEST)
        rounded = (x * scales.reciprocal()).add_(ZERO + 0.5).to(torch.uint8)  # cutting off half a step above: rounding
        product = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, ZERO, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return torch.addcmul(self.bias, product, scales, out=product)


def check(device: torch.device, setting: str = "precision.teacher") -> None:
    """Raises SettingError where int8 would not be faster: only AVX-512 VNNI multiplies it at several times the rate."""
    if device.type != "cpu":
        raise SettingError(f"{setting}=int8 is for the CPU, and this run is on {device.type}: set bf16")
    if not torch.cpu._is_vnni_supported() or not torch.backends.mkldnn.is_available():
        raise SettingError(f"{setting}=int8: this processor has no AVX-512 VNNI; set bf16 or fp32")
    if not _operators_work():
        raise SettingError(f"{setting}=int8: torch {torch.__version__} lacks its operators; set bf16 or fp32")


@functools.cache
def _operators_work() -> bool:
    """Whether the private operators are there and multiply what they should."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            layer, x = nn.Linear(48, 32), torch.randn(5, 48)
            exact = layer(x)
            return bool((Int8Linear(layer)(x) - exact).norm() < 0.05 * exact.norm())
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False


def quantize(teacher: Any, setting: str = "precision.teacher") -> Any:
    """A copy of the frozen `teacher` with the linear layers of its encoder in int8; all else is shared, not copied.

    Raises:
        SettingError: there is no linear layer in the encoder.
    """
    rounded = copy.deepcopy(teacher, {id(tensor): tensor for tensor in teacher.parameters()})
    layers = list(linear_layers(rounded.base_model))
    if not layers:
        raise SettingError(f"{setting}=int8: this teacher's encoder has no linear layers; set bf16 or fp32")
    made = {id(layer): Int8Linear(linear) for _, _, layer, linear in layers}
    for parent, name, layer, _ in layers:
        setattr(parent, name, made[id(layer)])
    return rounded
