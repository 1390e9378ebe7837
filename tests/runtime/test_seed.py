"""Streams of random numbers: pure functions of their key, and permutations for every size."""

import numpy as np
import pytest

from distill.runtime.seed import key, shuffled, uniform


@pytest.mark.parametrize("size", [*range(1, 70), 127, 128, 129, 1000, 4095, 4096, 4097, 65537])
def test_shuffled_is_a_permutation_and_that_of_a_part_is_a_part_of_it(size: int) -> None:
    order = key(0, "order", size)
    whole, some = shuffled(np.arange(size), size, order), np.arange(size)[:: max(1, size // 4)]
    assert np.array_equal(np.sort(whole), np.arange(size))
    assert np.array_equal(shuffled(some, size, order), whole[some])
    assert shuffled(np.arange(0), size, order).shape == (0,)


def test_order_depends_on_seed_and_epoch_and_huge_sizes_need_no_memory() -> None:
    orders = [tuple(shuffled(np.arange(50), 50, key(s, "order", e))) for s in (0, 1, -1) for e in range(5)]
    assert len(set(orders)) == len(orders)
    order = shuffled(np.arange(1000), 10**12, key(0, "order", 0))
    assert len(set(order.tolist())) == 1000 and order.min() >= 0 and order.max() < 10**12
    assert np.median(order) == pytest.approx(10**12 / 2, rel=0.2)


def test_keys_differ_by_every_part_and_broadcast() -> None:
    rows, positions = np.arange(40)[:, None], np.arange(30)
    keys = key(1, "mask", rows, positions)
    assert keys.shape == (40, 30) and keys.dtype == np.uint64 and len(np.unique(keys)) == 1200
    assert keys[7, 3] == key(1, "mask", 7, 3)
    assert keys[7, 3] not in (key(1, "mask", 3, 7), key(2, "mask", 7, 3), key(1, "fate", 7, 3))


def test_uniform_is_uniform_and_open() -> None:
    values = uniform(key(0, "test", np.arange(100_000)))
    counts = np.histogram(values, 20, (0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8  # chi-squared with 19 degrees of freedom, 0.1 %
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.015
    ends = uniform(np.array([0, 2**64 - 1], np.uint64))
    assert 0 < ends[0] < 1e-15 and 1 - 1e-15 < ends[1] < 1


def test_values_never_change() -> None:
    """Checkpoints and evaluation masks depend on these numbers: with others an old run would go on differently."""
    assert int(key(7, "mask", 2, 17)) == 12883779635900535526
    assert shuffled(np.arange(9), 9, key(0, "order", 0)).tolist() == [3, 8, 0, 7, 4, 1, 2, 5, 6]
