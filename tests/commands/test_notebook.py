"""The worked notebook: its cells run in order as they stand, and what is stored in it came from a run of them all."""

import ast
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from job import ROOT, Shelf, book, save_model

import distill

NOTEBOOK = ROOT / "recipes" / "notebooks" / "distil_in_a_notebook.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
HOOK = "MORE = []"  # where a reader adds settings, and the test its own
STEPS = "STEPS = 120"  # of the run from objects


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def run_cell(text: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; gives the value of its last line where that is an expression."""
    tree = ast.parse(text)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.mark.slow
def test_the_cells_run_in_order(shelf: Shelf, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    assert HOOK in source(CODE[0]) and sum(STEPS in source(cell) for cell in CODE) == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    few = ["train.epochs=null", "train.steps=2", "precision=fp32", "evaluate.pseudo_perplexity.fraction=0.1"]
    more = [*shelf.corpus, *few]
    names: dict[str, Any] = {}
    changes = {HOOK: f"MORE = {more!r}", STEPS: "STEPS = 8"}
    cells = [source(cell).replace(HOOK, changes[HOOK]).replace(STEPS, changes[STEPS]) for cell in CODE]
    values = [run_cell(cell, names) for cell in cells]
    kinds = [type(value).__name__ for value in values if value is not None]
    assert kinds == ["RunResults", "Chart", "dict", "int", "RunResults"]
    assert len(names["totals"]) == 8 and [point["step"] for point in names["mine"].history] == [2, 4, 6, 8]
    assert names["mine"].settings["train"]["keep_best"] == "perplexity"
    assert "Student" in values[2]._repr_html_() and values[3]._repr_png_()
    printed = capsys.readouterr().out
    assert printed.count("teacher  ") == printed.count("student  ") == 3  # of each model a line for each sentence
    assert re.search(r"^9 total \d+\.\d+", printed, re.M)


def test_what_is_stored_is_of_one_run_of_all_cells_and_small() -> None:
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    shown = [output for cell in CODE[1:] for output in cell["outputs"]]
    assert all(cell["outputs"] for cell in CODE[1:]) and not any(one["output_type"] == "error" for one in shown)
    text = NOTEBOOK.read_text()
    assert "image/png" in text and "text/html" in text and len(text) < 150_000
    assert not re.search(r"/(tmp|home|root|work|Users)/", text), "a path of the machine that ran it"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)


def test_the_loop_in_the_manual(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    exec(compile(blocks("how-to/python.md")[-1], "python.md", "exec"), {})
    assert "TextScore(" in capsys.readouterr().out and Path("my_student/config.json").is_file()


def test_objects_in_the_manual(shelf: Shelf, monkeypatch: Any) -> None:
    """Both runs of the page, shorter, and the run of the page for those who come from elsewhere."""
    whole, held = distill.distill, distill.load_model(shelf.teacher, "cpu")
    texts = [book(number, 2) for number in range(60)]
    few = {"corpus.sequence_length": 32, "evaluate.max_sequences": 32, "precision": "fp32"}
    few |= {"train.steps": 2, "train.epochs": None, "data.cache": "cache", "data.workers": 1}
    monkeypatch.setattr(distill, "distill", lambda **arguments: whole(**arguments, **few))

    def names_of(model: Any, tokenizer: Any, column: str, rows: Any) -> dict[str, Any]:
        dataset = Dataset.from_dict({column: rows})
        return {"teacher": model, "tokenizer": tokenizer, "student": copy.deepcopy(model), "dataset": dataset}

    names = names_of(held.model, held.tokenizer, "text", texts)
    exec(compile("".join(blocks("how-to/python.md")[:2]), "python.md", "exec"), names)
    run: Any = names["run"]
    assert run.settings["objective"]["variation"]["scale"] == 0.5 and "accuracy" in run.scores["student"]
    pooled = blocks("coming-from.md")[-1].replace("TEACHER", str(shelf.teacher)).replace("STUDENT", str(shelf.teacher))
    exec(compile(pooled.replace("runs/mine", "runs/pooled"), "coming-from.md", "exec"), names)
    causal = distill.load_model(save_model(Path("causal"), "gpt2", 2), "cpu")
    messages = [[{"role": role, "content": text[300:380]} for role in ("user", "assistant")] for text in texts]
    names = names_of(causal.model, causal.tokenizer, "messages", messages)
    exec(compile(blocks("coming-from.md")[0].replace("runs/mine", "runs/causal"), "coming-from.md", "exec"), names)
    run = names["run"]
    assert run.record.recipe == "distilgpt2_gutenberg" and list(run.record.objective.terms) == ["soft"]
