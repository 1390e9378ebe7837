"""Orders: every sequence once an epoch, nothing lost by resuming on other ranks, few blocks at a time, well mixed."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_batches, make_masks, make_rows

from distill.data.order import FullShuffle, Order, WindowedShuffle, of_rank, order_of, window_bounds
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
@given(st.integers(1, 500), st.integers(1, 400), st.booleans())
def test_windows_cover_all_blocks_and_none_is_too_large(blocks: int, window: int, ramp: bool) -> None:
    bounds = window_bounds(blocks, window, ramp)
    assert bounds[0] == 0 and bounds[-1] == blocks
    assert np.diff(bounds).min() >= 1 and np.diff(bounds).max() <= window
    if not ramp:
        assert np.diff(bounds).max() - np.diff(bounds).min() <= 1


def test_the_first_windows_of_a_run_are_small() -> None:
    assert np.diff(window_bounds(1000, 64, ramp=True)).tolist()[:6] == [2, 3, 5, 8, 12, 18]
    assert np.diff(window_bounds(20, 64, ramp=True)).tolist() == [2, 3, 5, 8, 2]


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
    for (begin, end), (first, last) in zip(pairwise(plan.edges), pairwise(plan.bounds), strict=True):
        rows = [np.arange(order.starts[b], order.starts[b + 1]) for b in plan.files[first:last]]
        assert np.array_equal(np.sort(numbers[begin:end]), np.sort(np.concatenate(rows)))
        neighbours = np.abs(np.diff(numbers[begin:end])) == 1
        assert neighbours.mean() < 0.05


def test_the_full_shuffle_is_the_one_of_before() -> None:
    order = FullShuffle(997, 5)
    for epoch in (0, 3):
        expected = shuffled(np.arange(997), 997, key(5, "order", epoch))
        assert np.array_equal(whole(order, epoch), expected)
        shares = [expected[:64][of_rank(order, expected[:64], rank, 3)] for rank in range(3)]
        assert all(np.array_equal(share, expected[:64][rank::3]) for rank, share in enumerate(shares))
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


@pytest.mark.parametrize("order", [FullShuffle(811, 1), windowed()], ids=["full", "windowed"])
def test_ranks_share_a_step_without_loss(order: Order) -> None:
    for count in (1, 5, 64, 97):
        numbers = order.numbers(1, np.arange(200, 200 + count))
        for size in (1, 2, 3, 8, 100):
            shares = [of_rank(order, numbers, rank, size) for rank in range(size)]
            assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(count))
            assert all((np.diff(share) > 0).all() for share in shares)
            lengths = [len(share) for share in shares]
            assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.lists(st.integers(1, 7), min_size=1, max_size=6), st.data())
def test_a_run_resumes_on_other_numbers_of_ranks_without_losing_or_repeating_a_row(
    step_rows: int, sizes: list[int], data: st.DataObject
) -> None:
    """Every size takes over at any step, and knows nothing but its number."""
    order = windowed(blocks=9, rows=25, window=3)
    steps = -(-len(order) // step_rows)
    cuts = sorted(data.draw(st.lists(st.integers(0, steps), min_size=len(sizes) - 1, max_size=len(sizes) - 1)))
    seen: list[int] = []
    for size, begin, end in zip(sizes, [0, *cuts], [*cuts, steps], strict=True):
        for step in range(begin, end):
            positions = np.arange(step * step_rows, min((step + 1) * step_rows, len(order)))
            numbers = order.numbers(0, positions)
            for rank in range(size):
                seen += numbers[of_rank(order, numbers, rank, size)].tolist()
    assert sorted(seen) == list(range(len(order)))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_reads_its_part_of_a_window(size: int) -> None:
    order = WindowedShuffle(np.arange(0, 257) * 512, 64, 0)
    plan = order.plan(1)
    first, last = int(plan.edges[1]), int(plan.edges[2])
    read: list[set[int]] = [set() for _ in range(size)]
    for begin in range(first, last, 4096):
        numbers = order.numbers(1, np.arange(begin, min(begin + 4096, last)))
        for rank in range(size):
            read[rank] |= set((numbers[of_rank(order, numbers, rank, size)] // 512).tolist())
    for rank, blocks in enumerate(read):
        assert len(blocks) <= 64 / size + 6
        expected = order.upcoming(1, first, last - first, rank, size) // 512
        assert len(blocks - set(expected.tolist())) <= 2 and len(expected) <= 64 / size + 6


def test_what_comes_next_ends_with_the_run() -> None:
    order = windowed()
    plan = order.plan(2)
    blocks = {*np.searchsorted(order.starts, order.upcoming(2, 0, 10**6, 0, 1)).tolist()}
    assert blocks == set(plan.files[: plan.bounds[2]].tolist())
    last = int(plan.edges[-2])
    following = order.upcoming(2, last, 10**6, 0, 1)
    assert set(order.starts[order.plan(3).files[: order.plan(3).bounds[1]]].tolist()) <= set(following.tolist())
    assert len(order.upcoming(2, last, 100, 0, 1)) == plan.bounds[-1] - plan.bounds[-2]


def test_a_full_shuffle_expects_every_block_from_each_rank_in_another_order() -> None:
    order = FullShuffle(80, 0, np.arange(0, 81, 10))
    assert order.upcoming(0, 0, 80, 0, 2).tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
    assert order.upcoming(0, 0, 80, 1, 2).tolist() == [40, 50, 60, 70, 0, 10, 20, 30]
    assert len(FullShuffle(80, 0).upcoming(0, 0, 80, 0, 2)) == 0


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
