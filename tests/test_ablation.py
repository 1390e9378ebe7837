"""The benchmark of what each setting is worth: its settings exist, and its table says ratios of the same seed."""

import sys
from pathlib import Path

import pytest
from job import composed

from distill.checks import check

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from ablation import CHANGES, arguments_of, show


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_one_of_the_recipe(name: str) -> None:
    base, changed = (composed(*arguments_of(each, 0, 4, [])) for each in ("base", name))
    check(changed)
    assert (base == changed) == (name == "base")


def test_ratios_are_of_the_same_seed() -> None:
    values = {"base": (50.0, 40.0), "other": (55.0, 42.0)}
    lines = [
        {"change": name, "seed": seed, "perplexity": {"heldout": value}, "training_seconds": 10.0 + seed}
        for name, pair in values.items()
        for seed, value in enumerate(pair)
    ]
    last = [cell.strip() for cell in show(lines, "base").splitlines()[-1].strip("|").split("|")]
    assert last == ["other", "2", "48.50", "1.075", "10"]  # seconds: half of 10 and 11, rounded to even
