"""Some of many sequences: the choice of before where they are few, and sequences of few blocks where they are many."""

import numpy as np

from distill.data.order import WindowedShuffle, order_of
from distill.data.sample import FEWEST_BLOCKS, Chosen, choose_sequences, sample_numbers, subsample


class Blocks(np.ndarray):
    """Sequences that lie in blocks of ten."""

    @property
    def starts(self) -> np.ndarray:
        return np.append(np.arange(0, len(self), 10), len(self))


ROWS = np.arange(2 * 40_004, dtype=np.uint16).reshape(-1, 2).view(Blocks)


def test_few_rows_are_chosen_as_before() -> None:
    chosen = choose_sequences(ROWS, 50, "a purpose", ROWS.nbytes)
    assert np.array_equal(chosen, sample_numbers(len(ROWS), 50, "a purpose"))
    assert choose_sequences(ROWS, None, "x", 1) is None and choose_sequences(ROWS, len(ROWS), "x", 1) is None


def test_of_many_rows_some_blocks_are_read() -> None:
    for most in (50, 300, 20_000, 40_003):
        chosen = choose_sequences(ROWS, most, "a purpose", 1000)
        assert chosen is not None and len(chosen) == most and (np.diff(chosen) > 0).all() and chosen[-1] < len(ROWS)
        assert len(np.unique(chosen // 10)) <= max(FEWEST_BLOCKS, 4 * most // 10 + 4)
        assert np.array_equal(chosen, choose_sequences(ROWS, most, "a purpose", 1000))
        assert not np.array_equal(chosen, choose_sequences(ROWS, most, "another purpose", 1000))


def test_a_choice_too_large_for_memory_stays_where_it_is() -> None:
    small = subsample(ROWS, 100, "training rows", 1000)
    assert isinstance(small, np.ndarray) and small.shape == (100, 2)
    chosen = subsample(ROWS, 3000, "training rows", 1000)
    assert isinstance(chosen, Chosen) and chosen.shape == (3000, 2) and len(chosen) == 3000
    some = np.array([2999, 0, 77])
    assert np.array_equal(chosen[some], ROWS[chosen.numbers[some]])
    starts = chosen.starts
    assert starts is not None and starts[0] == 0 and starts[-1] == 3000 and (np.diff(starts) > 0).all()
    assert len(starts) - 1 == len(np.unique(chosen.numbers // 10))
    order = order_of(chosen, 1000, 0)
    assert isinstance(order, WindowedShuffle)
    assert np.array_equal(np.sort(order.numbers(0, np.arange(3000))), np.arange(3000))


def test_what_is_read_in_windows_of_whole_blocks_leaves_little_of_them_out() -> None:
    """A cache has room for windows of as many bytes as are chosen, and blocks are fetched whole."""
    large = np.broadcast_to(np.zeros((1, 1 << 20), np.uint64), (2000, 1 << 20)).view(Blocks)  # 16 GB of one row
    chosen = subsample(large, 400, "training rows", 1000)
    assert isinstance(chosen, Chosen) and len(chosen) == 400
    assert len(np.unique(chosen.numbers // 10)) <= 50, "1.25 times the 40 that would do"
    spread = choose_sequences(large, 400, "training rows")
    assert spread is not None and 120 < len(np.unique(spread // 10)) <= 160
