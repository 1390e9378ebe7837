"""Which layers a list or a rule chooses, and what is refused."""

from typing import Any

import pytest

from distill.models.layer_choice import RULES, choose_layers, flat
from distill.runtime.errors import SettingError


@pytest.mark.parametrize(
    ("layers", "count", "available", "chosen"),
    [
        ([0, 2, 4, 7, 9, 11], None, 12, [0, 2, 4, 7, 9, 11]),  # the published DistilBERT
        ([3, 0, 0], 3, 4, [3, 0, 0]),
        (None, None, 12, [0, 2, 4, 6, 8, 10]),
        (None, None, 5, [0, 2, 4]),
        (None, None, 1, [0]),
        ("every_second", 4, 12, [0, 2, 4, 6]),
        ("every_second", 8, 12, [0, 2, 4, 6, 8, 9, 10, 11]),
        ("even", 6, 12, [0, 2, 4, 7, 9, 11]),  # by rounding halves to even, that of DistilBERT
        ("even", 1, 12, [0]),
        ("even", 2, 12, [0, 11]),
        ("even", None, 4, [0, 3]),
        ("first", 3, 12, [0, 1, 2]),
        ("ends", 3, 12, [0, 1, 11]),
        ("ends", 4, 12, [0, 1, 10, 11]),
        ("ends", 1, 12, [0]),
        ("last", 3, 12, [9, 10, 11]),
        ("averaged", 2, 4, [[0, 1], [2, 3]]),
        ("averaged", 3, 5, [[0, 1], [2, 3], 4]),
        ("averaged", 1, 1, [0]),
        ("auto", 3, 5, [0, 2, 4]),  # until the layers are found: what has their number
        ([[0, 1], 3], None, 4, [[0, 1], 3]),
    ],
)
def test_what_is_chosen(layers: Any, count: int | None, available: int, chosen: list[int]) -> None:
    assert choose_layers(layers, count, available) == chosen


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_takes_as_many_as_are_wanted_in_their_order(rule: str) -> None:
    for available in range(1, 14):
        for count in range(1, available + 1):
            chosen = choose_layers(rule, count, available)
            numbers = flat(chosen)
            assert len(chosen) == count and len(set(numbers)) == len(numbers) and numbers == sorted(numbers)
            assert numbers[-1] < available and (numbers[0] == 0 or rule == "last")
        assert choose_layers(rule, available, available) == list(range(available))


@pytest.mark.parametrize(
    ("layers", "count", "words"),
    [
        ([0, 4], None, ("student.layers=[0, 4]", "layers 0 to 3")),
        ([-1], None, ("student.layers=[-1]",)),
        ([], None, ("student.layers=[]",)),
        ([[0, 4]], None, ("student.layers=[[0, 4]]", "layers 0 to 3")),
        ([[]], None, ("student.layers=[[]]", "whole numbers")),
        ([[0], "1"], None, ("whole numbers",)),
        ([0, 1], 3, ("student.num_layers=3", "names 2", "leave one of the two settings out")),
        ("odd", None, ("student.layers=odd", "one of auto, every_second, even, first, last, ends")),
        ("even", 5, ("student.num_layers=5", "1 to 4")),
        (None, 0, ("student.num_layers=0", "1 to 4")),
    ],
)
def test_what_is_refused(layers: Any, count: int | None, words: tuple[str, ...]) -> None:
    with pytest.raises(SettingError) as error:
        choose_layers(layers, count, 4)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
