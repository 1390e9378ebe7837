"""A teacher on a GPU: its weights once, in the format that it computes in, or quantised by torchao."""

import copy
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from distill.config.settings import PrecisionConfig
from distill.models.kernels.packed_linear import linear_layers
from distill.models.precision import dtype_of
from distill.runtime.errors import SettingError, first_line


def frozen_copy(model: Any, precision: PrecisionConfig, device: torch.device) -> Any:
    """A copy of a frozen model on `device`, with every weight in the format of `precision.teacher`.

    The model itself stays where it is, in fp32, for whoever scores it. All weights have one format, so that hidden
    states between layers have it too: with norms and embeddings in fp32 they would be fp32, and twice as large. Buffers
    keep theirs: frequencies of rotary embeddings are no weights. Of published weights in bf16 nothing is lost.

    Raises:
        SettingError: torchao is not there, or does not quantise this model on this device.
    """
    dtype = dtype_of(precision.teacher)
    placed = {
        id(weight): nn.Parameter(weight.detach().to(device, dtype), requires_grad=False)
        for weight in model.parameters()
    }
    frozen = copy.deepcopy(model, placed).to(device)
    if precision.quantize_teacher is not None:
        quantize(frozen, precision.quantize_teacher)
    return frozen


def quantize(model: Any, form: str) -> None:
    """Keep the weights of linear layers in int8 or fp8, in place; the head, which the objective multiplies, stays.

    Raises:
        SettingError: torchao is not there, or does not quantise this model on this device.
    """
    try:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Int8WeightOnlyConfig, quantize_

        made = Int8WeightOnlyConfig() if form == "int8" else Float8DynamicActivationFloat8WeightConfig()
        head = model.get_output_embeddings()
        for parent, name, layer, linear in linear_layers(model):
            if isinstance(layer, Conv1D):  # of GPT-2, which torchao leaves as it is
                linear.weight = nn.Parameter(linear.weight.contiguous(), requires_grad=False)
                setattr(parent, name, linear)
        quantize_(model, made, lambda module, _: isinstance(module, nn.Linear) and module is not head)
    except Exception as error:  # without a kernel for a device or a shape torchao raises of many kinds
        problem, cure = first_line(error), "choose the other format, or leave it out"
        if isinstance(error, ImportError):
            problem, cure = "torchao is not installed", "pip install 'distill-kd[quantized]', or leave it out"
        raise SettingError(problem, setting="precision.quantize_teacher", value=form, cure=cure) from error
