"""What goes wrong in a class of the user's is one line, with the line of the user's file and what there is."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from job import ROOT, Shelf

import distill

MINE = """
import torch
from distill import OutputSpec, Term
from torchmetrics import Metric

class Reads(Term):
    student_reads = teacher_reads = OutputSpec(layers=(-1,))
    def count(self, batch):
        return batch.num_valid
    def loss_sum(self, student, teacher, batch):
        length = batch.input_ids.shape[1]
        return student.hidden[-1].sum() / length

class Breaks(Metric):
    higher_is_better = True
    def update(self, logits, targets):
        self.total = logits.probabilities()
    def compute(self):
        return torch.tensor(0.0)

class Needs(Breaks):
    def __init__(self):
        import a_package_that_is_not_there
"""
MEASURE = "evaluate.measures.mine._target_=mine_31."
WRONG = {
    "objective.mine={_target_: mine_31.Reads, weight: 1}": (
        "objective.mine: loss_sum() of Reads fails: AttributeError",
        "(mine_31.py, line 11: length = batch.input_ids.shape[1]); a Batch has documents, dropout_keys, ids, inputs,",
    ),
    f"{MEASURE}Breaks": (
        f"{MEASURE}Breaks does not fit logits [N, ", "(mine_31.py, line 17: self.total = logits.probabilities())",
    ),
    f"{MEASURE}Needs": (f"{MEASURE}Needs: ModuleNotFoundError: ", "line 23: import a_package_that_is_not_there)"),
}  # fmt: skip


@pytest.mark.parametrize("setting", WRONG)
def test_the_line_names_that_of_the_users_file(
    setting: str, shelf: Shelf, tmp_path: Path, monkeypatch: Any, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "mine_31.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "mine_31", raising=False)
    assert shelf.run(tmp_path / "run", setting) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert all(words in line for words in WRONG[setting]), line


def test_what_readme_and_manual_import_is_public() -> None:
    """So that it stays with every release."""
    imported = set[str]()
    text = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "distill":
                assert node.module == "distill", ast.unparse(node)
                imported |= {name.name for name in node.names}
    assert {"VocabularyTerm", "Source", "Shard", "Document"} <= imported <= set(distill.__all__)
