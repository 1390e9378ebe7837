"""The report is calm about whatever is missing, odd or long."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from sample import CONFIG, parsed

from distill.report import figures, report, words
from distill.report.model_card import model_card
from distill.report.scores import ModelScores, Scores, Vocabulary
from distill.runs.describe import data_wait
from distill.runs.facts import EvaluationSet, Measure
from distill.runs.record import Record


def without(value: Any, path: tuple[str, ...]) -> Any:
    changed = copy.deepcopy(value)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return changed


def paths(value: Any, so_far: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return [so_far]
    own = [so_far] if so_far else []
    return own + [path for key in value for path in paths(value[key], (*so_far, key))]


def test_the_page_of_scores_means_nothing_but_its_texts() -> None:
    name, mark = "<img src=x onerror=alert(1)>", "`<b>`[a](javascript:1)|*x*"
    model = ModelScores(name, mark, 1, 4, 0, {"perplexity": {mark: 2.0}})
    sets = {mark: EvaluationSet(name=mark, description=name, documents=1, sequences=1, tokens=1, positions=1)}
    vocabulary = Vocabulary(9, (name,), sets)
    measures = {"perplexity": Measure(title=mark, explanation=name)}
    scores = Scores("mlm", (model,), (vocabulary,), measures, notes=(mark,), command="distill x\n```\n<b>")
    page = scores.markdown()
    shown = page.partition("````sh")[0]
    assert not re.search(r"(?<!\\)[<>`*\[\]]", shown), shown
    assert page.endswith("````sh\ndistill x\n```\n<b>\n````\n")
    assert name in str(scores), "a console shows it as it is"


@pytest.mark.slow
def test_any_missing_value_is_survived(tmp_path: Path, results: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    # Words and tables for each; the figures, which are slow, are tried with fewer below.
    monkeypatch.setattr(report, "draw", lambda *_: {})
    for path in paths(results):
        record = Record.from_json(without(results, path))
        report.write(tmp_path, record, [], CONFIG)
        parsed(tmp_path)
        for text in (model_card(record), (tmp_path / "report.md").read_text()):
            assert "None" not in text and "nan" not in text, path


@pytest.mark.parametrize(
    "path", [("teacher",), ("baseline",), ("history",), ("student", "perplexity"), ("evaluation",)]
)
def test_figures_survive_missing_parts(path: tuple[str, ...], results: dict) -> None:
    drawn = figures.draw(Record.from_json(without(results, path)), [], None)
    assert set(drawn) <= {"comparison", "history", "minutes"}


def test_empty_results_still_give_a_page(tmp_path: Path) -> None:
    report.write(tmp_path, Record.from_json({}), [], "")
    assert "report" in "".join(parsed(tmp_path).itertext())
    assert model_card(Record.from_json({})).startswith("---\n")


def test_odd_numbers_are_drawn_and_written(tmp_path: Path, results: dict) -> None:
    results["student"]["perplexity"] = {"heldout": math.inf, "wikitext2": math.nan}
    results["history"][0]["perplexity"]["heldout"] = 3.2e11
    one = {
        "step": 1,
        "seconds": 0.0,
        "loss/total": math.nan,
        "lr": 0.0,
        "grad_norm": math.inf,
        "tokens_per_second": 5.0,
    }
    report.write(tmp_path, Record.from_json(results), [one], CONFIG)
    text = "".join(parsed(tmp_path).itertext())
    assert "∞" in text and "3.2e+11" in text and "nan" not in text


def test_names_are_escaped(tmp_path: Path, results: dict, metrics: list) -> None:
    evil = '<script>alert("x")</script> & $x^2$ | `co` ![i](http://x/y.png)'
    results["teacher"]["name"] = results["student"]["name"] = results["corpus"]["name"] = evil
    results["evaluation"]["heldout"]["name"] = evil
    results["recipe"], results["command"], results["notes"] = evil, evil + "\n```\n# no", [evil]
    report.write(tmp_path, Record.from_json(results), metrics, "a: </pre>\n```\n")
    text = "".join(parsed(tmp_path).itertext())
    assert evil in text and "<script" not in (tmp_path / "report.html").read_text()
    card = model_card(Record.from_json(results))
    assert yaml.safe_load(card.split("---\n")[1])["model-index"][0]["name"].startswith(f"{evil} distilled from ")
    for markdown in ((tmp_path / "report.md").read_text(), card.split("---\n", 2)[2]):
        outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
        assert not re.search(r"(?<!\\)<script|(?<!\\)\]\(http|^# no", outside, flags=re.MULTILINE)


def test_tables_are_rectangular(written: Path) -> None:
    for table in parsed(written).iter("table"):
        widths = {sum(int(cell.attrib.get("colspan", 1)) for cell in row) for row in table.iter("tr") if len(list(row))}
        assert len(widths) == 1
    blocks = re.findall(r"(?:^\|.*\|\n)+", (written / "report.md").read_text(), flags=re.MULTILINE)
    assert len(blocks) >= 6
    for block in blocks:
        assert len({line.replace("\\|", "").count("|") for line in block.splitlines()}) == 1


def test_the_share_of_waiting_is_weighted_by_time() -> None:
    lines = [{"seconds": 1.0, "data_wait": 0.4}, {"seconds": 4.0, "data_wait": 0.1}]
    assert data_wait(lines) == pytest.approx((0.4 * 1 + 0.1 * 3) / 4)
    assert data_wait([]) is None


def test_numbers_have_sensible_digits() -> None:
    missing = {value: words.NONE for value in (None, math.nan, True)}
    texts = {math.inf: "∞", 3_212_544: "3,212,544", 0.14234: "0.142", 5.6237: "5.624", 38.904: "38.90", 112.44: "112.4"}
    texts |= {41_250.3: "41,250", 0.0: "0.000", 0.00012: "0.00012", 3.2e11: "3.2e+11"}
    assert {value: words.number(value) for value in [*missing, *texts]} == missing | texts
