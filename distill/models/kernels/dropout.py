"""Dropout on the CPU whose random numbers belong to the sequence, and a quarter as many of them as torch's.

Torch draws a number for every value from one stream, so what is dropped depends on the sequences of a micro-batch and
on the rank. Here each sequence has a stream of its own, named by a key of (seed, epoch, number): the same values are
dropped however the sequences of a step are split over micro-batches and ranks. One number of 64 bits decides for four
values.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

LEVELS = 1 << 16  # 16 bits for each value: its probability is met to 8e-6
GOLDEN = 0x9E3779B97F4A7C15  # any odd number: distinguishes the dropouts of one forward


class _Streams:
    """The keys of the sequences in the current micro-batch, and how many dropouts of its forward have drawn already."""

    def __init__(self) -> None:
        self.keys: Sequence[int] = ()
        self.calls = 0
        self.generator = torch.Generator()


_streams = _Streams()


@contextmanager
def keyed_by_sequence(keys: Sequence[int], calls: int = 0) -> Iterator[None]:
    """While it is open, one forward of a micro-batch of sequences with these keys [B] draws from their streams.

    `calls`: how many dropouts have drawn from them already.
    """
    before = _streams.keys, _streams.calls
    _streams.keys, _streams.calls = keys, calls
    try:
        yield
    finally:
        _streams.keys, _streams.calls = before


def repeated() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For torch's checkpoint: a context of what is computed now, and one in which its dropouts draw the same again."""
    return nullcontext(), keyed_by_sequence(_streams.keys, _streams.calls)


def replace_dropout(student: Any) -> None:
    """Give a student the dropout below instead of torch's; its weights stay as they are."""
    for module in student.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p))


class Dropout(nn.Dropout):
    """As torch's, with `factors`."""

    def forward(self, x: Tensor) -> Tensor:
        return x * factors(x, self.p) if self.training and self.p > 0 else x


def factors(x: Tensor, p: float) -> Tensor:
    """What dropout multiplies `x` [B, ...] by, in its shape and dtype: 0 with probability `p`, else what keeps the
    mean.

    Outside of `keyed_by_sequence`, and where the first dimension of `x` is another one, torch's stream is used.
    """
    dropped = round(p * LEVELS)
    if dropped == LEVELS:
        return torch.zeros_like(x)
    levels = _random_bits(x).view(torch.int16)
    if levels.dim() == 2:
        levels = levels[:, : x[0].numel()]
    levels = levels.reshape(-1)[: x.numel()].view(x.shape)
    return (levels >= dropped - LEVELS // 2).to(x.dtype).mul_(LEVELS / (LEVELS - dropped))


def _random_bits(x: Tensor) -> Tensor:
    """Random numbers of 64 bits, one for four values of `x`: [B, numbers of a sequence], or [numbers] without keys."""
    keys, lowest = _streams.keys, -(2**63)
    if len(keys) != len(x):
        return torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(lowest, None)
    call, _streams.calls = _streams.calls, _streams.calls + 1
    bits = torch.empty(len(x), -(-x[0].numel() // 4), dtype=torch.int64)
    for row, key in zip(bits, keys, strict=True):
        _streams.generator.manual_seed((key + call * GOLDEN) % 2**63)
        row.random_(lowest, None, generator=_streams.generator)
    return bits
