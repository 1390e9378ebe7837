"""Which numbers of two runs can be compared: made-up runs that differ in one thing that a number rests on."""

from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run, results_of, settings_of

from distill.report.comparison.compare import Comparison
from distill.report.comparison.runs import find_runs
from distill.report.comparison.tables import best_lines, costs_table, scores_table

NAMES = ("perplexity", "bits_per_byte", "order_accuracy")
TITLES = {name: {"title": name, "lower_is_better": name != "order_accuracy"} for name in NAMES}
GAP = {"gap_closed": {"perplexity": {"heldout": {"fraction": 0.5}}}, "perplexity": {"heldout": 6.0}}
SET, STRIDE = "the evaluation set, or how it is cut into tokens", "evaluate.stride"


def results(of_set: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """Results of one set with three measures: of tokens, of a text by its tokens, and of a text alone."""
    content = results_of({"heldout": 5.0}, measures=TITLES, **others)
    content["student"] |= {"bits_per_byte": {"heldout": 1.5}, "order_accuracy": {"heldout": 60.0}}
    content["evaluation"]["heldout"] |= {"digest": "cafe", **(of_set or {})}
    return content


def laid_out(folder: Path, *runs: tuple[dict[str, Any], dict[str, Any]]) -> Comparison:
    for number, (settings, content) in enumerate(runs):
        make_run(folder / str(number), settings_of(0, 1.0 + number, **settings), content)
    return Comparison(find_runs([str(folder)]))


def limited(sequences: int | None, **others: Any) -> dict[str, Any]:
    return {"evaluate": {"max_sequences": sequences, **others}}


OTHER_TOKENS, OTHER_TEXT = {"digest": "beef"}, {"digest": "beef", "documents": 4}


@pytest.mark.parametrize(
    ("one", "other", "apart", "reasons"),
    [
        (({}, {}), ({}, {}), [], []),
        (({}, {}), ({}, OTHER_TOKENS), ["perplexity"], [SET]),  # of another vocabulary, or other documents
        (({}, {}), ({}, OTHER_TEXT), [*NAMES], [SET]),
        # As many sequences of another vocabulary are other passages.
        ((limited(8), {}), (limited(8), OTHER_TOKENS), [*NAMES], [SET]),
        ((limited(8), {}), (limited(None), {"sequences": 20, **OTHER_TOKENS}), [*NAMES], [SET]),
        ((limited(None, stride=16), {}), (limited(None, stride=64), {}), [*NAMES[:2]], [STRIDE]),
    ],
)
def test_what_a_number_was_measured_on_decides(
    one: Any, other: Any, apart: list[str], reasons: list[str], tmp_path: Path
) -> None:
    comparison = laid_out(tmp_path, *((settings, results(of_set)) for settings, of_set in (one, other)))
    assert {name: folders for name, folders in comparison.apart.items() if folders}.keys() == {
        f"heldout.{name}" for name in apart
    }
    assert all(len(folders) == 1 for folders in comparison.apart.values()) and comparison.reasons == reasons
    cells = dict(zip(NAMES, scores_table(comparison).rows[1][-3:], strict=True))
    assert [name for name, cell in cells.items() if cell.endswith("†")] == apart


def test_what_cannot_be_compared_is_marked_and_neither_ranked_nor_averaged(tmp_path: Path) -> None:
    for seed, (score, documents) in enumerate([(10.0, "a"), (12.0, "a"), (1.0, "b")]):
        content = results_of({"heldout": score})
        content["evaluation"]["heldout"]["digest"] = documents
        make_run(tmp_path / str(seed), settings_of(seed), content)
    make_run(tmp_path / "other", settings_of(0, 9.0), results_of({"heldout": 11.5}))
    (tmp_path / "other" / "results.json").unlink()
    other = results_of({"heldout": 11.5})
    other["evaluation"]["heldout"]["digest"] = "a"
    make_run(tmp_path / "another", settings_of(0, 8.0), other)
    comparison = Comparison(find_runs([str(tmp_path)]))
    table = scores_table(comparison)
    assert table.rows[0][-1] == "11.00 (10.00 to 12.00); 1.000 †" and f"What is not the same: {SET}." in table.note
    (line,) = best_lines(comparison)
    assert line.startswith("Perplexity, heldout: best is 11.00 with")


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ({"baseline": {"steps": 9}}, {"baseline": {"steps": 9, "learning_rate": 1e-4}}, "the baseline"),
        ({"baseline": {"steps": 9}}, {"baseline": {"steps": 10}}, "the baseline"),
        (
            {"identity": {"teacher.members.a.digest": "1"}},
            {"identity": {"teacher.members.a.digest": "2"}},
            "the teacher",
        ),
        # Another cache: the report scores the teacher itself, and only the training reads the cache.
        ({"identity": {"teacher.members.a.cache.top_k": 1}}, {"identity": {"teacher.members.a.cache.top_k": 2}}, None),
    ],
)
def test_the_gap_closed_rests_on_baseline_and_teachers(
    one: dict[str, Any], other: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    contents = [results(**{**others, "baseline": {**others.get("baseline", {}), **GAP}}) for others in (one, other)]
    table = scores_table(laid_out(tmp_path, *(({}, content) for content in contents)))
    assert [row[-1] for row in table.rows[:2]] == ["50%", "50% †" if reason else "50%"]
    assert (f"What is not the same: {reason}." in table.note) == (reason is not None)


@pytest.mark.parametrize(
    ("one", "other", "comparable"),
    [
        (({"minutes": 5.0}, 100), ({"minutes": 5.0}, 103), True),  # whatever steps that gives
        (({"patience": 3}, 100), ({"patience": 3}, 103), True),
        (({"steps": 100}, 100), ({"steps": 100}, 103), False),
        (({"minutes": 5.0}, 100), ({"minutes": 50.0}, 1000), False),
    ],
)
def test_steps_of_a_baseline_count_where_they_end_the_run(
    one: Any, other: Any, comparable: bool, tmp_path: Path
) -> None:
    runs = [({"train": train}, results(baseline={"steps": steps, **GAP})) for train, steps in (one, other)]
    cells = [row[-1] for row in scores_table(laid_out(tmp_path, *runs)).rows[:2]]
    assert cells == ["50%", "50%" if comparable else "50% †"]


def test_agreement_with_another_teacher_is_marked(tmp_path: Path) -> None:
    agreement = {"heldout": {"top1": 0.5, "kl": None}}
    contents = [results(agreement=agreement, identity={"teacher.digest": teacher}) for teacher in ("one", "one", "two")]
    table = scores_table(laid_out(tmp_path, *(({}, content) for content in contents)))
    assert [row[-1] for row in table.rows[:3]] == ["50.0%", "50.0%", "50.0% †"]
    assert [row[-2] for row in table.rows[:3]] == ["60.00"] * 3 and "What is not the same: the teacher." in table.note


def test_processors_of_other_sizes_are_named(tmp_path: Path) -> None:
    environments = [{"device": "cpu (AMD EPYC)", "cpu_count": cores} for cores in (2, 64)]
    comparison = laid_out(tmp_path, *(({}, results(environment=of)) for of in environments))
    assert "cpu (AMD EPYC), 2 cores; cpu (AMD EPYC), 64 cores" in costs_table(comparison).note


def test_the_held_out_text_of_a_source_belongs_to_its_corpus(tmp_path: Path) -> None:
    measures = {"order_accuracy": TITLES["order_accuracy"]}
    for number, documents in enumerate((20, 21)):
        content = results_of({}, corpus={"name": "mixture", "documents": documents}, measures=measures)
        content["student"] = {"order_accuracy": {"heldout_web": 5.0}}
        make_run(tmp_path / str(number), settings_of(0, 1.0 + number), content)
    rows = scores_table(Comparison(find_runs([str(tmp_path)]))).rows
    assert [row[-1] for row in rows[:2]] == ["5.000", "5.000 †"]
