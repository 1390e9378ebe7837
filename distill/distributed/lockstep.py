"""Keeps calls of sharded models in step, where ranks have different numbers of them to make.

A forward of a sharded model needs all ranks, each of which gives its part of the weights. In scoring ranks have
different numbers of batches: one that has no more computes an idle forward whenever another one still computes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from distill.distributed.shard import is_root


class Lockstep:
    """While it is open every call of some modules is announced to all ranks, and made by all of them together.

    All ranks open it with the same modules. Where two of them announce different ones the module with the higher number
    is called first, idly by those that did not mean it. `drain` serves the calls of others until nobody has any; it
    has to come before any other exchange between the ranks.
    """

    def __init__(self, modules: Sequence[nn.Module], idle: Callable[[nn.Module], object]) -> None:
        """`idle` calls one of them; its outcome is not used."""
        self._modules, self._idle = modules, idle
        self._announces = True

    def __enter__(self) -> Self:
        self._hooks = [
            module.register_forward_pre_hook(self._hook(number), prepend=True)
            for number, module in enumerate(self._modules, 1)
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:  # else the others wait for this rank in vain, and the run ends
            self.drain()
        for hook in self._hooks:
            hook.remove()

    def drain(self) -> None:
        """Make idle calls until no rank has one of its own to make."""
        self._announce(0)

    def _hook(self, number: int) -> Callable[..., None]:
        def before_call(_: nn.Module, __: Any) -> None:
            if self._announces:
                self._announce(number)

        return before_call

    def _announce(self, number: int) -> None:
        """Return when it is the turn of this number, after idle calls of the modules that others have to call."""
        while (first := _largest(number)) != number:
            self._announces = False
            with torch.no_grad():
                self._idle(self._modules[first - 1])
            self._announces = True


def roots(model: nn.Module) -> list[nn.Module]:
    """The sharded models in `model`, which may be itself: the outermost of its sharded modules."""
    if is_root(model):
        return [model]
    return [root for child in model.children() for root in roots(child)]


def _largest(number: int) -> int:
    """The largest of the ranks' numbers."""
    largest = torch.tensor(number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
