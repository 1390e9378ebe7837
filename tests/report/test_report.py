"""The report and the model card: complete, self-contained, well-formed, and calm about missing numbers."""

import copy
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from distill.report import page, plots, report, summary
from distill.report.results import data_wait

SETS = ("heldout", "wikitext2")
CONFIG = "train:\n  epochs: 3\n  note: '<b>&'\n"


def model(name: str, scale: float) -> dict[str, Any]:
    return {
        "name": name,
        "parameters": int(3_212_543 / scale),
        "bytes": int(12_850_172 / scale),
        "tokens_per_second": 41_250.3 * scale,
        "perplexity": {"heldout": 31.237 * scale, "wikitext2": 112.43 * scale},
        "pseudo_perplexity": {"heldout": 28.411 * scale, "wikitext2": 101.83 * scale},
    }


def history(scale: float, terms: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "epoch": float(epoch),
            "step": 41 * epoch,
            "tokens": 123_456 * epoch,
            "seconds": 71.3 * epoch,
            "loss": {term: 9.137 * scale / epoch + place for place, term in enumerate(terms)},
            "perplexity": {"heldout": 71.19 * scale / epoch, "wikitext2": 271.7 * scale / epoch},
            "pseudo_perplexity": {"heldout": 61.19 * scale / epoch, "wikitext2": 241.3 * scale / epoch},
        }
        for epoch in (1, 2, 3)
    ]


def sample_results() -> dict[str, Any]:
    return {
        "recipe": "distilbert_gutenberg",
        "scale": "embedded",
        "command": "python -m distill +recipe=distilbert_gutenberg",
        "notes": ["The teacher ships with the package; scale=paper gives the paper's."],
        "finished": True,
        "corpus": {
            "name": "Project Gutenberg",
            "documents": 30,
            "tokens": 3_944_120,
            "rows": 30_813,
            "sequence_length": 128,
            "skipped": [f"book{number}.txt" for number in range(7)],
            "preparation": {"seconds": 14.2, "tokens_per_second": 277_755.0},
        },
        "teacher": model("little-bert", 1.0),
        "student": model("half-bert", 1.25),
        "twin": {**model("twin", 1.7), "folder": "runs/twin", "steps": 123, "history": history(1.3, ("total", "mlm"))},
        "agreement": {"heldout": {"top1": 0.6312, "kl": 0.4123}, "wikitext2": {"top1": 0.5517, "kl": 0.6329}},
        "training": {
            "steps": 123,
            "epochs": 3.0,
            "tokens": 370_368,
            "seconds": 213.9,
            "tokens_per_second": 1731.5,
            "data_wait": 0.0301,
            "final_loss": {"total": 9.421, "soft": 1.253, "mlm": 3.714, "cosine": 0.1423},
            "skipped_steps": 2,
            "ended_by": "epochs",
        },
        "backend": {
            "name": "single",
            "ranks": 1,
            "rings": {"asked": 1, "in_force": 1},
            "accumulate": 5,
            "batch_size": 16,
            "syncs": 123,
        },
        "environment": {"python": "3.11.7", "torch": "2.13.0", "device": "cpu", "git_revision": "3f2c1d9"},
        "evaluation": {
            name: {"name": f"{name} test", "documents": 6, "rows": 912, "tokens": 116_701, "positions": 17_233}
            for name in SETS
        },
        "history": history(1.0, ("total", "soft", "mlm", "cosine")),
    }


def sample_metrics() -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "epoch": step / 41,
            "tokens": 3011 * step,
            "seconds": 1.74 * step,
            **{f"loss/{term}": 9 / step**0.3 for term in ("total", "soft", "mlm", "cosine")},
            "lr": 5e-4 * (1 - step / 124),
            "grad_norm": 2 + math.sin(step),
            "tokens_per_second": 1730.0 + step % 7,
            "data_wait": 0.03,
            "skipped": int(step > 60),
        }
        for step in range(1, 124)
    ]


@pytest.fixture
def results() -> dict[str, Any]:
    return sample_results()


@pytest.fixture
def metrics() -> list[dict[str, Any]]:
    return sample_metrics()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder with the report of the results above."""
    folder = tmp_path_factory.mktemp("run")
    report.write(folder, sample_results(), sample_metrics(), CONFIG)
    return folder


def parsed(folder: Path) -> ElementTree.Element:
    """The page as a tree; raises where a tag is not closed or something is not escaped."""
    return ElementTree.fromstring((folder / "report.html").read_text(encoding="utf-8"))


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


def test_page_holds_every_number_of_the_tables(written: Path, results: dict) -> None:
    cells = ["".join(cell.itertext()) for cell in parsed(written).iter() if cell.tag in ("td", "th")]
    markdown = (written / "report.md").read_text(encoding="utf-8")
    expected = []
    for name in ("teacher", "student", "twin"):
        of = results[name]
        expected += [page.number(of["parameters"]), page.short(of["bytes"], "B"), page.number(of["tokens_per_second"])]
        expected += [page.number(of[measure][key]) for measure in summary.MEASURES for key in SETS]
    for line in results["history"] + results["twin"]["history"]:
        expected += [page.number(line[measure][key]) for measure in summary.MEASURES for key in SETS]
    expected += [page.number(value) for line in results["history"] for value in line["loss"].values()]
    expected += [page.number(line["loss"]["mlm"]) for line in results["twin"]["history"]]
    expected += ["63.1%", "55.2%", "0.412", "0.633", "+25.0%", "1.25×", "80%", "370,368", "17,233", "116,701"]  # noqa: RUF001
    assert [value for value in expected if value not in cells] == []
    assert [value for value in expected if value not in markdown] == []
    for part in ("2.13.0", "3f2c1d9", "3:34 min", results["command"], "book4.txt and 2 more", "3.0% of the time"):
        assert part in markdown and part in " ".join(parsed(written).itertext())
    assert "note: '<b>&'" in markdown and "&lt;b&gt;&amp;" in (written / "report.html").read_text()


def test_headline_says_what_happened_in_plain_words(results: dict) -> None:
    words = summary.findings(results)
    assert "80% of its teacher's parameters (2.57 M of 3.21 M) and is 1.25 times as fast" in words
    assert "25.0% higher on heldout test (39.05, teacher 31.24)" in words
    assert "Learning from the teacher helped" in words and "for the same 123 steps" in words
    assert "26.5% and 26.5% lower" in words


def test_headline_is_honest_about_a_twin_that_won_or_ran_differently(results: dict) -> None:
    results["twin"]["perplexity"] = {"heldout": 30.0, "wikitext2": 100.0}
    results["twin"]["steps"] = 100
    words = summary.findings(results)
    assert "did not help" in words and "for 100 steps instead of 123" in words
    results["twin"]["perplexity"]["heldout"] = 1000.0
    assert "helped on some sets only" in summary.findings(results)


def test_figures_are_small_linked_and_themed(written: Path) -> None:
    linked = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (written / "report.md").read_text())
    files = sorted(path.relative_to(written).as_posix() for path in (written / "plots").iterdir())
    assert sorted(linked) == files and len(files) == 5
    for file in files:
        content = (written / file).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) < 60_000
    svg = re.findall(r"<svg.*?</svg>", (written / "report.html").read_text(), flags=re.DOTALL)
    assert len(svg) == 5 and all("var(--rule)" in drawing and "currentColor" in drawing for drawing in svg)


def test_skipped_steps_are_marked_in_every_loss_curve(tmp_path: Path, metrics: list) -> None:
    def marks(lines: list[dict[str, Any]]) -> int:
        return plots.draw(tmp_path, {}, lines)["loss"].svg.count("stroke: var(--twin)")

    assert marks(metrics) == 4  # the running count grows once, at step 61
    assert marks([{**line, "skipped": 0} for line in metrics]) == 0


def test_long_runs_make_no_heavier_page(tmp_path: Path, results: dict, metrics: list) -> None:
    long = [{**metrics[step % 123], "step": step, "seconds": float(step)} for step in range(1, 30_000)]
    report.write(tmp_path, results, long, CONFIG)
    assert (tmp_path / "report.html").stat().st_size < 600_000


def test_report_without_teacher_twin_and_agreement(tmp_path: Path, results: dict, metrics: list) -> None:
    results.update(teacher=None, twin=None, agreement=None, recipe="bert_pretrain")
    results["training"]["final_loss"] = {"total": 3.7, "soft": None, "mlm": 3.7, "cosine": None}
    for line in results["history"]:
        line["loss"] = {"total": line["loss"]["total"], "soft": None, "mlm": line["loss"]["mlm"], "cosine": None}
    for line in metrics:
        line.update({"loss/soft": None, "loss/cosine": None})
    report.write(tmp_path, results, metrics, CONFIG)
    text = "".join(parsed(tmp_path).find("body").itertext())
    assert "Half-bert has 2.57 M parameters" in text
    for absent in ("Twin", "twin", "KL divergence", "Against teacher", "None", "nan", "distillation"):
        assert absent not in text, absent
    assert "Masked words (MLM)" in text and "Soft targets" not in text
    assert "masked-language-modeling" in report.model_card(results)


def without(value: Any, path: tuple[str, ...], replacement: Any) -> Any:
    changed = copy.deepcopy(value)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    if replacement is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = replacement
    return changed


def paths(value: Any, so_far: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return [so_far]
    own = [so_far] if so_far else []
    return own + [path for key in value for path in paths(value[key], (*so_far, key))]


def test_any_missing_or_none_value_is_survived(tmp_path: Path, results: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    # Words and tables for each; the figures, which are slow, are tried with fewer below.
    monkeypatch.setattr(plots, "draw", lambda *_: {})
    for path in paths(results):
        for replacement in (KeyError, None):
            broken = without(results, path, replacement)
            report.write(tmp_path, broken, [], CONFIG)
            parsed(tmp_path)
            for text in (report.model_card(broken), (tmp_path / "report.md").read_text()):
                assert "None" not in text and "nan" not in text, path


@pytest.mark.parametrize("path", [("teacher",), ("twin",), ("history",), ("student", "perplexity"), ("evaluation",)])
def test_figures_survive_missing_parts(path: tuple[str, ...], tmp_path: Path, results: dict) -> None:
    drawn = plots.draw(tmp_path, without(results, path, None), [])
    assert set(drawn) <= {"comparison", "epochs"}


def test_empty_results_still_give_a_page(tmp_path: Path) -> None:
    report.write(tmp_path, {}, [], "")
    assert "report" in "".join(parsed(tmp_path).itertext())
    assert report.model_card({}).startswith("---\n")


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
    report.write(tmp_path, results, [one], CONFIG)
    text = "".join(parsed(tmp_path).itertext())
    assert "∞" in text and "3.2e+11" in text and "nan" not in text


def test_names_are_escaped(tmp_path: Path, results: dict, metrics: list) -> None:
    evil = '<script>alert("x")</script> & $x^2$ | `co` ![i](http://x/y.png)'
    results["teacher"]["name"] = results["student"]["name"] = results["corpus"]["name"] = evil
    results["evaluation"]["heldout"]["name"] = evil
    results["recipe"], results["command"], results["notes"] = evil, evil + "\n```\n# no", [evil]
    report.write(tmp_path, results, metrics, "a: </pre>\n```\n")
    text = "".join(parsed(tmp_path).itertext())
    assert evil in text and "<script" not in (tmp_path / "report.html").read_text()
    card = report.model_card(results)
    assert yaml.safe_load(card.split("---\n")[1])["model_name"] == evil
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


def test_model_card_has_front_matter_use_and_limits(results: dict) -> None:
    card = report.model_card(results)
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "transformers" and front["pipeline_tag"] == "fill-mask"
    assert "distillation" in front["tags"] and front["metrics"] == ["perplexity"]
    compile(re.search(r"```python\n(.*?)```", card, flags=re.DOTALL)[1], "card", "exec")
    for part in ("AutoModelForMaskedLM", "39.05", "Project Gutenberg", "## Limits", "rows of 128 tokens", "370,368"):
        assert part in card, part


def test_results_from_json_give_the_same_report(written: Path, tmp_path: Path) -> None:
    results, metrics = json.loads(json.dumps([sample_results(), sample_metrics()]))
    report.write(tmp_path, results, metrics, CONFIG)
    for file in ("report.html", "report.md", "plots/loss.png"):
        assert (tmp_path / file).read_bytes() == (written / file).read_bytes()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, page.NONE),
        (math.nan, page.NONE),
        (True, page.NONE),
        (math.inf, "∞"),
        (3_212_544, "3,212,544"),
        (0.14234, "0.142"),
        (5.6237, "5.624"),
        (38.904, "38.90"),
        (112.44, "112.4"),
        (41_250.3, "41,250"),
        (0.0, "0.000"),
        (0.00012, "0.00012"),
        (3.2e11, "3.2e+11"),
    ],
)
def test_numbers_have_sensible_digits(value: Any, text: str) -> None:
    assert page.number(value) == text


def test_smoothing_is_the_centred_mean() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    smooth = plots.smoothed(values, 2)
    assert smooth == pytest.approx([3.0, 8 / 3, 14 / 5, 20 / 5, 21 / 5, 16 / 3, 2.0])
    assert plots.smoothed(values, 0) == pytest.approx(values)
    assert plots.smoothed([], 5) == []


def test_the_share_of_waiting_is_weighted_by_time() -> None:
    lines = [{"seconds": 1.0, "data_wait": 0.4}, {"seconds": 4.0, "data_wait": 0.1}]
    assert data_wait(lines) == pytest.approx((0.4 * 1 + 0.1 * 3) / 4)
    assert data_wait([]) is None
