"""Number formats: each model's forward in fp32 or under bf16 autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(value: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a model's forward. int8 layers stand in bf16, whose exponent is fp32's, so no loss is scaled."""
    return nullcontext() if value == "fp32" else torch.autocast(device.type, torch.bfloat16)
