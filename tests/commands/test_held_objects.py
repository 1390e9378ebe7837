"""Objects that a program holds, as notebooks have them: numbers of numpy, lambdas, loaded models, classes of a cell."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from job import book, save_model
from safetensors.torch import load_file

import distill
from distill.commands.api.data import splits_of
from distill.runtime.errors import SettingError

TEXTS = [book(number, 2).strip() for number in range(60)]


class Noted(distill.Observer):
    """Writes into a file, and remembers under keys that JSON does not have."""

    def __init__(self, folder: Path, file: Any = None) -> None:
        self.seen, self.file = {("step", 0): 0.0}, file

    def after_step(self, step: distill.ObservedStep) -> None:
        self.seen["step", step.step] = step.losses["total"]
        Path(self.file).write_text(str(step.step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("held") / "model", "bert", 2)


@pytest.fixture(scope="module")
def run(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("run")
    return distill.distill(
        teacher=distill.load_model(saved, "cpu"),
        student=distill.load_model(saved, "cpu"),
        data=TEXTS,
        objective=lambda student, teacher, targets: (student - teacher - 1).pow(2).mean(-1),
        optimizer={"lr": np.float64(1e-2)},
        observers={"noted": {"_target_": Noted, "file": folder / "steps.txt"}},
        train={"steps": np.int64(2), "epochs": None, "batch_size": 8},
        precision="fp32",
        evaluate={"max_sequences": 8, "curve": {"points": 0}},
        corpus={"sequence_length": 32},
        folder=folder / "run",
        settings={"data.cache": str(folder / "cache"), "data.workers": 1},
    )


def test_a_loaded_student_is_trained_by_a_lambda(run: Any, saved: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (saved, Path(run.student)))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert (run.folder.parent / "steps.txt").read_text() == "2" and "loss" in run.record.objective.terms


def test_the_student_of_data_in_memory_is_scored_on_other_texts(run: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(" ".join(TEXTS[:3]))
    source = f"+evaluate.sources.mine={{kind: text, path: {tmp_path}/mine.txt}}"
    for option in ([], ["evaluate=local"]):
        more = [*option, source, "evaluate.sets=[mine]", "evaluate.max_sequences=4"]
        assert list(distill.evaluate([run.student], more).vocabularies[0].sets) == ["mine"]


def test_a_pair_trains_a_loaded_student(saved: Path) -> None:
    pair = distill.load_pair(distill.load_model(saved, "cpu"), distill.load_model(saved, "cpu"), sequence_length=32)
    pair.objective({"soft": 1.0})(["A dark night."]).total.backward()
    assert all(weight.requires_grad for weight in pair.student.model.parameters())
    both = distill.load_model(saved, "cpu")
    with pytest.raises(SettingError, match=r"^student is the very model of the teacher"):
        distill.load_pair(both, both)
    with pytest.raises(SettingError, match=r"^student: requires_grad is off"):
        distill.load_pair("bundled_small", (both.model.requires_grad_(False), both.tokenizer), sequence_length=32)


def test_each_module_keeps_its_mode(saved: Path) -> None:
    held = distill.load_model(saved, "cpu")
    model = held.model.train()
    model.base_model.embeddings.eval()
    before = [module.training for module in model.modules()]
    distill.predict((model, held.tokenizer), "A dark [MASK].")
    distill.score(["A dark night."], (model, held.tokenizer))
    assert [module.training for module in model.modules()] == before and len(set(before)) == 2


def test_a_frame_of_pandas_is_a_data_set() -> None:
    frame = pandas.DataFrame({"text": ["One.", "Two."], "stars": [1, 2]}, index=[7, 8])
    (rows,) = splits_of(frame, "data").values()
    assert rows.column_names == ["text", "stars"] and rows["text"][:] == ["One.", "Two."]


def test_a_column_that_the_first_row_lacks_is_there() -> None:
    """`datasets` takes the columns of the first row alone: prompts would be learnt, as nothing would mark them."""
    (rows,) = splits_of([{"input_ids": [1, 2]}, {"input_ids": [3, 4], "labels": [-100, 4]}], "data").values()
    assert rows[1] == {"input_ids": [3, 4], "labels": [-100, 4]} and rows[0]["labels"] is None
