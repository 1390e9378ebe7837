"""The order in which the sequences of an epoch are fed: a pure function of seed, epoch and position.

Nothing of it is saved or passed on from step to step. A run that resumes anywhere, on any number of ranks, computes
the sequences of the positions that come next as it would have without the interruption.

Lengths: n positions, B files of sequences (`distill.data.shards`), W windows, K sources of a mixture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distill.data.sequence_store import SequenceStore, sequence_bytes, starts_of
from distill.runtime.errors import SettingError
from distill.runtime.seed import key, shuffled

STRATUM = 4096  # positions


@dataclass(frozen=True)
class FullShuffle:
    """All sequences in a random order, another one in every epoch."""

    num_sequences: int
    seed: int

    def __len__(self) -> int:
        """Sequences of an epoch."""
        return self.num_sequences

    def numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The numbers [n] int64 of the sequences at these positions [n] int64 of an epoch."""
        return shuffled(positions, self.num_sequences, key(self.seed, "order", epoch))

    def passes(self, epoch: int, positions: np.ndarray) -> int:
        """How often each of these sequences came before; its masks are drawn anew by that number."""
        return epoch

    @property
    def identity(self) -> None:
        """What decides the order besides the seed and the number of sequences: nothing."""
        return None


class Plan(NamedTuple):
    """The windows of an epoch."""

    files: np.ndarray  # [B] int64: the files in their order
    starts: np.ndarray  # [B + 1] int64: the position of the first sequence of each of them
    edges: np.ndarray  # [W + 1] int64: the position at which each window begins


@dataclass(frozen=True, eq=False)
class WindowedShuffle:
    """Files in a random order, cut into windows, and the sequences of each window in a random order.

    Only the files of a window have to be near, whatever the size of the corpus. Its methods are those of `FullShuffle`.
    """

    starts: np.ndarray  # [B + 1] int64: the first sequence of each file, then the number of sequences
    window: int  # files of a window
    seed: int

    def __len__(self) -> int:
        return int(self.starts[-1])

    def numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        plan = self.plan(epoch)
        windows = np.searchsorted(plan.edges, positions, side="right") - 1
        shuffled_to = np.empty(len(positions), np.int64)
        for window in np.unique(windows):
            begin, end = plan.edges[window : window + 2]
            inside = windows == window
            order = key(self.seed, "window", epoch, int(window))
            shuffled_to[inside] = begin + shuffled(positions[inside] - begin, int(end - begin), order)
        file = np.searchsorted(plan.starts, shuffled_to, side="right") - 1
        return self.starts[plan.files[file]] + shuffled_to - plan.starts[file]

    def passes(self, epoch: int, positions: np.ndarray) -> int:
        return epoch

    def plan(self, epoch: int) -> Plan:
        """The windows of an epoch, all of nearly one size."""
        count = len(self.starts) - 1
        files = shuffled(np.arange(count), count, key(self.seed, "blocks", epoch))
        starts = np.concatenate([[0], np.cumsum(np.diff(self.starts)[files])])
        windows = -(-count // self.window)
        return Plan(files, starts, starts[np.arange(windows + 1) * count // windows])

    @property
    def identity(self) -> str:
        """Files and windows: with others the same seed gives another order."""
        longest = int(np.diff(self.starts).max())
        return f"{len(self.starts) - 1} files of at most {longest} sequences, {self.window} a window"


Order = FullShuffle | WindowedShuffle


def order_of(sequences: SequenceStore, shuffle_bytes: int, seed: int) -> Order:
    """A full shuffle where the sequences take at most `shuffle_bytes`, else one in windows of files of about so many.

    It depends on the sequences and their files, and not on where these lie.
    """
    starts, width = starts_of(sequences), sequence_bytes(sequences)
    if starts is None or len(sequences) * width <= shuffle_bytes:
        return FullShuffle(len(sequences), seed)
    window = shuffle_bytes * (len(starts) - 1) // (len(sequences) * width)
    return WindowedShuffle(starts, max(1, window), seed)


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
    """The order of the sequences of several sources, which are numbered through in the order of the sources.

    An epoch has as many sequences as all sources together. Each source has its fraction of them, rounded to whole
    sequences. The source goes through its own sequences pass by pass, each pass in another order, and its next epoch
    continues where the last one ended: a small source of a large weight is seen several times in an epoch, a large one
    of a small weight not whole.

    The positions of an epoch are cut into strata of about `STRATUM` sequences. Every stratum has as many sequences of
    each source as its fraction gives, to the sequence, and they are shuffled within it. So the mix is even from the
    first steps on, and the sequence at a position follows without what came before it.
    """

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

    @property
    def identity(self) -> str:
        """What is fed of each source in an epoch, and how the source's own sequences are ordered."""
        sources = zip(self.names, self.quotas, self.orders, strict=True)
        return "; ".join(
            f"{quota} sequences of {name}" + (f" ({order.identity})" if order.identity is not None else "")
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
