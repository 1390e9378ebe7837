"""The optimizer of a run from its settings, its groups of parameters, and clipping."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from distill.config.settings import OptimizerConfig
from distill.distributed.shard import local, replicas
from distill.optim.optimizer_state import PART_OF
from distill.runtime.errors import SettingError

LR_RATIO = "lr_ratio"  # of a group of parameters: its learning rate, as a multiple of the run's


def build(model: nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of everything in `model` that is trained.

    Weight decay, and the adaptation of a step to the size of its parameter, are for matrices (embeddings included);
    biases and the gains of norms are left alone.

    Raises:
        SettingError: settings that the optimizer does not take, or a callable that gives none.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2]},
        # An optimizer without weight decay, or without steps adapted to the parameter, ignores these.
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "adapt": False},
    ]
    optimizer = settings.make(params=_by_mesh(groups), lr=settings.lr)
    setting = f"optimizer._target_={settings.make.path}"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(
            f"{setting} gives a {type(optimizer).__name__}, not a torch.optim.Optimizer: name a callable that gives one"
        )
    if not all("lr" in group for group in optimizer.param_groups):
        raise SettingError(f"{setting} has no lr in its groups of parameters, so no schedule could set it: pass it on")
    _keep_ratios(optimizer, settings.lr)
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if moved != {id(p) for p in parameters}:
        raise SettingError(f"{setting} does not train the parameters that it is given as params: pass them all on")
    return optimizer


def _keep_ratios(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Where groups have different rates, as with layer-wise decay, each keeps in `lr_ratio` its own over `lr`."""
    rates = [lr if group["lr"] is None else float(group["lr"]) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if len({*rates}) > 1:
            group[LR_RATIO] = rate / lr


def _by_mesh(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups, each cut up by the ranks between which its parameters are sharded: torch's operators mix none.

    The first part of each group comes first and in order; a further one has in `part_of` the group it belongs to.
    """
    first, more = [], []
    for number, group in enumerate(groups):
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        parts = list(by_mesh.values()) or [[]]
        first.append({**group, "params": parts[0]})
        more += [{**group, "params": part, PART_OF: number} for part in parts[1:]]
    return first + more


def try_out(settings: OptimizerConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One step of the optimizer on a matrix and a vector, which shows whether a run can use it; gives both.

    Raises:
        SettingError: the optimizer cannot be made, or fails when it is called as in a run.
    """
    model = nn.ParameterDict({"matrix": torch.ones(4, 4), "vector": torch.ones(4)})
    optimizer = build(model, settings)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    try:
        set_learning_rate(optimizer, settings.lr)
        optimizer.step()
    except Exception as error:
        text = " ".join(str(error).split())
        raise SettingError(f"optimizer._target_={settings.make.path} fails in a step of its own: {text}") from error
    return model, optimizer


def peak_lr(settings: OptimizerConfig, sequences_per_step: int) -> float:
    """The learning rate that the schedule scales: `optimizer.lr` as `scale_lr` changes it for so many sequences.

    "linear" is the rule of Goyal et al., "Accurate, Large Minibatch SGD" (2017), "sqrt" that of LAMB's paper.
    """
    if settings.scale_lr == "none" or settings.base_batch is None:
        return settings.lr
    growth = sequences_per_step / settings.base_batch
    return settings.lr * (growth if settings.scale_lr == "linear" else math.sqrt(growth))


def bound_of_rank(settings: OptimizerConfig, ranks: int) -> float | None:
    """The largest norm of a rank's own gradient with `clip_each_rank`; None: the whole gradient alone is clipped.

    Where ranks clip, they usually clip the mean over their own positions at `clip`, and then take the mean over the
    ranks. Here a rank's gradient is a sum over its positions, divided by the number of those of all ranks: that mean
    divided by `ranks`, and so is its bound. What the ranks sum up to is then within `clip`, too.
    """
    if not settings.clip_each_rank or settings.clip is None or ranks == 1:
        return None
    return settings.clip / ranks


def clip_gradients(model: nn.Module, largest: float | None) -> torch.Tensor:
    """The norm of the whole gradient, which is scaled down to `largest` where that is given and exceeded."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    norm = torch.nn.utils.get_total_norm([gradient for gradient in gradients if not isinstance(gradient, DTensor)])
    if sharded:  # every element of these is on as many ranks: one small exchange
        squares = torch.nn.utils.get_total_norm([local(gradient) for gradient in sharded]).square()
        dist.all_reduce(squares)
        squares /= replicas(sharded[0])
        norm = (norm.to(squares, non_blocking=True).square() + squares).sqrt()
    if largest is not None:
        factor = (largest / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
    return norm


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate in every group: `lr`, times the ratio of the group where `build` has kept one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_RATIO, 1.0)
