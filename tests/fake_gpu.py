"""A GPU that is not there: what torch asks of a real one, as far as a step needs it under FakeTensorMode.

Such tensors have a shape, a format and a device, and no values. torch's engine asks for the GPU itself.
"""

import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from test_waits import ASKING
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = {"_to_copy": 0, "copy_": 1}  # operators, and which of their arguments is copied


class Engine:
    """Goes through the graph of a loss as torch's engine does, and checks that each gradient is where it belongs."""

    def __init__(self) -> None:
        self.hooks: dict[Any, list[Any]] = {}  # of tensors, by what has made them
        self.callbacks: list[Any] = []

    def register_hook(self, tensor: Tensor, hook: Any) -> None:
        self.hooks.setdefault((tensor.grad_fn, tensor.output_nr), []).append(hook)

    def queue_callback(self, callback: Any) -> None:
        """Call it at the end of the backward pass that is under way."""
        self.callbacks.append(callback)

    @torch.no_grad()
    def backward(self, loss: Tensor, wanted: Sequence[Tensor] = ()) -> list[Tensor]:
        """Gradients of the leaves that are wanted; where none are, those of all are added up in them."""
        found = {id(leaf): torch.zeros_like(leaf) for leaf in wanted}
        waiting: dict[Any, dict[int, Tensor]] = {loss.grad_fn: {0: torch.ones_like(loss)}}
        while waiting:
            node = max(waiting, key=lambda each: each._sequence_nr())  # made last: nothing more comes to it
            gradients: list[Any] = [None] * len(node._input_metadata)
            for number, gradient in waiting.pop(node).items():
                like = node._input_metadata[number]
                assert gradient.device == like.device, f"{node}: a gradient on {gradient.device}"
                gradients[number] = gradient.sum_to_size(tuple(like.shape)).to(like.dtype)
                for hook in self.hooks.get((node, number), ()):
                    hook(gradients[number])
            if wanted and hasattr(node, "variable"):
                if id(node.variable) in found:
                    found[id(node.variable)] += gradients[0]
                continue
            in_python = hasattr(node, "needs_input_grad")  # with a result for what is no tensor, too
            results = node.apply(*gradients) if in_python else node(*gradients)
            results, edges = results if isinstance(results, tuple) else (results,), node.next_functions
            if in_python:
                results = [each for each, needs in zip(results, node.needs_input_grad, strict=True) if needs]
                edges = [edge for edge in edges if edge[0] is not None]
            for (following, number), result in zip(edges, results, strict=False):
                if following is not None and result is not None:
                    into = waiting.setdefault(following, {})
                    into[number] = into[number] + result if number in into else result
        while self.callbacks:
            self.callbacks.pop()()
        return list(found.values())


def move(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """As `Module.to`, which cannot exchange the values of fake tensors: tied weights stay tied, buffers as they are."""
    moved: dict[int, Any] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if old is not None and old.device != torch.device(device):
                    is_weight = isinstance(old, nn.Parameter) and id(old) not in moved
                    new = moved.get(id(old), old.detach().to(device, dtype if is_weight else None))
                    moved[id(old)] = nn.Parameter(new, old.requires_grad) if is_weight else new
                    tensors[name] = moved[id(old)]
    return module


class Watch(TorchDispatchMode):
    """Answers who asks for a value, and keeps what a GPU does.

    Attributes:
        waits: how often a GPU would be waited for, by file and function: for a value, or for a copy.
        products: formats of matrix products on it: of what is multiplied, and of what comes out.
        largest: bytes of the largest tensor that is made on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.products: set[tuple[torch.dtype, torch.dtype]] = set()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name, keywords = function._schema.name.partition("::")[2], keywords or {}
        if name in ASKING and arguments[0].is_cuda:
            self._wait()
        if name == "_local_scalar_dense":
            return 0.0 if arguments[0].is_floating_point() else 0
        result = function(*arguments, **keywords)
        waits = name in COPIES and not keywords.get("non_blocking", len(arguments) > 2 and arguments[2])
        if waits and result.is_cuda != arguments[COPIES[name]].is_cuda:
            self._wait()
        if name == "index" and result.is_cuda and not all(each is None or each.is_cuda for each in arguments[1]):
            self._wait()  # torch moves the index
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and made.is_cuda:
                self.largest = max(self.largest, made.nbytes)
                if name in ("mm", "addmm"):
                    self.products.add((arguments[name == "addmm"].dtype, made.dtype))
        return result

    def _wait(self) -> None:
        """Note who asks, outside of torch and of the tests."""
        own = str(Path(__file__).parent)
        frames = [each for each in traceback.extract_stack() if "/torch/" not in each.filename]
        last = [each for each in frames if not each.filename.startswith(own)][-1]
        self.waits[Path(last.filename).name, last.name] += 1
