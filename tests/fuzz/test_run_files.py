"""Any bytes in place of the files of a run: damage is called that, and what is not noticed has changed nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny import Fit

from distill.config.settings import TrainConfig
from distill.runs.record import Record
from distill.runs.results_file import read_results, write_results
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import MANIFEST
from distill.runtime.jsonl import read_lines

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", MANIFEST)
# A cut at a share of the file, bytes put in there, and how many of the old ones go.
EDITS = st.tuples(st.floats(0, 1), st.binary(max_size=12), st.integers(0, 12))


def edited(content: bytes, edit: tuple[float, bytes, int]) -> bytes:
    where = int(edit[0] * len(content))
    return content[:where] + edit[1] + content[where + edit[2] :]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any, tokenizer: Any, rows: np.ndarray) -> tuple[Fit, Path]:
    folder = tmp_path_factory.mktemp("run")
    student = tiny.make_model("distilbert", 1, seed=5).train()
    settings = TrainConfig(batch_size=4, accumulate=2, epochs=None, steps=2, save_every=1)
    fit = Fit(folder / "checkpoints", tokenizer, rows, None, student, tiny.only(mlm=1.0), settings)
    fit.run()
    path = fit.checkpoints.newest()
    assert path is not None
    return fit, path


def tensors_of(fit: Fit) -> tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]:
    """Copies of the weights, and of what the optimizer keeps of each."""
    slots = {
        (number, name): fit.made.state[weights][name].clone()
        for number, weights in enumerate(fit.model.parameters())
        for name in fit.made.state.get(weights, {})
    }
    return {name: value.clone() for name, value in fit.model.state_dict().items()}, slots


def read_or_refused(fit: Fit, path: Path) -> None:
    """A checkpoint that is read gives what was saved; any other is refused in one line, and nothing of it is used."""
    saved = tensors_of(fit)
    with torch.no_grad():
        for weight in fit.model.parameters():
            weight.add_(1)
    before = tensors_of(fit)
    try:
        fit.checkpoints.check(path)
        state = fit.checkpoints.load(path, fit.model, fit.made)
        assert (state.step, state.tokens) == (fit.state.step, fit.state.tokens)
        before = saved
    except SettingError as error:
        assert len(str(error).splitlines()) == 1
    for old, new in zip(before, tensors_of(fit), strict=True):
        assert old.keys() == new.keys()
        assert [name for name in old if not torch.equal(old[name], new[name])] == []
    with torch.no_grad():
        for weight, (name, _) in zip(fit.model.parameters(), fit.model.named_parameters(), strict=True):
            weight.copy_(saved[0][name])


@pytest.mark.parametrize("name", FILES)
@given(edit=EDITS)
def test_any_bytes_in_a_checkpoint(checkpoint: tuple[Fit, Path], tmp_path: Path, name: str, edit: Any) -> None:
    fit, path = checkpoint
    copied = tmp_path / path.name
    shutil.copytree(path, copied, dirs_exist_ok=True)
    (copied / name).write_bytes(edited((path / name).read_bytes(), edit))
    read_or_refused(fit, copied)


@given(lines=st.lists(JSON | st.fixed_dictionaries({"step": JSON, "seconds": JSON, "data_wait": JSON}), max_size=6))
@example(lines=[{"step": 1, "seconds": 1.0, "data_wait": 0.0, "loss": None}])
def test_any_json_in_a_log(tmp_path: Path, lines: list[Any]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    good = read_lines(path, only_good=True)
    assert [line["step"] for line in good] == sorted({line["step"] for line in good})
    try:
        assert read_lines(path) == good
    except Damaged as damage:
        assert len(str(damage).splitlines()) == 1


RESULTS = Record.from_json(
    {"identity": {"a": 1}, "training": {"steps": 3}, "recipe": "é" * 20, "student_files": {"a": "b"}}
)


def as_written_or_damaged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        assert read_results(path) == RESULTS
    except Damaged as damage:
        assert len(str(damage).splitlines()) == 1


@given(edit=EDITS)
def test_any_bytes_in_results(tmp_path: Path, edit: Any) -> None:
    path = tmp_path / "results.json"
    write_results(path, RESULTS)
    as_written_or_damaged(path, edited(path.read_bytes(), edit))
