"""Keeps the forward passes of divided models in step, where ranks have different numbers of them to make.

A forward of a divided model needs all ranks, each of which gives its part of the weights. In scoring ranks have
different numbers of batches: one that has no more computes an idle forward whenever another one still computes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from distill.sharding.shard import is_root


class Lockstep:
    """While it is open every forward of the models is announced to all ranks; `drain` serves those of the others.

    All ranks open it with the same models. Where two ranks compute at the same time, they are in the same place of the
    same program, and so it is the same model. `drain` has to come before any other exchange between the ranks.
    """

    def __init__(self, models: Sequence[nn.Module], idle: Callable[[nn.Module], object]) -> None:
        """`idle` computes a forward of a model whose outcome nobody reads."""
        self._models = [module for model in models for module in roots(model)]
        self._idle = idle
        self._announces = True

    def __enter__(self) -> Self:
        self._hooks = [
            model.register_forward_pre_hook(self._hook(number), prepend=True)
            for number, model in enumerate(self._models, 1)
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if error is None:  # else the others wait for this rank in vain, and the run ends
            self.drain()

    def drain(self) -> None:
        """Compute idle forwards until no rank has one of its own to make."""
        while number := _largest(0):
            self._announces = False
            with torch.no_grad():
                self._idle(self._models[number - 1])
            self._announces = True

    def _hook(self, number: int) -> Callable[..., None]:
        def announce(_: nn.Module, __: Any) -> None:
            if self._announces:
                _largest(number)

        return announce


def roots(model: nn.Module) -> list[nn.Module]:
    """The divided models in `model`, which may be itself: the outermost of its divided modules."""
    if is_root(model):
        return [model]
    return [root for child in model.children() for root in roots(child)]


def _largest(number: int) -> int:
    """The largest of the ranks' numbers."""
    found = torch.tensor(number)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)
