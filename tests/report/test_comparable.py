"""Which numbers of two runs can be compared: made-up runs that differ in one thing that a number rests on."""

from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run, results_of, settings_of

from distill.report.comparison.compare import ComparedRuns, best_lines, scores_table
from distill.report.comparison.runs import find_runs

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


def beside_baseline(settings: dict[str, Any] | None = None, identity: Any = None, **baseline: Any) -> Any:
    return settings or {}, results(baseline={"steps": 9, **GAP, **baseline}, identity=identity or {})


def laid_out(folder: Path, *runs: tuple[dict[str, Any], dict[str, Any]]) -> ComparedRuns:
    for number, (settings, content) in enumerate(runs):
        make_run(folder / str(number), settings_of(0, 1.0 + number, **settings), content)
    return ComparedRuns(find_runs([str(folder)]))


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
    compared = laid_out(tmp_path, *((settings, results(of_set)) for settings, of_set in (one, other)))
    assert {name for name, rows in compared.apart.items() if rows} == {f"heldout.{name}" for name in apart}
    assert all(len(rows) == 1 for rows in compared.apart.values()) and compared.reasons == reasons
    cells = dict(zip(NAMES, scores_table(compared).rows[1][-3:], strict=True))
    assert [name for name, cell in cells.items() if cell.endswith("†")] == apart


def test_what_cannot_be_compared_is_marked_and_neither_ranked_nor_averaged(tmp_path: Path) -> None:
    scores = {"0": (0, 2.0, 10.0, "a"), "1": (1, 2.0, 12.0, "a"), "2": (2, 2.0, 1.0, "b"), "other": (0, 8.0, 11.5, "a")}
    for name, (seed, temperature, score, digest) in scores.items():
        content = results_of({"heldout": score})
        content["evaluation"]["heldout"]["digest"] = digest
        make_run(tmp_path / name, settings_of(seed, temperature), content)
    compared = ComparedRuns(find_runs([str(tmp_path)]))
    table = scores_table(compared)
    assert table.rows[0][-1] == "11.00 (10.00 to 12.00); 1.000 †" and f"What is not the same: {SET}." in table.note
    (line,) = best_lines(compared)
    assert line.startswith("Perplexity, heldout: best is 11.00 with")


def teacher(**identity: Any) -> Any:
    return beside_baseline(identity={f"teacher.members.a.{name}": value for name, value in identity.items()})


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (beside_baseline(), beside_baseline(learning_rate=1e-4), "the baseline"),
        (beside_baseline(), beside_baseline(steps=10), "the baseline"),
        (teacher(digest="1"), teacher(digest="2"), "the teacher"),
        # Another cache: the report scores the teacher itself, and only the training reads the cache.
        (teacher(**{"cache.top_k": 1}), teacher(**{"cache.top_k": 2}), None),
        # Whatever steps the clock, or a lack of progress, gives.
        *(
            (beside_baseline({"train": limit}), beside_baseline({"train": limit}, steps=10), None)
            for limit in ({"minutes": 5.0}, {"patience": 3})
        ),
        (beside_baseline({"train": {"minutes": 5.0}}), beside_baseline({"train": {"minutes": 9.0}}), "the baseline"),
    ],
)
def test_the_gap_closed_rests_on_baseline_and_teachers(
    one: Any, other: Any, reason: str | None, tmp_path: Path
) -> None:
    table = scores_table(laid_out(tmp_path, one, other))
    assert [row[-1] for row in table.rows[:2]] == ["50%", "50% †" if reason else "50%"]
    assert (f"What is not the same: {reason}." in table.note) == (reason is not None)


def test_agreement_with_another_teacher_is_marked(tmp_path: Path) -> None:
    agreement = {"heldout": {"top1": 0.5, "kl": None}}
    contents = [results(agreement=agreement, identity={"teacher.digest": teacher}) for teacher in ("one", "one", "two")]
    table = scores_table(laid_out(tmp_path, *(({}, content) for content in contents)))
    assert [row[-1] for row in table.rows[:3]] == ["50.0%", "50.0%", "50.0% †"]
    assert [row[-2] for row in table.rows[:3]] == ["60.00"] * 3 and "What is not the same: the teacher." in table.note


def test_the_held_out_text_of_a_source_belongs_to_its_corpus(tmp_path: Path) -> None:
    measures = {"order_accuracy": TITLES["order_accuracy"]}
    for number, documents in enumerate((20, 21)):
        content = results_of({}, corpus={"name": "mixture", "documents": documents}, measures=measures)
        content["student"] = {"order_accuracy": {"heldout_web": 5.0}}
        make_run(tmp_path / str(number), settings_of(0, 1.0 + number), content)
    rows = scores_table(ComparedRuns(find_runs([str(tmp_path)]))).rows
    assert [row[-1] for row in rows[:2]] == ["5.000", "5.000 †"]
