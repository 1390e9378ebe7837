"""Names of the folders of a sweep: they can be read, differ where the jobs do, and fit into any file system."""

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distill.config.sweep.index import FAILED, FINISHED, INDEX, SweepIndex
from distill.config.sweep.names import LONGEST, readable_name, swept_overrides
from distill.runtime.errors import Damaged


@pytest.mark.parametrize(
    "swept, name",
    [
        (["objective.temperature=2", "seed=1"], "objective.temperature=2,seed=1"),
        (["teacher.path=runs/a b"], "teacher.path=runs%2Fa b"),
        (["+objective.jsd.weight=1"], "objective.jsd.weight=1"),
        (["corpus.path=Bücher"], "corpus.path=Bücher"),
        (["corpus.path=a%2Fb"], "corpus.path=a%252Fb"),
        (["corpus.path=a\nb\udcff"], "corpus.path=a%0Ab%FF"),
        ([], "only"),
    ],
)
def test_names_can_be_read(swept: list[str], name: str) -> None:
    assert readable_name(swept) == name


@given(st.text(), st.text())
def test_other_values_have_other_names_of_one_part(one: str, other: str) -> None:
    first, second = (readable_name([f"corpus.path={text}"]) for text in (one, other))
    assert (first == second) == (one == other) or None in (first, second)
    for name in filter(None, (first, second)):
        assert "/" not in name and "\0" not in name and len(os.fsencode(name)) <= LONGEST


def test_only_what_is_swept_counts_in_any_order() -> None:
    overrides = ["seed=1", "+recipe=smoke", "corpus.max_sequences=8", "objective.temperature=2"]
    swept = swept_overrides(overrides, {"+recipe", "corpus.max_sequences"})
    assert swept == swept_overrides(overrides[::-1], {"corpus.max_sequences", "+recipe"})
    assert readable_name(swept) == "objective.temperature=2,seed=1"


MANY = [f"objective.term{number}.weight={number}.25" for number in range(15)]


def test_what_is_long_has_a_number_that_stays(tmp_path: Path) -> None:
    """Also when a value is added to the sweep, in front of the others."""
    index = SweepIndex(tmp_path / "sweep")
    first, second = (index.folder_of([*MANY, f"seed={seed}"]) for seed in (1, 2))
    assert (first, second) == ("000", "001")
    again = SweepIndex(tmp_path / "sweep")
    assert [again.folder_of([*MANY, f"seed={seed}"]) for seed in (0, 1, 2)] == ["002", first, second]
    assert again.read()[first]["overrides"] == [*MANY, "seed=1"]


def test_a_number_is_not_that_of_a_folder_whose_entry_was_lost(tmp_path: Path) -> None:
    (tmp_path / "000").mkdir()
    assert SweepIndex(tmp_path).folder_of(MANY) == "001"


def test_a_search_has_numbers_alone(tmp_path: Path) -> None:
    index = SweepIndex(tmp_path)
    assert index.folder_of(["seed=1"]) == "seed=1"
    assert index.folder_of(["seed=1"], numbered=True) == "000" == index.folder_of(["seed=1"], numbered=True)


def test_the_index_says_how_each_run_ended(tmp_path: Path) -> None:
    index = SweepIndex(tmp_path)
    index.record("seed=1", ["seed=1"], FINISHED)
    index.record("seed=2", ["seed=2"], FAILED, "objective.soft.weight=nan: no number")
    index.record("seed=1", ["seed=1"], FINISHED)
    found = yaml.safe_load((tmp_path / INDEX).read_text())
    assert list(found) == ["seed=1", "seed=2"] and found == index.read()
    assert found["seed=2"]["problem"] == "objective.soft.weight=nan: no number"


@pytest.mark.parametrize("content", ["[1, 2]", "a: b", "a: {overrides: 3}", "{", "\0"])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(Damaged, match=r"sweep\.yaml is damaged"):
        SweepIndex(tmp_path).folder_of(MANY)
