"""What the report says in sentences holds for every kind of run: made-up results, word by word."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sample import CONFIG, objective

from distill.config.settings import Config, PrecisionConfig, TeacherConfig
from distill.data.batches import StepShape
from distill.data.invalid import Invalid
from distill.report import report, summary
from distill.report.model_card import model_card
from distill.report.page import Code
from distill.runs.banner import _sequences_of_a_step as sequences_of_step_in_banner
from distill.runs.banner import notes_of
from distill.runs.record import Record
from distill.runtime.progress import counted, in_a_sentence

SETS = ("heldout", "wikitext2")


def baseline_scores(content: dict[str, Any], *scores: float) -> None:
    """The scores of the baseline, with narrow intervals of the student's over them."""
    content["baseline"]["perplexity"] = dict(zip(SETS, scores, strict=True))
    ratios = {name: content["student"]["perplexity"][name] / score for name, score in zip(SETS, scores, strict=True)}
    content["baseline"]["bootstrap"] = {"perplexity": {name: interval(ratio) for name, ratio in ratios.items()}}


def interval(ratio: float) -> dict[str, float]:
    return {"low": ratio * 0.999, "high": ratio * 1.001, "resamples": 10_000, "confidence": 0.95}


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ((1000.0, 1000.0), "Learning from the teacher helped: against its baseline"),
        ((30.0, 100.0), "Learning from the teacher did not help: against its baseline"),
        ((1000.0, 100.0), "Learning from the teacher helped on some sets only: against its baseline"),
        ((39.047, 140.53), "Learning from the teacher made no difference: against its baseline"),
        ((39.047, 100.0), "Learning from the teacher did not help: against its baseline"),
        ((39.047, 1000.0), "Learning from the teacher helped on some sets only: against its baseline"),
    ],
)
def test_the_verdict_on_the_teacher(results: dict[str, Any], scores: tuple[float, ...], verdict: str) -> None:
    baseline_scores(results, *scores)
    assert summary.against_baseline(Record.from_json(results)).startswith(verdict)


@pytest.mark.parametrize(
    ("low", "verdict"),
    [
        ((0.9, 0.9), "Learning from the teacher made no clear difference: against its baseline"),
        ((0.9, 0.02), "Learning from the teacher helped on some sets only: against its baseline"),
        ((0.02, 0.02), "Learning from the teacher helped: against its baseline"),
    ],
)
def test_a_difference_that_hangs_on_the_sample_is_no_verdict(
    results: dict[str, Any], low: tuple[float, ...], verdict: str
) -> None:
    baseline_scores(results, 1000.0, 1000.0)
    sets = zip(SETS, low, strict=True)
    results["baseline"]["bootstrap"] = {"perplexity": {name: {"low": one, "high": one * 1.2} for name, one in sets}}
    assert summary.against_baseline(Record.from_json(results)).startswith(verdict)


@pytest.mark.parametrize(
    ("low", "verdict"),
    [
        (-0.4, "Learning from the teacher made no clear difference: against its baseline"),
        (0.4, "Learning from the teacher helped: against its baseline"),
    ],
)
def test_accuracy_differs_by_points(results: dict[str, Any], low: float, verdict: str) -> None:
    results["measures"] = {"accuracy": {"title": "Accuracy", "explanation": "in percent", "lower_is_better": False}}
    for model, score in (("student", 76.5), ("teacher", 80.0), ("baseline", 75.3)):
        results[model] = {**results[model], "accuracy": dict.fromkeys(SETS, score)}
    drawn = {**interval(1.0), "low": low, "high": 2.8, "points": 1.2, "better": 0.9, "units": "examples"}
    results["baseline"]["bootstrap"] = {"accuracy": {name: drawn for name in SETS}}
    words = summary.findings(Record.from_json(results))
    assert verdict in words and "1.2 points higher (76.50 instead of 75.30)" in words
    held = f"{low:+.1f}".replace("-", "\u2212")
    assert "accuracy is higher than the baseline's in 90.0% of them on heldout test" in words
    assert f"interval of the difference {held} to +2.8 points" in words


def test_what_was_not_tested_is_no_verdict(results: dict[str, Any]) -> None:
    """Answers to questions have no bootstrap, and a set of fewer than ten sequences has none either."""
    baseline_scores(results, 1000.0, 1000.0)
    del results["baseline"]["bootstrap"]["perplexity"]["wikitext2"]
    results["baseline"]["gap_closed"] = {"perplexity": {"heldout": CLOSED, "wikitext2": {"fraction": 0.5}}}
    words = summary.findings(Record.from_json(results))
    assert "Against its baseline, trained without a teacher for the same 123 steps, its perplexity is 96.1%" in words
    assert "Learning from the teacher" not in words and "The student closes 34%" in words


def closed_by(content: dict[str, Any], heldout: dict[str, Any], wikitext2: dict[str, Any]) -> str:
    """The findings of a run whose student closes so much of the gap."""
    content["baseline"]["bootstrap"] = {"perplexity": {name: interval(0.5) for name in SETS}}
    content["baseline"]["gap_closed"] = {"perplexity": {"heldout": heldout, "wikitext2": wikitext2}}
    return summary.findings(Record.from_json(content))


CLOSED = {"fraction": 0.341, "low": 0.288, "high": 0.402, "without_gap": 0}


def test_how_much_of_the_gap_is_closed_is_seen_at_first_sight(results: dict[str, Any], tmp_path: Path) -> None:
    """In the sentences of console, report and model card, and in the table, where a measure without it has a dash."""
    sentence = (
        "Learning from the teacher closes 34% (95% interval 29 to 40) of the gap between baseline and teacher on "
        "heldout test and \u22125% on wikitext2 test, by perplexity."
    )
    assert sentence in closed_by(results, CLOSED, {"fraction": -0.05})
    record = Record.from_json(results)
    report.write(tmp_path, record, [], CONFIG)
    for page in ((tmp_path / "report.md").read_text(), model_card(record)):
        assert (
            sentence in page and "| Against teacher | Gap closed |" in page and "of perplexities in logarithms" in page
        )
        assert re.search(r"^\| heldout test \| .* \| 34% \(29 to 40\) \|$", page, re.M)
        assert re.search(r"^\| wikitext2 test \| .* \| \u22125% \|$", page, re.M)
    assert {len(row) for row in summary.comparison(record).rows} == {1, 6}


def test_where_there_is_no_gap_there_is_no_number(results: dict[str, Any]) -> None:
    words = closed_by(results, {"fraction": None}, {"fraction": 0.5, "without_gap": 320})
    assert (
        "closes 50% of the gap between baseline and teacher on wikitext2 test, by perplexity. There is no gap" in words
    )
    assert "no gap between baseline and teacher on heldout test: the baseline is no worse there. The gap" in words
    no_worse = "has no interval: in 320 of 10,000 resamples the baseline is no worse than the teacher."
    assert f"on wikitext2 test {no_worse}" in words
    assert [row[-1] for row in summary.comparison(Record.from_json(results)).rows[4:6]] == ["no gap", "50%"]
    words = closed_by(results, {"fraction": None}, {"fraction": None})
    assert "closes" not in words and "no gap between baseline and teacher on heldout test and wikitext2 test:" in words


def test_a_baseline_that_differs_otherwise_gives_no_verdict(results: dict[str, Any], tmp_path: Path) -> None:
    results["baseline"]["steps"] = 100
    words = summary.against_baseline(Record.from_json(results))
    assert words.startswith(
        "Against its baseline, trained without a teacher for 100 steps instead of 123, its perplexity"
    )
    results["baseline"].update(steps=123, remarks=["The baseline differs in more than its teacher: schedule.kind."])
    words = summary.findings(Record.from_json(results))
    assert "Learning from the teacher" not in words and "Against its baseline" in words
    assert "The student closes 34% (95% interval 29 to 40)" in closed_by(dict(results), CLOSED, CLOSED)
    report.write(tmp_path, Record.from_json(results), [], CONFIG)
    page = (tmp_path / "report.md").read_text()
    assert "in more than its teacher: schedule.kind." in page and "the same data" not in page
    results["baseline"].update(remarks=[], learning_rate=2.5e-4)
    baseline_scores(results, 1000.0, 1000.0)
    words = summary.against_baseline(Record.from_json(results))
    assert (
        words.startswith("Learning from the teacher")
        and "for the same 123 steps at its own learning rate (0.00025)" in words
    )
    results["baseline"].update(steps=None, remarks=[], learning_rate=None)
    assert summary.against_baseline(Record.from_json(results)).startswith(
        "Against its baseline, trained without a teacher, its perplexity"
    )


def test_scores_that_have_no_ratio_are_given_as_they_are(results: dict[str, Any]) -> None:
    """A correlation may be negative or 0, where `150 % lower` would be wrong."""
    results["measures"] = {"matthews": {"title": "Matthews correlation", "lower_is_better": False}}
    for name, value in {"teacher": 4.0, "student": 6.0, "baseline": -2.0}.items():
        results[name]["matthews"] = {"heldout": value}
    words = summary.findings(Record.from_json(results))
    assert (
        "Its Matthews correlation is 1.50 times its teacher's on heldout test (student 6.000, teacher 4.000)" in words
    )
    assert "Against its baseline" in words and "is 6.000 instead of -2.000" in words
    results["teacher"]["matthews"]["heldout"] = -4.0
    words = summary.findings(Record.from_json(results))
    assert (
        "Its Matthews correlation is 6.000 on heldout test (teacher -4.000)" in words
        and "times" not in words.partition("Its")[2]
    )


def test_a_set_without_a_scored_position_has_no_numbers(results: dict[str, Any], tmp_path: Path) -> None:
    """As when no word of a text is in the vocabulary: zero of zero is neither 0 % nor a divergence of 0."""
    results["evaluation"]["wikitext2"]["positions"] = 0
    results["agreement"]["wikitext2"] = {"top1": 0.0, "kl": 0.0}
    for model in ("teacher", "student", "baseline"):
        results[model]["perplexity"]["wikitext2"] = float("nan")
    assert "Nothing was scored on wikitext2 test: there is no token to predict." in summary.findings(
        Record.from_json(results)
    )
    report.write(tmp_path, Record.from_json(results), [], CONFIG)
    page = (tmp_path / "report.md").read_text()
    assert "0.0%" not in page and "0.000" not in page and "63.1%" in page
    results["evaluation"]["heldout"]["positions"] = 0
    assert "top-1 agreement" not in str(summary.tiles(Record.from_json(results))) and "perplexity" not in str(
        summary.tiles(Record.from_json(results))
    )


def test_several_teachers_are_compared_as_they_are_together(results: dict[str, Any]) -> None:
    results["teacher"]["members"] = {name: dict(results["teacher"]) for name in ("one", "other")}
    words = summary.findings(Record.from_json(results))
    assert "80% of its teachers' parameters" in words and "1.25 times as fast as all of them together" in words
    assert "Its perplexity is 1.25 times its teachers' on" in words
    assert {"of the teachers' parameters", "the teachers' speed"} <= {
        text for _, text in summary.tiles(Record.from_json(results))
    }


@pytest.mark.parametrize(
    ("start", "teacher", "expected"),
    [
        (
            {"init": "layers", "from": "runs/big", "layers": [0, 2, 5]},
            True,
            "student started from layers 0, 2 and 5 of",
        ),
        (
            {"init": "layers", "from": "runs/big", "layers": [0]},
            False,
            "model started from layer 0 of runs/big, and le",
        ),
        ({"init": "pretrained", "from": "runs/small"}, False, "The model started from runs/small."),
        ({"init": "random", "from": None}, True, "The student started from new weights."),
        ({"init": "custom", "from": None}, False, ""),
    ],
)
def test_where_it_started(results: dict[str, Any], start: dict[str, Any], teacher: bool, expected: str) -> None:
    results["student"]["start"] = start
    if not teacher:
        results.update(teacher=None, baseline=None, agreement=None, objective=objective("mlm"))
    words = summary.setting(Record.from_json(results))
    assert expected in words and ("started" in words) == bool(expected)
    assert "Teacher:" in words or not teacher


def test_a_run_without_recipe(results: dict[str, Any]) -> None:
    assert "Recipe: distilbert_gutenberg." in summary.setting(Record.from_json(results))
    results.update(recipe="default")
    assert summary.setting(Record.from_json(results)).startswith("No recipe. Corpus:")


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("Perplexity", "perplexity"),
        ("Bits per byte", "bits per byte"),
        ("F1, best threshold", "F1, best threshold"),
        ("Pearson correlation", "Pearson correlation"),
        ("Exact match", "exact match"),
    ],
)
def test_titles_inside_a_sentence(title: str, words: str) -> None:
    assert in_a_sentence(title) == words


def notes(int8: bool = False, needs_teacher: bool = True) -> list[str]:
    data: Any = SimpleNamespace(tokens=SimpleNamespace(invalid=Invalid(), duplicates=None), left_out=[])
    pair: Any = SimpleNamespace(comparable=True)
    objective: Any = SimpleNamespace(needs_teacher=needs_teacher)
    precision = PrecisionConfig(teacher="int8" if int8 else "fp32")
    config = Config(teacher=TeacherConfig(path="bundled_deep"), precision=precision)
    return notes_of(config, pair, data, objective)


def test_a_teacher_that_is_not_learned_from_ran_in_no_format() -> None:
    assert "int8" in notes(int8=True)[0] and notes(int8=True, needs_teacher=False) == []


def test_what_is_counted_of_a_set(results: dict[str, Any], tmp_path: Path) -> None:
    """Only words are masked: a causal model is scored at next tokens, fine-tuning by rows."""
    report.write(tmp_path, Record.from_json(results), [], CONFIG)
    assert "| Masked | Masked one at a time |" in (tmp_path / "report.md").read_text()
    results["measures"] = {"f1": {"title": "F1", "lower_is_better": False}}
    report.write(tmp_path, Record.from_json(results), [], CONFIG)
    page = (tmp_path / "report.md").read_text()
    assert "| Scored |" in page and "Masked |" not in page


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [(1, "micro-batch", "1 micro-batch"), (2, "micro-batch", "2 micro-batches"), (1200, "rank", "1,200 ranks")],
)
def test_one_of_a_kind_is_singular(count: int, noun: str, words: str) -> None:
    assert counted(count, noun) == words


def test_a_run_of_one_step_on_one_rank_is_written_in_the_singular(results: dict[str, Any], tmp_path: Path) -> None:
    results["training"]["steps"] = results["baseline"]["steps"] = results["backend"]["ranks"] = 1
    report.write(tmp_path, Record.from_json(results), [], CONFIG)
    page = (tmp_path / "report.md").read_text()
    assert "Training took 1 step (" in page and "for the same 1 step," in page
    assert not re.search(r"\b1 (steps|ranks|sequences|micro-batches|documents)\b|\(s\)", page)
    banner = sequences_of_step_in_banner(StepShape(16, 8, 0, 1, False))
    assert banner == "8 sequences (1 micro-batch of at most 8)"


def test_beside_objects_of_a_program_the_command_is_called_what_it_is() -> None:
    """It names settings alone; that of a run from the command line stands by itself."""
    command = "distill +recipe=glue '++teacher._target_=in memory: BertModel, sha256 0123456789abcdef'"
    remark, code = summary.reproduced_by(command)
    assert "call that function with the same objects" in str(remark) and isinstance(code, Code) and code.text == command
    assert [type(block) for block in summary.reproduced_by("distill +recipe=glue")] == [Code]
    assert summary.reproduced_by(None) == []
