"""Orders: every sequence once an epoch, nothing lost by resuming on other ranks, few blocks at a time, well mixed."""

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_batches, make_masks, make_rows

from distill.data.order import FullShuffle, Order, WindowedShuffle, order_of
from distill.runtime.seed import key, shuffled


def starts_of_sizes(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def windowed(blocks: int = 24, rows: int = 40, window: int = 6, seed: int = 3) -> WindowedShuffle:
    """The last block of every third, which ends a shard, is shorter."""
    return WindowedShuffle(starts_of_sizes([rows - 17 * (each % 3 == 2) for each in range(blocks)]), window, seed)


def whole(order: Order, epoch: int) -> np.ndarray:
    return order.numbers(epoch, np.arange(len(order)))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 45), st.integers(0, 9), st.integers(0, 2))
def test_every_row_once_an_epoch(sizes: list[int], window: int, seed: int, epoch: int) -> None:
    order = WindowedShuffle(starts_of_sizes(sizes), window, seed)
    assert np.array_equal(np.sort(whole(order, epoch)), np.arange(sum(sizes)))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 500), st.integers(1, 400))
def test_windows_cover_all_files_and_none_is_too_large(files: int, window: int) -> None:
    bounds = WindowedShuffle(np.arange(files + 1), window, 0).plan(1).edges  # files of one sequence
    assert bounds[0] == 0 and bounds[-1] == files
    assert np.diff(bounds).min() >= 1 and np.diff(bounds).max() <= window
    assert np.diff(bounds).max() - np.diff(bounds).min() <= 1


def test_any_position_is_known_without_what_came_before() -> None:
    order, other = windowed(), windowed()
    for epoch in (0, 1, 5):
        expected = whole(order, epoch)
        positions = np.random.default_rng(epoch).permutation(len(order))[:100]
        assert np.array_equal(other.numbers(epoch, positions), expected[positions])
    assert not np.array_equal(whole(order, 1), whole(order, 2))
    assert not np.array_equal(whole(order, 1), whole(windowed(seed=4), 1))


def test_a_window_is_shuffled_whole_and_alone() -> None:
    order = windowed()
    plan = order.plan(1)
    numbers = whole(order, 1)
    assert len(plan.edges) == 5
    for begin, end in pairwise(plan.edges):
        first, last = np.searchsorted(plan.starts, [begin, end])
        rows = [np.arange(order.starts[b], order.starts[b + 1]) for b in plan.files[first:last]]
        assert np.array_equal(np.sort(numbers[begin:end]), np.sort(np.concatenate(rows)))
        neighbours = np.abs(np.diff(numbers[begin:end])) == 1
        assert neighbours.mean() < 0.05


def test_the_full_shuffle_is_the_one_of_before() -> None:
    order = FullShuffle(997, 5)
    for epoch in (0, 3):
        expected = shuffled(np.arange(997), 997, key(5, "order", epoch))
        assert np.array_equal(whole(order, epoch), expected)
    assert order.identity is None


class Stored(np.ndarray):
    """Sequences that lie in blocks of ten."""

    @property
    def starts(self) -> np.ndarray:
        return np.arange(0, len(self) + 1, 10)


def test_a_corpus_that_fits_is_shuffled_as_a_whole() -> None:
    rows = np.zeros((100, 8), np.uint16).view(Stored)
    assert isinstance(order_of(rows, 100 * 16, 0), FullShuffle)
    order = order_of(rows, 100 * 16 - 1, 0)
    assert isinstance(order, WindowedShuffle) and order.window == 9 and order.identity is not None
    tiny = order_of(rows, 1, 0)
    assert isinstance(tiny, WindowedShuffle) and tiny.window == 1
    assert isinstance(order_of(np.zeros((100, 8), np.uint16), 1, 0), FullShuffle)


def test_batches_of_all_ranks_are_those_of_one(tokenizer: Any) -> None:
    rows = make_rows(53, shortest=5)
    order = WindowedShuffle(starts_of_sizes([10, 10, 3, 10, 10, 10]), 2, 0)

    def step(number: int, rank: int, size: int) -> dict[int, list[int]]:
        masks = make_masks(tokenizer, rows)
        batches = make_batches(rows, masks, 4, 1, 0, rank=rank, size=size, sequences=12, order=order)
        assert batches.steps_per_epoch == 5
        window = batches.window(number)
        return {int(id): ids.tolist() for batch in window for id, ids in zip(batch.row_ids, batch.ids, strict=True)}

    for number in (0, 4, 7):
        parts = [step(number, rank, 5) for rank in range(5)]
        assert sum(map(len, parts)) == (12 if number % 5 < 4 else 5)
        assert {id: ids for part in parts for id, ids in part.items()} == step(number, 0, 1)
