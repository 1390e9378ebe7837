"""Which numbers of two runs can be compared: made-up runs that differ in one thing that a number rests on."""

from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run, results_of, settings_of

from distill.report.comparison.comparison import compare
from distill.report.comparison.runs import find_runs
from distill.report.comparison.tables import costs_table, scores_table

TITLES = {name: {"title": name, "lower_is_better": True} for name in ("perplexity", "bits_per_byte")}


def results(sequences: int = 8, **others: Any) -> dict[str, Any]:
    content = results_of({"heldout": 5.0}, measures=TITLES, **others)
    content["student"]["bits_per_byte"] = {"heldout": 1.5}
    content["evaluation"]["heldout"]["sequences"] = sequences
    return content


def marks(tmp_path: Path, *runs: tuple[dict[str, Any], dict[str, Any], str]) -> tuple[list[list[str]], str]:
    """The marks of perplexity and bits per byte of each run, and the note below the table."""
    for number, (settings, content, words) in enumerate(runs):
        make_run(tmp_path / str(number), settings_of(0, 1.0 + number, **settings), content, words=words)
    table = scores_table(compare(find_runs([str(tmp_path)])))
    width = len(table.head) - len(TITLES)
    return [[cell.partition(" ")[2] for cell in row[width:]] for row in table.rows[: len(runs)]], table.note


def limited(sequences: int | None, **others: Any) -> dict[str, Any]:
    return {"evaluate": {"max_sequences": sequences, **others}}


def test_other_sequences_of_a_set_are_marked_for_every_measure(tmp_path: Path) -> None:
    found, note = marks(tmp_path, (limited(8), results(8), "ab"), (limited(None), results(20), "ab"))
    assert found[0] != found[1] and "" not in (max(found))
    assert "What is not the same: the evaluation set." in note


def test_bits_per_byte_of_a_whole_text_compare_over_vocabularies(tmp_path: Path) -> None:
    found, _ = marks(tmp_path, (limited(None), results(8), "ab"), (limited(None), results(9), "abc"))
    assert [line[1] for line in found] == ["", ""] and {line[0] for line in found} != {""}


def test_as_many_sequences_of_another_vocabulary_are_other_passages(tmp_path: Path) -> None:
    found, _ = marks(tmp_path, (limited(8), results(8), "ab"), (limited(8), results(8), "abc"))
    assert {line[1] for line in found} != {""}


def test_another_stride_is_marked(tmp_path: Path) -> None:
    found, note = marks(
        tmp_path, (limited(None, stride=16), results(), "ab"), (limited(None, stride=64), results(), "ab")
    )
    assert found[0] == ["", ""] and "" not in found[1] and "What is not the same: evaluate.stride." in note


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ({"baseline": {"steps": 9}}, {"baseline": {"steps": 9, "learning_rate": 1e-4}}, "the baseline"),
        (
            {"identity": {"teacher.members.a.digest": "1"}},
            {"identity": {"teacher.members.a.digest": "2"}},
            "the teacher",
        ),
    ],
)
def test_the_gap_closed_rests_on_baseline_and_teachers(
    one: dict[str, Any], other: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    for number, others in enumerate((one, other)):
        closed = {"gap_closed": {"perplexity": {"heldout": {"fraction": 0.5}}}, "perplexity": {"heldout": 6.0}}
        content = results(**{**others, "baseline": {**others.get("baseline", {}), **closed}})
        make_run(tmp_path / str(number), settings_of(0, 1.0 + number), content)
    table = scores_table(compare(find_runs([str(tmp_path)])))
    assert [row[-1] for row in table.rows[:2]] == ["50%", "50% †"] and f"What is not the same: {reason}." in table.note


def test_processors_of_other_sizes_are_named(tmp_path: Path) -> None:
    for number, cores in enumerate((2, 64)):
        environment = {"device": "cpu (AMD EPYC)", "cpu_count": cores}
        make_run(tmp_path / str(number), settings_of(0, 1.0 + number), results(environment=environment))
    assert "cpu (AMD EPYC), 2 cores; cpu (AMD EPYC), 64 cores" in costs_table(compare(find_runs([str(tmp_path)]))).note


def test_a_group_shows_its_numbers_of_every_mark(tmp_path: Path) -> None:
    for seed, (score, documents) in enumerate([(10.0, 3), (12.0, 3), (11.0, 4)]):
        content = results_of({"heldout": score})
        content["evaluation"]["heldout"]["documents"] = documents
        make_run(tmp_path / str(seed), settings_of(seed), content)
    first, *_ = scores_table(compare(find_runs([str(tmp_path)]))).rows
    assert first[-1] == "11.00 (10.00 to 12.00); 11.00 †"


def test_the_held_out_text_of_a_source_belongs_to_its_corpus(tmp_path: Path) -> None:
    for number, documents in enumerate((20, 21)):
        corpus = {"name": "mixture", "documents": documents, "tokens": 5000}
        content = results_of({"heldout_web": 5.0}, corpus=corpus)
        make_run(tmp_path / str(number), settings_of(0, 1.0 + number), content)
    rows = scores_table(compare(find_runs([str(tmp_path)]))).rows
    assert [row[-1] for row in rows[:2]] == ["5.000", "5.000 †"]


def gaps_closed(folder: Path, *runs: tuple[dict[str, Any], int]) -> list[str]:
    """What each run closes of its gap, by the settings of its training and the steps of its baseline."""
    for number, (train, steps) in enumerate(runs):
        closed = {"gap_closed": {"perplexity": {"heldout": {"fraction": 0.5}}}, "perplexity": {"heldout": 6.0}}
        content = results(baseline={"steps": steps, **closed})
        make_run(folder / str(number), settings_of(0, 1.0 + number, train=train), content)
    return [row[-1] for row in scores_table(compare(find_runs([str(folder)]))).rows[: len(runs)]]


@pytest.mark.parametrize("limit", [{"minutes": 5.0}, {"patience": 3}])
def test_steps_of_a_baseline_count_where_they_end_the_run(limit: dict[str, Any], tmp_path: Path) -> None:
    assert gaps_closed(tmp_path / "limit", (limit, 100), (limit, 103)) == ["50%", "50%"]
    steps = {"steps": 100}
    assert gaps_closed(tmp_path / "steps", (steps, 100), (steps, 103)) == ["50%", "50% †"]


def test_a_baseline_of_ten_times_the_minutes_is_another_one(tmp_path: Path) -> None:
    assert gaps_closed(tmp_path, ({"minutes": 5.0}, 100), ({"minutes": 50.0}, 1000)) == ["50%", "50% †"]
