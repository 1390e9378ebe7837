"""LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020)."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distill.distributed.shard import local, replicas
from distill.optim.optimizers import check_settings

PIECE = 2**16  # elements: weight, gradient, both moments and the update of so many fit into the cache of one core
CHUNK = 2**24  # elements that a GPU updates at a time: their updates take 64 MiB


class Lamb(torch.optim.Optimizer):
    """Adam's step for each parameter, rescaled to a length in proportion to that of the parameter.

    With m and v as in Adam, and without its bias correction as in the training of ALBERT:

        u = m / (sqrt(v) + eps) + weight_decay * w
        w = w - lr * r * u,    r = |w| / |u|, and 1 where either norm is 0

    A group of parameters with `adapt` False has r = 1: that of the biases and the gains of norms.

    m, v and u come from torch's fused kernel of Adam, which gets weight_decay * w in place of a weight. On the CPU
    each parameter is worked on in pieces that stay in the cache, since traffic with memory is what a step costs. On
    GPUs nothing waits for a norm to be known.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = False,
    ) -> None:
        """`betas`, `eps` and `weight_decay` as in `Adamw`. `bias_correction`: correct m and v for their start.

        Raises:
            ValueError: a value out of range.
        """
        check_settings(betas, eps, weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction, "adapt": True, "num_steps": 0})
        if not all(weight.is_contiguous() for group in self.param_groups for weight in group["params"]):
            raise ValueError("params: LAMB works on parameters that are contiguous in memory: make them so")
        self._updates = torch.empty(0)  # of the parameters that are worked on

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["num_steps"] += 1
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight] |= {name: torch.zeros_like(weight).detach() for name in ("m", "v")}
            if not group["adapt"]:
                _adam(group, [local(weight) for weight in weights], *self._of(weights))
            elif all(weight.device.type == "cpu" and not isinstance(weight, DTensor) for weight in weights):
                for weight in weights:
                    self._step_in_pieces(group, weight)
            else:
                for chunk in _chunks(weights):
                    self._step_together(group, chunk)

    def _of(self, weights: list[Tensor]) -> list[list[Tensor]]:
        """Gradients and both moments."""
        gradients = [local(weight.grad).contiguous() for weight in weights if weight.grad is not None]
        return [gradients, *([local(self.state[weight][name]) for weight in weights] for name in ("m", "v"))]

    def _step_in_pieces(self, group: dict[str, Any], weight: Tensor) -> None:
        """One parameter on the CPU, where it costs nothing to wait for its norm."""
        if self._updates.numel() < weight.numel() or self._updates.dtype != weight.dtype:
            self._updates = torch.empty(weight.numel(), dtype=weight.dtype)
        update = self._updates[: weight.numel()]
        length = PIECE * torch.get_num_threads()
        (gradient,), (first,), (second,) = self._of([weight])
        parts = (tensor.view(-1).split(length) for tensor in (weight, gradient, first, second, update))
        pieces = list(zip(*parts, strict=True))
        squares = []
        for w, g, m, v, u in pieces:
            torch.mul(w, group["weight_decay"], out=u)
            _adam({**group, "lr": -1.0, "weight_decay": 0.0}, [u], [g], [m], [v])
            squares.append(torch.stack([w.dot(w), u.dot(u)]))
        norm, update_norm = torch.stack(squares).double().sum(0).sqrt().tolist()
        ratio = norm / update_norm if norm > 0 and update_norm > 0 else 1.0
        for w, *_, u in reversed(pieces):  # the last ones are still in the cache
            w.sub_(u, alpha=group["lr"] * ratio)

    def _step_together(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Several parameters, on a GPU or sharded over ranks, in a few calls."""
        parts = [local(weight) for weight in weights]
        updates = list(torch._foreach_mul(parts, group["weight_decay"]))
        _adam({**group, "lr": -1.0, "weight_decay": 0.0}, updates, *self._of(weights))
        both = torch.stack([torch.stack(torch._foreach_norm(tensors)) for tensors in (parts, updates)])
        norms, update_norms = _over_ranks(both, weights)
        ratios = torch.where((norms > 0) & (update_norms > 0), norms / update_norms, 1.0)
        torch._foreach_addcmul_(parts, updates, list(ratios.unbind()), value=-group["lr"])


def _adam(
    group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor], m: list[Tensor], v: list[Tensor]
) -> None:
    """One step of AdamW in place, in torch's fused kernel."""
    if not weights:
        return
    # After infinitely many steps there is nothing left to correct.
    step_count = float(group["num_steps"]) if group["bias_correction"] else math.inf
    steps = [torch.full((), step_count, dtype=torch.float32, device=weights[0].device)] * len(weights)
    (beta1, beta2), settings = group["betas"], {name: group[name] for name in ("lr", "weight_decay", "eps")}
    torch._fused_adamw_(
        weights, gradients, m, v, [], steps, beta1=beta1, beta2=beta2, amsgrad=False, maximize=False, **settings
    )


def _over_ranks(norms: Tensor, weights: list[Tensor]) -> Tensor:
    """Norms [2, n] of parts of n weights -> those of the whole, where ranks hold parts of them."""
    sharded = [isinstance(weight, DTensor) for weight in weights]
    if not any(sharded):
        return norms
    is_sharded = torch.tensor(sharded).to(norms.device, non_blocking=True)
    squares = norms.square() * is_sharded
    dist.all_reduce(squares)  # between all ranks
    squares /= next(replicas(weight) for weight in weights if isinstance(weight, DTensor))
    return torch.where(is_sharded, squares.sqrt(), norms)


def _chunks(weights: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split tensors, in order, into lists of at most `CHUNK` elements, or of one tensor that is larger.

    Of a sharded tensor the whole counts, as its parts differ in length: all ranks exchange the norms of the same lists.
    """
    chunk: list[Tensor] = []
    for weight in weights:
        if chunk and sum(before.numel() for before in chunk) + weight.numel() > CHUNK:
            yield chunk
            chunk = []
        chunk.append(weight)
    if chunk:
        yield chunk
