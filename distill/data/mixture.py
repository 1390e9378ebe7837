"""The sequences of several sources in fixed fractions: an order, a pure function of seed, epoch and position.

An epoch has as many sequences as all sources together. Each source has its fraction of them, rounded to whole
sequences. The source goes through its own sequences pass by pass, each pass in another order, and its next epoch
continues where the last one ended: a small source of a large weight is seen several times in an epoch, a large one of a
small weight not whole.

The positions of an epoch are cut into strata of about `STRATUM` sequences. Every stratum has as many sequences of each
source as its fraction gives, to the sequence, and they are shuffled within it. So the mix is even from the first steps
on, and the sequence at a position follows without what came before it.

Lengths: n positions, K sources.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distill.data.order import Order
from distill.data.sequence_store import SequenceStore, expect, recorded, token_dtype
from distill.runtime.errors import SettingError
from distill.runtime.seed import key, shuffled

STRATUM = 4096  # positions


def quotas(weights: Sequence[float], count: int) -> np.ndarray:
    """How many of `count` sequences each source has, [K] int64: its rounded fraction (largest remainders)."""
    exact = np.asarray(weights, np.float64) / np.sum(weights) * count
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: count - int(counts.sum())]] += 1
    return counts


class Fed(NamedTuple):
    """What an order has fed of one source."""

    sequences: int
    passes: float  # over the source's own sequences
    tokens: int  # sequences x tokens a sequence in the mean of the source: exact after whole passes


@dataclass(frozen=True)
class Mixture:
    """The order of the sequences of several sources, which are numbered through in the order of the sources."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    orders: tuple[Order, ...]  # of each source's own sequences; its pass takes the place of the epoch
    tokens_per_sequence: tuple[float, ...]  # in the mean of each source
    seed: int

    def __post_init__(self) -> None:
        for name, weight, quota in zip(self.names, self.weights, self.quotas, strict=True):
            if not quota:
                raise SettingError(
                    f"corpus.sources.{name}.weight={weight:g} is too small: of {len(self):,} sequences an epoch none "
                    "is from that source; raise it, or leave the source out"
                )

    def __len__(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def sizes(self) -> np.ndarray:
        """[K] int64: the sequences of each source."""
        return np.array([len(order) for order in self.orders], np.int64)

    @cached_property
    def quotas(self) -> np.ndarray:
        """[K] int64: the sequences of each source in an epoch."""
        return quotas(self.weights, len(self))

    @cached_property
    def offsets(self) -> np.ndarray:
        """[K + 1] int64: the number of each source's first sequence."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    def numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        sources, drawn_before = self._draws(epoch, positions)
        numbers = np.empty(len(positions), np.int64)
        for source, order in enumerate(self.orders):
            passes, within = np.divmod(drawn_before, len(order))
            for number in np.unique(passes[sources == source]):
                here = (sources == source) & (passes == number)
                numbers[here] = self.offsets[source] + order.numbers(int(number), within[here])
        return numbers

    def passes(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """[n] int64: the pass over its source that each sequence belongs to."""
        sources, drawn_before = self._draws(epoch, positions)
        return drawn_before // self.sizes[sources]

    def places(self, numbers: np.ndarray) -> np.ndarray | None:
        """How far along its source's sequences of the step each one stands: ranks have an equal part of each source."""
        if all(order.identity is None for order in self.orders):
            return None
        by_number = np.argsort(numbers, kind="stable")
        sources = np.searchsorted(self.offsets, numbers[by_number], side="right") - 1
        counts = np.bincount(sources, minlength=len(self.orders))
        index_in_source = np.arange(len(numbers)) - (np.cumsum(counts) - counts)[sources]
        places = np.empty(len(numbers))
        places[by_number] = (index_in_source + 0.5) / counts[sources]
        return places

    def upcoming(self, epoch: int, position: int, left: int, rank: int, size: int) -> np.ndarray:
        """The files of all sources, by how far along they come in those of their source."""
        before = self._before(int(self._strata(np.array([min(position, len(self) - 1)]))[0]))
        upcoming, along = [np.empty(0, np.int64)], [np.empty(0)]
        for source, order in enumerate(self.orders):
            passed, own = divmod(int(epoch * self.quotas[source] + before[source]), len(order))
            own_left = max(1, round(left * self.quotas[source] / len(self)))
            numbers = order.upcoming(passed, own, own_left, rank, size)
            upcoming.append(self.offsets[source] + numbers)
            along.append((np.arange(len(numbers)) + 0.5) / max(len(numbers), 1))
        return np.concatenate(upcoming)[np.argsort(np.concatenate(along), kind="stable")]

    @property
    def identity(self) -> Hashable:
        """What is fed of each source in an epoch, and how the source's own sequences are ordered."""
        sources = zip(self.names, self.quotas, self.orders, strict=True)
        return "; ".join(
            f"{quota} rows of {name}" + (f" ({order.identity})" if order.identity is not None else "")
            for name, quota, order in sources
        )

    def fed(self, epoch: int, positions: int) -> dict[str, Fed]:
        """What has been fed of each source after so many epochs and then so many positions of the next."""
        counts: np.ndarray = epoch * self.quotas
        if positions:
            begins = self._before(int(self._strata(np.array([min(positions, len(self)) - 1]))[0]))
            sources, _ = self._draws(epoch, np.arange(int(begins.sum()), min(positions, len(self))))
            counts = counts + begins + np.bincount(sources, minlength=len(self.orders))
        sizes = zip(self.names, counts, self.sizes, self.tokens_per_sequence, strict=True)
        return {name: Fed(int(count), float(count / size), round(count * mean)) for name, count, size, mean in sizes}

    def _draws(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position [n], and how many of its sequences were fed before, in all epochs, [n]."""
        sources, drawn_before = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        strata = self._strata(positions)
        for stratum in np.unique(strata):
            inside = strata == stratum
            before = self._before(int(stratum))
            ends = np.cumsum(self._before(int(stratum) + 1) - before)  # of each source's sequences in the stratum
            order = key(self.seed, "mixture", epoch, int(stratum))
            drawn = shuffled(positions[inside] - int(before.sum()), int(ends[-1]), order)
            sources[inside] = source = np.searchsorted(ends, drawn, side="right")
            drawn_before[inside] = before[source] + drawn - np.concatenate([[0], ends])[source]
        return sources, epoch * self.quotas[sources] + drawn_before

    def _before(self, stratum: int) -> np.ndarray:
        """[K] int64: the sequences of each source before a stratum.

        The r-th of the q sequences of a source belongs at (r + 1/2) / q of the epoch; before a stratum come all
        sequences that belong before its ideal beginning. This never falls from one stratum to the next, which fractions
        rounded one by one would do for small weights, and so the strata differ in length by a few sequences.
        """
        begin = min(stratum * STRATUM, len(self))
        before = [-(-(2 * begin * int(quota) - len(self)) // (2 * len(self))) for quota in self.quotas]
        return np.clip(np.array(before, np.int64), 0, self.quotas)

    def _strata(self, positions: np.ndarray) -> np.ndarray:
        """[n] int64: the stratum of each position."""
        if not len(positions):
            return positions
        low, high = max(int(positions.min()) // STRATUM - 1, 0), int(positions.max()) // STRATUM + 2
        starts = np.array([self._before(number).sum() for number in range(low, high)])
        return low + np.searchsorted(starts, positions, side="right") - 1


class StackedSequences:
    """The sequences of several stores, numbered through in their order."""

    def __init__(self, stores: Sequence[SequenceStore]) -> None:
        self.stores = stores
        self._offsets = np.cumsum([0, *(len(store) for store in stores)])

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), self.stores[0].shape[1]

    @property
    def dtype(self) -> np.dtype:
        """That of the widest ids of the stores, in records where any store has them."""
        types = [store.dtype for store in self.stores]
        widest = np.result_type(*(type_["id"] if type_.names else type_ for type_ in types))
        return token_dtype(widest, any(type_.names for type_ in types))

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        """[n, S]; where only some stores have records, all tokens of the others are targets."""
        tokens = np.zeros((len(numbers), self.shape[1]), self.dtype)
        for store, here, own in self._divided(numbers):
            if len(here):
                tokens[here] = recorded(store[own]) if tokens.dtype.names else store[own]
        return tokens

    def expect(self, numbers: np.ndarray) -> None:
        """Announce to every store the sequences that will be read soon, [n] int64, perhaps none of its own."""
        for store, _, own in self._divided(numbers):
            expect(store, own)

    def _divided(self, numbers: np.ndarray) -> list[tuple[SequenceStore, np.ndarray, np.ndarray]]:
        """Every store, which of these numbers are of it, and what they are there."""
        of_store = np.searchsorted(self._offsets, numbers, side="right") - 1
        here = [np.flatnonzero(of_store == store) for store in range(len(self.stores))]
        return [
            (store, own, numbers[own] - first)
            for store, own, first in zip(self.stores, here, self._offsets, strict=False)
        ]
