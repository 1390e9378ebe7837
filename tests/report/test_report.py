"""The report and the model card: complete, self-contained, well-formed, and calm about what is missing, odd or long."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.collections import PathCollection
from sample import CONFIG, parsed

from distill.report import figures, report, words
from distill.report.model_card import model_card
from distill.report.page import Table
from distill.report.scores import ModelScores, Scores, Vocabulary
from distill.runs.describe import data_wait
from distill.runs.facts import EvaluationSet, Measure
from distill.runs.record import Record


def test_page_is_well_formed_and_loads_nothing(written: Path) -> None:
    elements = list(parsed(written).iter())
    names = {element.tag.split("}")[-1] for element in elements}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "image", "foreignObject"}
    for element in elements:
        for key, value in element.attrib.items():
            if key.split("}")[-1] in ("src", "href", "action", "srcset", "data", "poster"):
                assert value.startswith("#"), (element.tag, key, value)
    text = (written / "report.html").read_text(encoding="utf-8")
    assert "@import" not in text and set(re.findall(r"url\((.)", text)) <= {"#"}
    # Addresses only as names of XML's vocabularies.
    assert all(url.startswith("http://www.w3.org/") for url in re.findall(r"https?://[^\s\"']+", text))
    identities = [element.attrib["id"] for element in elements if "id" in element.attrib]
    assert len(identities) == len(set(identities))
    used = {name for pair in re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", text) for name in pair if name}
    assert used <= set(identities)


def test_scores_of_nothing_and_less_are_drawn() -> None:
    content = {"measures": {"matthews": {"title": "Matthews correlation", "lower_is_better": False}}}
    content |= {"teacher": {"matthews": {"dev": 0.0}}, "student": {"matthews": {"dev": -0.03}}}
    figure, caption = figures.comparison(Record.from_json(content))
    (area,) = figure.axes
    shown = [dots.get_offsets()[0][0] for dots in area.collections if isinstance(dots, PathCollection)]
    assert shown == [0.0, -0.03] and caption == "How far the student is from its teacher."
    members = content | {"teacher": {}, "baseline": {"matthews": {"dev": -0.05}}}  # which are scored one by one
    _, caption = figures.comparison(Record.from_json(members))
    assert caption == "How far the student is from the same student trained without a teacher."


def test_figures_are_small_linked_and_themed(written: Path) -> None:
    linked = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (written / "report.md").read_text())
    files = sorted(path.relative_to(written).as_posix() for path in (written / "plots").iterdir())
    assert sorted(linked) == files and len(files) == 6
    for file in files:
        content = (written / file).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) < 60_000
    svg = re.findall(r"<svg.*?</svg>", (written / "report.html").read_text(), flags=re.DOTALL)
    assert len(svg) == 6 and all("var(--rule)" in drawing and "currentColor" in drawing for drawing in svg)


def test_long_runs_make_no_heavier_page(tmp_path: Path, results: dict, metrics: list) -> None:
    long = [{**metrics[step % 123], "step": step, "seconds": float(step)} for step in range(1, 30_000)]
    report.write(tmp_path, Record.from_json(results), long, CONFIG)
    assert (tmp_path / "report.html").stat().st_size < 600_000


def history_rows(results: dict[str, Any]) -> list[list[str]]:
    """The first cells of the rows of each table of the history."""
    blocks = report.history(Record.from_json(results))
    return [[row[0] for row in block.rows] for block in blocks if isinstance(block, Table) and block]


def test_of_a_long_history_some_points_are_listed_the_last_always(results: dict) -> None:
    for lines in (results["history"], results["baseline"]["history"]):
        for line, epoch in zip(lines, (0.121, 0.123, 0.125), strict=True):
            line["epoch"] = epoch
    assert [rows[:3] for rows in history_rows(results)] == [["0.121", "0.123", "0.125"]] * 3, "a row for each"
    results["history_by"] = "step"
    results["history"] = [{**results["history"][0], "step": 1000 * n, "epoch": n / 50} for n in range(1, 126)]
    results["baseline"]["history"] = [{**results["baseline"]["history"][0], "step": 1000 * n} for n in range(1, 126)]
    loss, *measures = history_rows(results)
    assert len(loss) == 32 and loss[0] == "1,000" and loss[-1] == "125,000" and loss[1] == "5,000"
    assert [rows[:32] for rows in measures] == [loss, loss]


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


@pytest.mark.slow
def test_any_missing_value_is_survived(tmp_path: Path, results: dict, monkeypatch: Any) -> None:
    # Words and tables for each; the figures, which are slow, with a few.
    for part in (("teacher",), ("baseline",), ("history",), ("student", "perplexity"), ("evaluation",)):
        drawn = figures.draw(Record.from_json(without(results, part)), [], None)
        assert {*drawn} <= {"comparison", "history", "minutes"}
    monkeypatch.setattr(report, "draw", lambda *_: {})
    for path in paths(results):
        record = Record.from_json(without(results, path))
        report.write(tmp_path, record, [], CONFIG)
        parsed(tmp_path)
        for text in (model_card(record), (tmp_path / "report.md").read_text()):
            assert "None" not in text and "nan" not in text, path


def test_empty_results_and_odd_numbers_give_a_page(tmp_path: Path, results: dict) -> None:
    report.write(tmp_path, Record.from_json({}), [], "")
    assert "report" in "".join(parsed(tmp_path).itertext())
    assert model_card(Record.from_json({})).startswith("---\n")
    results["student"]["perplexity"] = {"heldout": math.inf, "wikitext2": math.nan}
    results["history"][0]["perplexity"]["heldout"] = 3.2e11
    one = dict.fromkeys(("step", "seconds", "lr"), 1.0) | {"loss/total": math.nan, "grad_norm": math.inf}
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


def test_the_page_of_scores_means_nothing_but_its_texts() -> None:
    name, mark = "<img src=x onerror=alert(1)>", "`<b>`[a](javascript:1)|*x*"
    model = ModelScores(name, mark, 1, 4, 0, {"perplexity": {mark: 2.0}})
    sets = {mark: EvaluationSet(name=mark, description=name, documents=1, sequences=1, tokens=1, positions=1)}
    measures = {"perplexity": Measure(title=mark, explanation=name)}
    command = "distill x\n```\n<b>"
    scores = Scores("mlm", (model,), (Vocabulary(9, (name,), sets),), measures, notes=(mark,), command=command)
    page = scores.markdown()
    shown = page.partition("````sh")[0]
    assert not re.search(r"(?<!\\)[<>`*\[\]]", shown), shown
    assert page.endswith("````sh\ndistill x\n```\n<b>\n````\n")
    assert name in str(scores), "a console shows it as it is"


def test_numbers_have_sensible_digits() -> None:
    missing = {value: words.NONE for value in (None, math.nan, True)}
    texts = {math.inf: "∞", 3_212_544: "3,212,544", 0.14234: "0.142", 5.6237: "5.624", 38.904: "38.90", 112.44: "112.4"}
    texts |= {41_250.3: "41,250", 0.0: "0.000", 0.00012: "0.00012", 3.2e11: "3.2e+11"}
    assert {value: words.number(value) for value in [*missing, *texts]} == missing | texts


def test_the_fraction_of_waiting_is_weighted_by_time() -> None:
    lines = [{"seconds": 1.0, "data_wait": 0.4}, {"seconds": 4.0, "data_wait": 0.1}]
    assert data_wait(lines) == pytest.approx((0.4 * 1 + 0.1 * 3) / 4) and data_wait([]) is None
