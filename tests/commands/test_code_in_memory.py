"""Another function, or another part of a student that is frozen, is another run, where both are held by a program."""

import importlib
import linecache
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from job import book, save_model

import distill
from distill.commands.api.callables import target_of
from distill.commands.api.digest import code_digest, digest_of
from distill.config.in_memory import InMemory
from distill.runtime.errors import SettingError

CELL = """
SCALE = {scale}

def helper(value):
    '''{remark}'''
    return value {sign} 1

def loss(student, teacher, targets):
    return SCALE * helper(student - teacher)
"""


def of_cell(scale: float = 1.0, sign: str = "+", remark: str = "x", more: str = "") -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(more + CELL.format(scale=scale, sign=sign, remark=remark), names)
    return code_digest(names["loss"])


def test_lambdas_of_one_line_are_others() -> None:
    one, other = (lambda s, t, y: (s - t).sum(-1)), (lambda s, t, y: (s + t).sum(-1))
    assert digest_of(one) == digest_of(other), "by the source of their line"
    assert code_digest(one) != code_digest(other)


def test_what_a_function_reads_counts() -> None:
    assert of_cell() == of_cell(more="\n\n# further down\nunused = 3\n")
    assert len({of_cell(), of_cell(scale=2.0), of_cell(sign="-")}) == 3

    def made(weight: Any, default: float = 1.0) -> Callable[..., Any]:
        return lambda s, t, y, factor=default: factor * weight * s

    digests = [code_digest(made(*arguments)) for arguments in ((1.0,), (2.0,), (1.0, 2.0), (torch.ones(2),))]
    assert len({*digests}) == 4 and digests[3] == code_digest(made(torch.ones(2)))
    assert code_digest(made([1])) == code_digest(made([2])), "a list may change while a program runs"
    held = target_of("objective.mine", made(1.0))
    assert isinstance(held, InMemory) and held.code == digests[0]


def test_modules_and_classes_of_the_user_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for sign in ("+", "-"):
        (tmp_path / "read_helpers.py").write_text(
            f"def shift(x):\n    return x {sign} 1\n\nclass Shift:\n    by = {sign}1\n"
        )
        monkeypatch.delitem(sys.modules, "read_helpers", raising=False)
        importlib.invalidate_caches()
        helpers = importlib.import_module("read_helpers")
        linecache.checkcache()
        names: dict[str, Any] = {"__name__": "__main__", "helpers": helpers, "Shift": helpers.Shift, "T": sign}
        names |= {"part": partial(helpers.shift)}
        exec("def by_module(s, t, y):\n    return helpers.shift(s)\n", names)
        exec("def by_class(s, t, y):\n    return s + Shift.by\n", names)
        exec("def by_partial(s, t, y):\n    return part(s)\n", names)
        exec("def by_neither(s, t, y):\n    return s.T + s.helpers\n", names)
        digests.append([code_digest(names[f"by_{of}"]) for of in ("module", "class", "partial", "neither")])
    assert [one != other for one, other in zip(*digests, strict=True)] == [True, True, True, False]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("code") / "model", "bert", 2)


def test_another_loss_of_the_same_line_or_other_frozen_parameters_are_refused(saved: Path, tmp_path: Path) -> None:
    student = distill.load_model(saved, "cpu")
    student.model.requires_grad_()
    losses = [lambda s, t, y, sign=sign: (s - sign * t).pow(2).mean(-1) for sign in (1, 2)]

    def run(loss: Any) -> Any:
        return distill.distill(
            teacher=distill.load_model(saved, "cpu"),
            student=(student.model, student.tokenizer),
            data=[book(number, 2).strip() for number in range(60)],
            objective={"mine": loss},
            train={"steps": 1, "epochs": None, "batch_size": 8},
            precision="fp32",
            evaluate={"max_sequences": 8, "curve": {"points": 0}},
            corpus={"sequence_length": 32},
            folder=tmp_path / "run",
            settings={"data.cache": str(tmp_path / "cache"), "data.workers": 1},
        )

    assert run(losses[0]).record == run(losses[0]).record
    with pytest.raises(SettingError, match=r"the code of <lambda> in memory has changed since then"):
        run(losses[1])
    student.model.get_input_embeddings().requires_grad_(False)
    with pytest.raises(SettingError, match=r"other parameters of the student are frozen now"):
        run(losses[0])
