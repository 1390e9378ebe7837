"""Number formats: each model's forward in fp32 or under bf16 autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(value: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a model's forward. bf16 has fp32's exponent, so no loss scaling is needed."""
    return torch.autocast(device.type, torch.bfloat16) if value == "bf16" else nullcontext()
