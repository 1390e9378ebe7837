"""The report and the model card: complete, self-contained, well-formed, and calm about missing numbers."""

import re
from pathlib import Path
from typing import Any

import pytest
from sample import CONFIG, parsed

from distill.report import figures, report, words
from distill.report.comparison.columns import scores_of
from distill.report.history import history_blocks
from distill.report.model_card import model_card
from distill.report.page import Table
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
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    # Addresses only as names of XML's vocabularies.
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    identities = [element.attrib["id"] for element in elements if "id" in element.attrib]
    assert len(identities) == len(set(identities))
    used = {name for pair in re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", text) for name in pair if name}
    assert used <= set(identities)


def test_figures_are_small_linked_and_themed(written: Path) -> None:
    linked = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (written / "report.md").read_text())
    files = sorted(path.relative_to(written).as_posix() for path in (written / "plots").iterdir())
    assert sorted(linked) == files and len(files) == 6
    for file in files:
        content = (written / file).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) < 60_000
    svg = re.findall(r"<svg.*?</svg>", (written / "report.html").read_text(), flags=re.DOTALL)
    assert len(svg) == 6 and all("var(--rule)" in drawing and "currentColor" in drawing for drawing in svg)


def test_skipped_steps_are_marked_in_every_loss_curve(tmp_path: Path, metrics: list) -> None:
    def marks(lines: list[dict[str, Any]]) -> int:
        return figures.draw(Record(), lines, None)["loss"].svg.count("stroke: var(--baseline)")

    assert marks(metrics) == 4  # the running count grows once, at step 61
    assert marks([{**line, "skipped": 0} for line in metrics]) == 0


def test_long_runs_make_no_heavier_page(tmp_path: Path, results: dict, metrics: list) -> None:
    long = [{**metrics[step % 123], "step": step, "seconds": float(step)} for step in range(1, 30_000)]
    report.write(tmp_path, Record.from_json(results), long, CONFIG)
    assert (tmp_path / "report.html").stat().st_size < 600_000


@pytest.mark.slow
def test_a_history_by_steps(tmp_path: Path, results: dict, metrics: list) -> None:
    """Tables and figures go by steps; of a long history the tables list some points, the last always."""
    results["history_by"] = "step"
    results["history"] = [{**results["history"][0], "step": 1000 * n, "epoch": n / 50} for n in range(1, 126)]
    results["baseline"]["history"] = [{**results["baseline"]["history"][0], "step": 1000 * n} for n in range(1, 126)]
    report.write(tmp_path, Record.from_json(results), metrics, CONFIG)
    text = (tmp_path / "report.md").read_text()
    assert "## Learning curve by step" in text and "after each epoch" not in text and "Perplexity and pseudo-" in text
    loss, *measures = (re.findall(r"^\| ([\d,]+) \|", table, re.M) for table in text.split("| Step |")[1:])
    assert len(loss) == 32 and loss[0] == "1,000" and loss[-1] == "125,000" and loss[1] == "5,000"
    assert [table[:32] for table in measures] == [loss, loss] and "32 of 125 points" in text
    assert figures.draw(Record.from_json(results), metrics, None)["history"].caption.endswith("by step.")


@pytest.mark.slow
def test_scores_over_minutes(tmp_path: Path, results: dict, metrics: list) -> None:
    """Student, baseline and the teacher's level; nothing where there is one point, or no time was kept."""
    figure = figures.draw(Record.from_json(results), metrics, None)["minutes"]
    assert "minutes of training" in figure.svg and figure.caption.startswith("Perplexity over the minutes")
    for colour in ("var(--student)", "var(--baseline)", "var(--teacher)"):
        assert colour in figure.svg
    results["history"], lines = results["history"][-1:], results["history"]
    assert "minutes" not in figures.draw(Record.from_json(results), metrics, None)
    results["history"] = [{name: value for name, value in line.items() if name != "seconds"} for line in lines]
    assert "minutes" not in figures.draw(Record.from_json(results), metrics, None)


def test_samples_of_text_are_shown_and_mean_nothing_to_the_page(tmp_path: Path, results: dict, metrics: list) -> None:
    prompt, text = " Once <b>there</b> | was ", "a *king*, `and`\n</table> [so](on)"
    by_model = {"teacher": text, "student": " of\nsteel", "baseline": ""}
    texts = [{"prompt": prompt, "continuations": by_model}, {"prompt": "", "continuations": {"student": "x"}}]
    results["samples"] = {"set": "heldout", "temperature": 0.7, "max_tokens": 40, "texts": texts}
    report.write(tmp_path, Record.from_json(results), metrics, CONFIG)
    (table,) = (of for of in parsed(tmp_path).iter("table") if "there" in "".join(of.itertext()))
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert rows == [
        [prompt.strip()],
        ["Teacher", text],
        ["Student", "of\nsteel"],
        ["Baseline (no teacher)", "(ends the text here)"],
        ["(the beginning of a text)"],
        ["Student", "x"],
    ]
    assert not list(table.iter("b"))
    page = " ".join("".join(parsed(tmp_path).itertext()).split())
    assert "at temperature 0.7" in page and "up to 40 tokens" in page and "sequences of heldout" in page
    markdown = (tmp_path / "report.md").read_text()
    assert r"| **Once \<b\>there\</b\> \| was** |  |" in markdown and "| Student | of steel |" in markdown
    assert r"| Teacher | a \*king\*, \`and\` \</table\> \[so\](on) |" in markdown


def test_a_run_that_scores_nothing_has_its_page_and_its_card(tmp_path: Path, results: dict, metrics: list) -> None:
    """Of labelled examples without evaluation sets there is no measure, and none is made up."""
    results |= {"measures": {}, "evaluation": {}, "agreement": {}}
    for model in (results["teacher"], results["student"], results["baseline"], *results["history"]):
        for measure in ("perplexity", "pseudo_perplexity"):
            model.pop(measure, None)
    record = Record.from_json(results).redacted()
    assert record.measures == {} == record.to_json()["measures"]
    report.write(tmp_path, record, metrics, CONFIG)
    for text in ("".join(parsed(tmp_path).find("body").itertext()), model_card(record)):
        assert "parameters" in text and "Perplexity" not in text and "seudo-perplexity" not in text
    assert [column.name for column in scores_of(record)] == []


def test_points_with_one_epoch_in_two_digits_are_rows_of_their_own(results: dict) -> None:
    for lines in (results["history"], results["baseline"]["history"]):
        for line, epoch in zip(lines, (0.121, 0.123, 0.125), strict=True):
            line["epoch"] = epoch
    tables = [block for block in history_blocks(Record.from_json(results), {}) if isinstance(block, Table)]
    assert [[row[0] for row in table.rows[:3]] for table in tables] == [["0.121", "0.123", "0.125"]] * 3
    assert not any(words.NONE in row for table in tables for row in table.rows[:3])


def test_a_term_and_a_measure_of_the_users_own_are_shown(tmp_path: Path, results: dict, metrics: list) -> None:
    """The report knows no term and no measure but those that the results name."""
    results["objective"]["terms"]["hidden_3"] = {"title": "Third hidden state", "weight": 0.5}
    results["measures"] = {"accuracy": {"title": "Accuracy", "explanation": "how often", "lower_is_better": False}}
    results["student"]["accuracy"] = {"wikitext2": 0.8761}
    for line in results["history"]:
        line |= {"loss": {"hidden_3": 0.4567 / line["epoch"]}, "accuracy": {"wikitext2": 0.7123 * line["epoch"] / 3}}
    report.write(tmp_path, Record.from_json(results), [line | {"loss/hidden_3": 0.5} for line in metrics], CONFIG)
    text = "".join(parsed(tmp_path).find("body").itertext())
    for present in ("Third hidden state", "0.457", "Accuracy", "0.876", "higher is better", "0.712"):
        assert present in text, present
    assert "Perplexity" not in text


def test_the_legend_names_a_line_that_only_another_panel_has(results: dict) -> None:
    for line in results["baseline"]["history"]:
        line["perplexity"] = {"wikitext2": line["perplexity"]["wikitext2"]}
        del line["pseudo_perplexity"]
    svg = figures.draw(Record.from_json(results), [], None)["history"].svg
    assert [svg.count(f">{name}<") for name in ("student", "baseline", "teacher")] == [1, 1, 1]
