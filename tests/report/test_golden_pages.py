"""Whole pages of made-up runs, as Markdown, beside those that were read and found right.

With DISTILL_RENEW=1 in the environment the pages are written anew; read what `git diff` shows of them.
"""

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import undrawn
import yaml
from made_runs import make_run, results_of, settings_of
from pages import under_way
from sample import CONFIG, objective, sample_metrics, sample_results

from distill.report import live, report, summary
from distill.report.comparison.compare import (
    ComparedRuns,
    best_lines,
    costs_table,
    scores_table,
    sections_of,
    settings_table,
)
from distill.report.comparison.runs import find_runs
from distill.report.model_card import model_card
from distill.report.page import markdown, table_text
from distill.runs.record import Record
from distill.runtime.errors import Diverged, Interrupted

HERE = Path(__file__).parent
CASES = yaml.safe_load((HERE / "cases.yaml").read_text())
CONCLUSION = {"word": "helped", "reason": "0.735 times the perplexity, 95 % from 0.710 to 0.760, on 512 sequences"}
CLOSED = {"fraction": 0.341, "low": 0.288, "high": 0.402, "without_gap": 0}
CHOICES = [{"layers": [0, 2], "loss": 6.1, "rules": ["spread"]}, {"layers": [0, 1], "loss": 6.4, "rules": []}]
ERRORS = [Diverged("loss was not finite"), Interrupted("stopped by SIGTERM at step 7", 15), KeyError("a bug")]
ERRORS += [OSError(28, "No space left on device", "/disk/x")]
NAMES = ("perplexity", "bits_per_byte", "order_accuracy")  # of tokens, of a text by its tokens, of a text alone
TITLES = {name: {"title": name, "lower_is_better": name != "order_accuracy"} for name in NAMES}
GAP = {"gap_closed": {"perplexity": {"heldout": {"fraction": 0.5}}}, "perplexity": {"heldout": 6.0}, "steps": 9}


def everything() -> dict[str, Any]:
    """A run of a mixture beside a baseline, with its best student, layer search, samples and profile."""
    content = sample_results()
    content["baseline"] |= {
        "conclusions": {"perplexity": dict.fromkeys(("heldout", "wikitext2"), CONCLUSION)},
        "gap_closed": {"perplexity": {"heldout": CLOSED, "wikitext2": {"fraction": 0.5, "without_gap": 320}}},
    }
    source = {"name": "146 books", "weight": 0.75, "documents": 146, "sequences": 9_000}
    content["corpus"] |= {"sources": {"books": source}, "held_out": 320, "fraction_used": 0.0123}
    content["training"] |= {
        "sources": {"books": {"sequences": 12_000, "tokens": 1_500_000, "passes": 1.33}},
        "ended_by": "train.epochs", "evaluation_seconds": 41.0, "overflow_steps": 2,
    }  # fmt: skip
    search = {"layers": [0, 2], "teacher": 3.2, "best": CHOICES, "tried": 12, "sequences": 256, "perplexity": True}
    fitted = {"neurons": {"kept": 1248, "of": 1536, "before": 0.2, "after": 0.1}, "refit": {"blocks": [], "tokens": 9}}
    start = {"init": "layers", "from": "little-bert", "layers": [0, 2], "search": search, **fitted}
    content["student"] |= {"start": start}
    content["best"] = {"measure": "perplexity", "set": "heldout", "step": 82, "score": 39.0, "last_score": 39.5}
    content["snapshots"] = [40, 80]
    texts = [{"prompt": "Once there", "continuations": {"teacher": "was a king", "student": "", "baseline": "of"}}]
    content["samples"] = {"set": "heldout", "temperature": 0.7, "max_tokens": 40, "texts": texts}
    finding = {"rule": "data", "lost": 0.12, "sentence": "Set data.workers=4.", "named": True}
    content["profile"] = {
        "conclusion": "Waiting for data takes 12.0% of the time.", "findings": [finding], "steps": 40, "ranks": 2,
        "phases": {"data": 1.2, "forward": 8.8},
        "step_seconds": {"median": 0.2, "p95": 0.25, "longest": 0.4, "steps": 36},
    }  # fmt: skip
    content["evaluation"]["heldout"]["pseudo_positions"] = 156
    return content


def alone() -> dict[str, Any]:
    """A run without a teacher, whose history goes by steps."""
    content = sample_results() | {"teacher": None, "baseline": None, "agreement": None, "objective": objective("mlm")}
    content |= {"recipe": "default", "history_by": "step", "finished": False}
    content["student"]["start"] = {"init": "random", "from": None}
    return content


def of_several_teachers() -> dict[str, Any]:
    """A run of two teachers, whose baseline differs in more than its teacher and leaves no gap on one set."""
    content = sample_results()
    content["teacher"]["members"] = {name: dict(content["teacher"]) | {"name": name} for name in ("one", "other")}
    content["baseline"] |= {
        "steps": 100, "learning_rate": 2.5e-4,
        "remarks": ["The baseline differs in more than its teacher: schedule.kind."],
        "gap_closed": {"perplexity": {"heldout": {"fraction": None}, "wikitext2": {"fraction": -0.05}}},
    }  # fmt: skip
    return content


def changed(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Results with other values at these paths."""
    content = copy.deepcopy(content)
    for path, value in changes.items():
        *above, last = path.split(".")
        inner = content
        for name in above:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return content


def findings() -> Iterator[str]:
    """What the report says in sentences and short tables of runs that differ in one thing."""
    for name, changes in CASES["findings"].items():
        record = Record.from_json(changed(sample_results(), changes))
        yield f"# {name}"
        yield from (summary.setting(record), summary.findings(record), summary.sequences_of_step(record.backend) or "")
        yield table_text(summary.comparison(record))
        yield "\n".join(map(" ".join, summary.tiles(record)))
    for command in ("distill '++teacher._target_=in memory: BertModel, sha256 0123'", "distill +recipe=glue"):
        yield "\n".join(map(str, summary.reproduced_by(command)))


def comparable(folder: Path) -> Iterator[str]:
    """What is said of runs beside each other, of which some numbers cannot be compared."""
    for name, runs in CASES["comparable"].items():
        for number, run in enumerate(runs):
            others = {"baseline": GAP | run["baseline"]} if "baseline" in run else {}
            others |= {"measures": TITLES, "identity": {}, **run.get("others", {})}
            content = results_of(scores := run.get("scores", {"heldout": run.get("score", 5.0)}), **others)
            content["student"] |= {"bits_per_byte": scores, "order_accuracy": scores, **run.get("student", {})}
            for of_set in content["evaluation"].values():
                of_set |= {"digest": "cafe", **run.get("set", {})}
            given = settings_of(run.get("seed", 0), run.get("temperature", 1 + number), **run.get("settings", {}))
            make_run(folder / name / f"run{number}", given, content)
        compared = ComparedRuns(find_runs([str(folder / name)]), "heldout.perplexity" if "ordered" in name else None)
        yield f"# {name}"
        for table in (scores_table(compared), settings_table(compared), costs_table(compared)):
            yield f"{table_text(table)}\n\n{table.note}" if table else ""
        yield "\n".join(best_lines(compared))


def compared(folder: Path) -> ComparedRuns:
    """Runs of three optimizers, one of them scored on another text, and one that has stopped."""
    for number, (kind, digest) in enumerate((("adamw", "a"), ("lamb", "a"), ("sgd", "b"))):
        for seed in (0, 1, 2):
            gap_closed = {"perplexity": {"heldout": {"fraction": 0.34 + number / 10 + seed / 50}}}
            content = results_of(
                {"heldout": 40.0 + number + seed / 2, "wikitext2": 90.0 + number + seed},
                agreement={"heldout": {"top1": 0.5 + number / 10, "kl": 0.1}},
                baseline={"perplexity": {"heldout": 60.0}, "steps": 9, "gap_closed": gap_closed},
            )
            for of_set in content["evaluation"].values():
                of_set["digest"] = digest
            make_run(folder / "runs" / f"{kind}-{seed}", settings_of(seed, optimizer={"kind": kind}), content)
    make_run(folder / "runs" / "stopped", settings_of(4, optimizer={"kind": "sgd"}))
    return ComparedRuns(find_runs([str(folder / "runs")]))


def pages(folder: Path) -> Iterator[tuple[str, str]]:
    """The pages by their names."""
    yield "card-own.md", model_card(Record.from_json(CASES["own"]))
    for name, content in (("everything", everything()), ("alone", alone()), ("teachers", of_several_teachers())):
        record = Record.from_json(content)
        report.write(folder, record, sample_metrics(), CONFIG)
        yield f"report-{name}.md", (folder / "report.md").read_text()
        yield f"card-{name}.md", model_card(record)
    yield "live.md", markdown(live.title_of(under_way()), live.sections(under_way()))
    endings = [live.ending_of(error) for error in ERRORS] + [live.Ending(0, "")]
    stopped = [replace(under_way(), ending=each, left=None, activities=[], logs={}) for each in endings]
    yield "stopped.md", "\n".join(markdown(live.title_of(each), live.sections(each)[:1]) for each in stopped)
    comparison = compared(folder)
    yield "comparison.md", markdown("Comparison", sections_of(comparison, folder))
    yield "comparison.txt", f"{comparison}\n"
    yield "findings.md", "\n\n".join(findings()) + "\n"
    yield "comparable.md", "\n\n".join(comparable(folder / "comparable")) + "\n"


def test_pages_are_those_that_were_read(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(undrawn.DRAWING, undrawn.save_figure)
    monkeypatch.setattr(live, "clock", lambda: "2026-01-02 03:04:05 UTC")
    for name, page in pages(tmp_path):
        if os.environ.get("DISTILL_RENEW"):
            (HERE / "golden" / name).write_text(page)
        assert page == (HERE / "golden" / name).read_text(), name


@pytest.mark.parametrize("word", ["helped", "did not", "unclear"])
def test_report_card_and_comparison_conclude_alike(word: str, tmp_path: Path) -> None:
    """By the first set; what another one concludes stands beside it, and runs of other seeds have to agree."""
    content, sentence = everything(), summary.IN_A_SENTENCE[word]
    of_sets = {"heldout": CONCLUSION | {"word": word}, "wikitext2": CONCLUSION | {"word": "unclear"}}
    content["baseline"]["conclusions"] = {"perplexity": of_sets}
    record = Record.from_json(content)
    report.write(tmp_path, record, sample_metrics(), CONFIG)
    for page in ((tmp_path / "report.md").read_text(), model_card(record)):
        assert f"{sentence}: {CONCLUSION['reason']} (perplexity on heldout test" in page
        assert [other in page for other in summary.IN_A_SENTENCE.values()].count(True) == 1
    others = content | {"baseline": copy.deepcopy(content["baseline"])}
    others["baseline"]["conclusions"]["perplexity"]["heldout"]["word"] = "did not" if word == "helped" else "helped"
    for seed, of_run, expected in ((0, content, word), (1, content, word), (2, others, "unclear")):
        make_run(tmp_path / "runs" / f"run{seed}", settings_of(seed), of_run)
        table = scores_table(ComparedRuns(find_runs([str(tmp_path / "runs")])))
        assert table.head[-1] == "Learning from the teacher" and table.rows[0][-1] == expected
        assert {len(row) for row in table.rows} == {len(table.head)}
