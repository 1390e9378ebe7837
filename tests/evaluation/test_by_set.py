"""How much of each set is scored: shares and rows of one set alone, and sets of which nothing could be scored."""

import math
from pathlib import Path
from typing import Any

import pytest
from job import Shelf, results

CHINESE = "\u8fd9\u662f\u4e00\u6761\u6cb3\u3002" * 300 + "\n"  # "This is a river." in one line


@pytest.fixture(scope="module")
def own_sets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two short texts as evaluation sets, one whose every position counts and one without pseudo-perplexity."""
    folder = tmp_path_factory.mktemp("texts")
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text("The old river found the house by the sea.\n\n" * 400)
    sources = [f"+evaluate.sources.{name}={{kind: text, path: {folder}/{name}.txt}}" for name in ("one", "two")]
    shares = ["evaluate.by_set.one.pseudo_perplexity.fraction=1.0", "evaluate.by_set.one.max_sequences=2"]
    shares += ["evaluate.by_set.two.pseudo_perplexity.fraction=0", "evaluate.by_set.two.max_sequences=12"]
    return [*sources, "evaluate.sets=[one,two,heldout]", *shares, "evaluate.every_epoch=false"]


def test_a_run_scores_each_set_by_its_own_share_and_is_tested_against_its_baseline(
    shelf: Shelf, own_sets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So few and small are the steps that the teacher, of which both have two layers, stays the better one."""
    baseline, run = tmp_path / "baseline", tmp_path / "run"
    assert shelf.run(baseline, *own_sets, "objective=mlm", "optimizer.lr=1e-5") == 0
    assert shelf.run(run, *own_sets, "optimizer.lr=1e-5", f"evaluate.baseline={baseline}") == 0
    content = results(run)
    described = content["evaluation"]
    assert [described[name]["sequences"] for name in ("one", "two", "heldout")] == [2, 12, 8]
    assert described["one"]["pseudo_positions"] == described["one"]["tokens"] - 2 * 2
    assert described["two"]["pseudo_positions"] == 0 and described["two"]["positions"] > 0
    assert 0 < described["heldout"]["pseudo_positions"] < 0.3 * described["heldout"]["tokens"]
    assert set(content["student"]["pseudo_perplexity"]) == {"one", "heldout"}
    assert set(content["student"]["perplexity"]) == {"one", "two", "heldout"}
    found: dict[str, Any] = content["baseline"]["conclusions"]["perplexity"]
    assert [found[name]["low"] is None for name in ("one", "two", "heldout")] == [True, False, True], "too few rows"
    drawn = found["two"]
    ratio = content["student"]["perplexity"]["two"] / content["baseline"]["perplexity"]["two"]
    assert drawn["difference"] == pytest.approx(ratio, rel=1e-6) and drawn["low"] <= ratio <= drawn["high"]
    assert (drawn["units"], drawn["n"], drawn["unit"]) == ("sequences", 12, "ratio")
    closed: dict[str, Any] = content["baseline"]["gap_closed"]
    assert {measure: set(by_set) for measure, by_set in closed.items()} == {
        measure: set(content["student"][measure]) for measure in ("perplexity", "pseudo_perplexity")
    }
    for measure, name in (("perplexity", "two"), ("perplexity", "heldout"), ("pseudo_perplexity", "one")):
        scores = (content[model][measure][name] for model in ("teacher", "student", "baseline"))
        teacher, student, without = map(math.log, scores)
        fraction = (without - student) / (without - teacher)
        assert without > teacher and closed[measure][name]["fraction"] == pytest.approx(fraction, rel=1e-9)
        assert ("low" in closed[measure][name]) == (name == "two")
    entry = closed["perplexity"]["two"]
    assert entry["low"] < entry["fraction"] < entry["high"] and entry["without_gap"] == 0
    assert "% (95% interval " in (run / "student" / "README.md").read_text()
    assert "| Gap closed |" in (run / "report.md").read_text()
    assert "gap_closed" not in (baseline / "results.json").read_text()


def test_sets_of_which_nothing_can_be_scored_end_no_run_well(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first step, in one line, with status 2."""
    (tmp_path / "chinese.txt").write_text(CHINESE, encoding="utf-8")
    mine = [f"+evaluate.sources.mine={{kind: text, path: {tmp_path}/chinese.txt}}", "evaluate.sets=[heldout,mine]"]
    for more in ([], ["corpus.max_unknown=1.0"]):
        assert shelf.run(tmp_path / "run", *mine, *more) == 2
        words = "evaluate.sets: mine: 100.0% of its tokens are not in the vocabulary"
        assert words in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run" / "results.json").exists() and not list((tmp_path / "run").glob("checkpoints/step*"))
