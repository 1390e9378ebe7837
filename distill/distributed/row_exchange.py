"""Rows that all ranks of a group work on, each with its slice of the vocabulary; and the embedding cut so.

Shapes: T ranks in the group, N_r rows of rank r, N the rows of all, B rows of a batch, S positions, H hidden size, V_t
entries of the vocabulary in one rank's slice.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class RowExchange:
    """The rows of every rank at all ranks of a group, in the order of the ranks, and the way back.

    Ranks may have any number of rows, also none. All of them have to make the same calls in the same order. Both ways
    are one all-to-all, which takes uneven parts on Gloo and NCCL alike: what is sent is that of an all-gather and of a
    reduce-scatter.

    Attributes:
        rank: of this process in the group; size: T.
        counts: rows of each rank.
        numbers: whatever else each rank said of itself, by rank.
        own: where the rows of this rank lie among all.
    """

    def __init__(self, num_rows: int, numbers: Sequence[int], group: dist.ProcessGroup) -> None:
        """Exchange the sizes: the only thing that is waited for, between the hosts, so `group` has to know the CPU.

        Args:
            numbers: equally many on each rank.
            group: `init_process_group` without a backend, or with "cpu:gloo,cuda:nccl", makes such groups.
        """
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        said = torch.tensor([num_rows, *numbers])
        found = [torch.empty_like(said) for _ in range(self.size)]
        dist.all_gather(found, said, group=group)
        self.counts, self.numbers = [int(each[0]) for each in found], [each[1:].tolist() for each in found]
        stop = sum(self.counts[: self.rank + 1])
        self.own = slice(stop - num_rows, stop)

    def gathered(self, own: Tensor) -> Tensor:
        """[N_r, ...] of each rank -> [N, ...] at all of them."""
        everything = own.new_empty(sum(self.counts), *own.shape[1:])
        copies = own.detach().repeat(self.size, *[1] * (own.dim() - 1))
        dist.all_to_all_single(everything, copies, self.counts, [len(own)] * self.size, group=self.group)
        return everything

    def joined_columns(self, parts: Tensor) -> Tensor:
        """Columns [N, V_t] of all rows, V_t as this rank's number in `numbers` -> whole rows of this rank, [N_r, V]."""
        widths, num_rows = [int(width) for width, *_ in self.numbers], self.counts[self.rank]
        found = parts.new_empty(num_rows * sum(widths))
        sent = [count * parts.shape[1] for count in self.counts]
        dist.all_to_all_single(
            found, parts.contiguous().view(-1), [num_rows * width for width in widths], sent, group=self.group
        )
        pieces = found.split([num_rows * width for width in widths])
        return torch.cat([piece.view(num_rows, width) for piece, width in zip(pieces, widths, strict=True)], 1)

    def given_back(self, parts: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """[N, ...] at all ranks -> the sums over the ranks of this rank's rows, [N_r, ...] in at least fp32.

        They are added up in the order of the ranks, so that every run gives the same digits.

        Args:
            shape: [*shape, ...] instead of [N_r, ...]; it has as many rows.
        """
        num_rows = self.counts[self.rank]
        found = parts.new_empty(self.size * num_rows, *parts.shape[1:])
        dist.all_to_all_single(found, parts.contiguous(), [num_rows] * self.size, self.counts, group=self.group)
        found = found.view(self.size, *(shape or (num_rows,)), *parts.shape[1:])
        return found.sum(0, dtype=torch.promote_types(parts.dtype, torch.float32))


def starts_of(widths: Sequence[int]) -> list[int]:
    """Where slices of these widths begin that lie one behind the other."""
    return list(accumulate(widths[:-1], initial=0))


def embed(ids: Tensor, weight: Tensor, group: dist.ProcessGroup, padding_idx: int | None = None) -> Tensor:
    """ids [B, S] of this rank -> [B, S, H], as by an embedding whose slices [V_t, H] lie on the ranks of a group.

    The slices are consecutive, in the order of the ranks, of any widths. Every rank looks up the ids of all and gives
    the vectors back to those who need them. The gradient of `weight` is that of the rows of all ranks; backward is
    an exchange as well, so each rank has to come to it, also one whose batch is empty.

    Args:
        padding_idx: this entry of the vocabulary gets no gradient, as in `nn.Embedding`.
    """
    exchange = RowExchange(ids.numel(), [len(weight)], group)
    start = starts_of([width for (width,) in exchange.numbers])[exchange.rank]
    number = exchange.gathered(ids.reshape(-1)) - start
    here = (number >= 0) & (number < len(weight))
    if padding_idx is not None and 0 <= padding_idx - start < len(weight):
        padding_idx -= start
    else:
        padding_idx = None
    if len(weight):
        vectors = F.embedding(number.where(here, 0), weight, padding_idx).masked_fill(~here[:, None], 0)
    else:  # the sum of nothing: a rank without a slice takes part in backward too
        vectors = weight.new_zeros(len(number), weight.shape[1]) + weight.sum()
    found: Tensor = _GivenBack.apply(vectors, exchange, ids.shape)
    return found


class _GivenBack(torch.autograd.Function):
    """[N, H] -> [B, S, H] by `RowExchange.given_back`; its gradient is what the owners of the rows say, gathered."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, exchange: RowExchange, shape: torch.Size) -> Tensor:
        ctx.exchange = exchange
        return exchange.given_back(parts, shape).to(parts.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.gathered(upstream.flatten(0, -2)), None, None
