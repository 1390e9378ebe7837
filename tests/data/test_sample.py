"""Some of many sequences: the choice of before where they are few, and sequences of few blocks where they are many."""

import numpy as np
import pytest

from distill.data.sequence_store import FEWEST_FILES, choose_sequences, sample_numbers, subsample
from distill.runtime.errors import SettingError


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
        assert len(np.unique(chosen // 10)) <= max(FEWEST_FILES, 1.25 * most // 10 + 2)
        assert np.array_equal(chosen, choose_sequences(ROWS, most, "a purpose", 1000))
        assert not np.array_equal(chosen, choose_sequences(ROWS, most, "another purpose", 1000))


def test_a_choice_is_in_memory_or_refused() -> None:
    small = subsample(ROWS, 100, "training rows", 1000)
    assert isinstance(small, np.ndarray) and small.shape == (100, 2)
    with pytest.raises(SettingError, match=r"corpus\.max_sequences=3000: more than fit.*=1000\); give 250 at most"):
        subsample(ROWS, 3000, "training rows", 1000)
    assert subsample(ROWS, None, "training rows", 1000) is ROWS
