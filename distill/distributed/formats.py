"""Lets a sharded model compute in another number format for a while, as scoring does outside of training's format.

`fully_shard` takes the format once. What is changed here afterwards are attributes that torch keeps to itself, the same
in torch 2.11 to 2.13; `tests/distributed` fails where another release has others.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from distill.distributed.shard import is_sharded, reshard, sharded_modules


@contextmanager
def without_gradients(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """While it is open no operation is recorded, and a sharded model computes in this format.

    No gradients may be under way, and what is whole of a sharded model is given up before and after.
    """
    if not is_sharded(model):
        with torch.inference_mode():
            yield
        return
    with torch.no_grad():  # its parts are put together into tensors that training continues with
        before = _formats(model)
        compute_in(model, dtype)
        try:
            yield
        finally:
            _set_formats(model, before)


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """From now on the weights of a sharded model are of this format when they are whole."""
    _set_formats(model, dict.fromkeys(_formats(model), dtype))


def _formats(model: nn.Module) -> dict[Any, torch.dtype | None]:
    return {module: module._get_fsdp_state()._mp_policy.param_dtype for module in sharded_modules(model)}


def _set_formats(model: nn.Module, formats: dict[Any, torch.dtype | None]) -> None:
    reshard(model)
    for module, dtype in formats.items():
        state: Any = module._get_fsdp_state()
        if state._mp_policy.param_dtype == dtype:
            continue
        state._mp_policy = policy = replace(state._mp_policy, param_dtype=dtype)
        for group in _groups(state):
            group.mp_policy = policy
            for parameter in group.fsdp_params:
                parameter.mp_policy = policy
                parameter.all_gather_outputs = []  # of the other format; they are made anew
                with suppress(AttributeError):
                    del parameter._unsharded_param
            group._init_mp_dtypes()


def _groups(state: Any) -> list[Any]:
    """The groups of parameters of a sharded module; older releases of torch have one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
