"""Another function, object or frozen part of a student is another run, where a program holds it."""

import importlib
import linecache
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import book, environment, save_model

import distill
from distill.commands.api.objects import digest_of, target_of
from distill.config.component import InMemory
from distill.runtime.errors import SettingError

CELL = """
SCALE = {scale}

def helper(value):
    return value {sign} 1

def loss(student, teacher, targets, default={default}):
    return SCALE * helper(student - teacher) + default

class Loss:
    def losses(self, a, b):
        return SCALE * helper(a) if b in {{'p', 'q'}} else {default}
"""
SAME: dict[str, Any] = {"scale": 1.0, "sign": "+", "default": 1}
OTHERS = ({"scale": 2.0}, {"sign": "-"}, {"default": 2})


def digest_in_cell(name: str, more: str = "", **changed: Any) -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(more + CELL.format(**{**SAME, **changed}), names)
    return digest_of(names[name], "objective.mine")


def test_what_a_function_or_class_of_a_cell_reads_counts_and_in_any_process() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    code += "from test_code_in_memory import digest_in_cell\nprint(digest_in_cell('loss'), digest_in_cell('Loss'))"
    env = environment() | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    for name, elsewhere in zip(("loss", "Loss"), done.stdout.split(), strict=True):
        assert elsewhere == digest_in_cell(name) == digest_in_cell(name, more="\n\n# further down\nunused = 3\n")
        assert len({elsewhere, *(digest_in_cell(name, **other) for other in OTHERS)}) == 4


class Held:
    def __init__(self, value: Any) -> None:
        self.value = value


def scaled(weight: Any) -> Any:
    return lambda student, teacher, targets: weight * student


@pytest.mark.parametrize("make", [Held, scaled])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 2.0),
        (np.arange(3), np.arange(1, 4)),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
        ({("a", 1): 2}, {("a", 1): 3}),
        ({1, 2}, {1, 3}),
        ([Held([np.ones(2)])], [Held([np.zeros(2)])]),
    ],
)
def test_other_values_are_another_object(make: Any, one: Any, other: Any) -> None:
    assert digest_of(make(one), "x") == digest_of(make(one), "x") != digest_of(make(other), "x")


def test_what_has_no_content_to_compare() -> None:
    with pytest.raises(SettingError) as error:
        target_of("schedule", Held(number for number in range(3)))
    assert (error.value.setting, error.value.value) == ("schedule", "Held") and error.value.cure.startswith("give its")
    target_of("observers.mine", Held(number for number in range(3)))


def test_modules_and_classes_of_the_user_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    codes = []
    for sign in ("+", "-"):
        (tmp_path / "read_helpers.py").write_text(f"def shift(x):\n    return x {sign} 1\n\nclass Shift:\n    by = 1\n")
        monkeypatch.delitem(sys.modules, "read_helpers", raising=False)
        importlib.invalidate_caches()
        helpers = importlib.import_module("read_helpers")
        linecache.checkcache()
        names: dict[str, Any] = {"__name__": "__main__", "helpers": helpers, "Shift": helpers.Shift}
        for name, body in {"module": "helpers.shift(s)", "class": "s + Shift.by", "neither": "s"}.items():
            exec(f"def by_{name}(s, t, y):\n    return {body}\n", names)
        functions = [names[f"by_{of}"] for of in ("module", "class", "neither")] + [partial(helpers.shift)]
        held = [target_of("schedule", function) for function in functions]
        codes.append([one.code for one in held if isinstance(one, InMemory)])
    assert [one != other for one, other in zip(*codes, strict=True)] == [True, True, False, True]


def test_another_loss_of_the_same_line_or_other_frozen_parameters_are_refused(tmp_path: Path) -> None:
    saved = save_model(tmp_path / "model", "bert", 2)
    student = distill.load_model(saved, "cpu").model.requires_grad_()
    losses = [lambda s, t, y, sign=sign: (s - sign * t).pow(2).mean(-1) for sign in (1, 2)]

    def run(loss: Any) -> Any:
        return distill.distill(
            teacher=distill.load_model(saved, "cpu"),
            student=student,
            data=[book(number, 2).strip() for number in range(60)],
            objective={"mine": loss},
            train={"steps": 1, "epochs": None, "batch_size": 8},
            precision="fp32",
            evaluate={"max_sequences": 8},
            corpus={"sequence_length": 32},
            folder=tmp_path / "run",
            settings={"data.cache": str(tmp_path / "cache"), "data.workers": 1},
        )

    assert run(losses[0]).record == run(losses[0]).record
    with pytest.raises(SettingError, match=r"objective\.mine\._target_ was in memory: <lambda>"):
        run(losses[1])
    student.get_input_embeddings().requires_grad_(False)
    with pytest.raises(SettingError, match=r"other parameters of the student are frozen now"):
        run(losses[0])
