"""Counts the collective calls by which a divided module gathers its weights and reduces its gradients."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

# By their names in torch 2.13, and in older releases.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def count_exchanges(module: FSDPModule, count: Callable[[Tensor], None]) -> None:
    """From now on call `count` with what this rank hands to each of those calls."""
    # torch keeps the classes of its interface to itself; these have the same methods.
    module.set_custom_all_gather(_AllGather(count))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(_ReduceScatter(count))  # type: ignore[arg-type]


class _Counted:
    def __init__(self, count: Callable[[Tensor], None]) -> None:
        self._count = count

    def allocate(self, size: list[int] | torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._count(input_tensor)
        return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Counted):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._count(input_tensor)
        return REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
