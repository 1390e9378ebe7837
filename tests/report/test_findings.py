"""What the report says in sentences holds for every kind of run: made-up results, beside the golden pages."""

import re
from typing import Any

import pytest

from distill.report import summary
from distill.report.page import Code
from distill.runs.record import Record
from distill.runtime.progress import in_a_sentence

SETS = ("heldout", "wikitext2")
CLOSED = {"fraction": 0.341, "low": 0.288, "high": 0.402, "without_gap": 0}


def interval(ratio: float) -> dict[str, float]:
    return {"low": ratio * 0.999, "high": ratio * 1.001, "resamples": 10_000, "confidence": 0.95}


def baseline_scores(content: dict[str, Any], *scores: float) -> None:
    """The scores of the baseline, with narrow intervals of the student's over them."""
    content["baseline"]["perplexity"] = dict(zip(SETS, scores, strict=True))
    ratios = {name: content["student"]["perplexity"][name] / score for name, score in zip(SETS, scores, strict=True)}
    content["baseline"]["bootstrap"] = {"perplexity": {name: interval(ratio) for name, ratio in ratios.items()}}


def against_baseline(content: dict[str, Any]) -> str:
    return summary.against_baseline(Record.from_json(content))


@pytest.mark.parametrize(
    ("scores", "low", "verdict"),
    [
        ((1000.0, 1000.0), None, "helped"),
        ((30.0, 100.0), None, "did not help"),
        ((1000.0, 100.0), None, "helped on some sets only"),
        ((39.047, 140.53), None, "made no difference"),
        ((39.047, 100.0), None, "did not help"),
        # What hangs on the sample that was drawn is no verdict.
        ((1000.0, 1000.0), (0.9, 0.9), "made no clear difference"),
        ((1000.0, 1000.0), (0.9, 0.02), "helped on some sets only"),
        ((1000.0, 1000.0), (0.02, 0.02), "helped"),
    ],
)
def test_the_verdict_on_the_teacher(results: dict[str, Any], scores: Any, low: Any, verdict: str) -> None:
    baseline_scores(results, *scores)
    if low is not None:
        drawn = {name: {"low": one, "high": one * 1.2} for name, one in zip(SETS, low, strict=True)}
        results["baseline"]["bootstrap"] = {"perplexity": drawn}
    assert against_baseline(results).startswith(f"Learning from the teacher {verdict}: against its baseline")


@pytest.mark.parametrize(("low", "verdict"), [(-0.4, "made no clear difference"), (0.4, "helped")])
def test_accuracy_differs_by_points(results: dict[str, Any], low: float, verdict: str) -> None:
    results["measures"] = {"accuracy": {"title": "Accuracy", "explanation": "in percent", "lower_is_better": False}}
    for model, score in (("student", 76.5), ("teacher", 80.0), ("baseline", 75.3)):
        results[model] = {**results[model], "accuracy": dict.fromkeys(SETS, score)}
    drawn = {**interval(1.0), "low": low, "high": 2.8, "points": 1.2, "better": 0.9, "units": "examples"}
    results["baseline"]["bootstrap"] = {"accuracy": {name: drawn for name in SETS}}
    words = summary.findings(Record.from_json(results))
    assert f"teacher {verdict}: " in words and "1.2 points higher (76.50 instead of 75.30)" in words
    assert "accuracy is higher than the baseline's in 90.0% of them on heldout test" in words
    held = f"{low:+.1f}".replace("-", "\u2212")
    assert f"interval of the difference {held} to +2.8 points" in words


def test_what_was_not_tested_or_differs_otherwise_is_no_verdict(results: dict[str, Any]) -> None:
    """Answers to questions have no bootstrap, a set of fewer than ten sequences has none, other settings confound."""
    baseline_scores(results, 1000.0, 1000.0)
    del results["baseline"]["bootstrap"]["perplexity"]["wikitext2"]
    results["baseline"]["gap_closed"] = {"perplexity": {"heldout": CLOSED, "wikitext2": {"fraction": 0.5}}}
    words = summary.findings(Record.from_json(results))
    assert "Learning from the teacher" not in words and "The student closes 34%" in words
    start = "Against its baseline, trained without a teacher"
    baseline_scores(results, 1000.0, 1000.0)
    remarks = ["The baseline differs: schedule.kind."]
    for changes, phrase in (
        ({"steps": 100}, " for 100 steps instead of 123, its perplexity"),
        ({"steps": 123, "remarks": remarks}, " for the same 123 steps, its perplexity"),
        ({"steps": None, "remarks": []}, ", its perplexity"),
    ):
        results["baseline"].update(changes)
        assert against_baseline(results).startswith(start + phrase)
    results["baseline"].update(steps=123, learning_rate=2.5e-4)
    words = against_baseline(results)
    assert words.startswith("Learning from the teacher") and "123 steps at its own learning rate (0.00025)" in words


def test_where_there_is_no_gap_there_is_no_number(results: dict[str, Any]) -> None:
    results["baseline"]["gap_closed"] = {"perplexity": {name: {"fraction": None} for name in SETS}}
    words = summary.findings(Record.from_json(results))
    assert "closes" not in words and "no gap between baseline and teacher on heldout test and wikitext2 test:" in words


def test_scores_that_have_no_ratio_are_given_as_they_are(results: dict[str, Any]) -> None:
    """A correlation may be negative or 0, where `150 % lower` would be wrong."""
    results["measures"] = {"matthews": {"title": "Matthews correlation", "lower_is_better": False}}
    for name, value in {"teacher": 4.0, "student": 6.0, "baseline": -2.0}.items():
        results[name]["matthews"] = {"heldout": value}
    words = summary.findings(Record.from_json(results))
    assert "Its Matthews correlation is 1.50 times its teacher's on heldout test" in words
    assert "is 6.000 instead of -2.000" in words
    results["teacher"]["matthews"]["heldout"] = -4.0
    assert "is 6.000 on heldout test (teacher -4.000)" in summary.findings(Record.from_json(results))


def test_a_set_without_a_scored_position_has_no_numbers(results: dict[str, Any]) -> None:
    """As when no word of a text is in the vocabulary: zero of zero is neither 0 % nor a divergence of 0."""
    for name in SETS:
        results["evaluation"][name]["positions"] = 0
        results["agreement"][name] = {"top1": 0.0, "kl": 0.0}
    record = Record.from_json(results)
    assert "Nothing was scored on heldout test and wikitext2 test" in summary.findings(record)
    assert {row[0] for row in summary.comparison(record).rows} == {"Parameters", "Weights", "Speed (tokens/s)"}
    assert not [text for _, text in summary.tiles(record) if "agreement" in text or "perplexity" in text]


def test_of_one_there_is_a_singular_and_names_keep_their_capital(results: dict[str, Any]) -> None:
    results["training"]["steps"] = results["baseline"]["steps"] = results["backend"]["ranks"] = 1
    record = Record.from_json(results)
    words = f"{summary.setting(record)} {summary.findings(record)} {summary.sequences_of_step(record.backend)}"
    assert "Training took 1 step (" in words and "for the same 1 step," in words
    assert not re.search(r"\b1 (steps|ranks|sequences|micro-batches|documents)\b|\(s\)", words)
    titles = ["Perplexity", "F1, best threshold", "Pearson correlation"]
    assert [in_a_sentence(title) for title in titles] == ["perplexity", *titles[1:]]


def test_beside_objects_of_a_program_the_command_is_called_what_it_is() -> None:
    """It names settings alone; that of a run from the command line stands by itself."""
    command = "distill +recipe=glue '++teacher._target_=in memory: BertModel, sha256 0123456789abcdef'"
    remark, code = summary.reproduced_by(command)
    assert "call that function with the same objects" in str(remark) and isinstance(code, Code) and code.text == command
    assert [type(block) for block in summary.reproduced_by("distill +recipe=glue")] == [Code]
    assert summary.reproduced_by(None) == []
