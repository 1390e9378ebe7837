"""Number formats: each model's forward in fp32 or under bf16 autocast, and when weights are rounded for it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# Copies of weights, by weight and format, while `casts_kept` is open; the weights stay alive as long.
_kept: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] | None = None


def autocast(value: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a model's forward. int8 layers stand in bf16, whose exponent is fp32's, so no loss is scaled."""
    return nullcontext() if value == "fp32" else torch.autocast(device.type, torch.bfloat16)


@contextmanager
def casts_kept(device: torch.device) -> Iterator[None]:
    """While it is open, `autocast` and `rounded` round a weight once: around the micro-batches of one step.

    Weights must not change inside. (Their version would not tell: the fused AdamW leaves it as it is.)
    """
    global _kept
    # Autocast drops its copies when the outermost of its contexts ends: this one, which itself casts nothing.
    with torch.autocast(device.type, enabled=False):
        _kept = {}
        try:
            yield
        finally:
            _kept = None


def rounded(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight` in another format, without a way back for gradients."""
    if _kept is None or weight.dtype == dtype:
        return weight.detach().to(dtype)
    key = (id(weight), dtype)
    if key not in _kept:
        _kept[key] = weight, weight.detach().to(dtype)
    return _kept[key][1]
