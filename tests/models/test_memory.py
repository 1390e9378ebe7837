"""A lack of memory ends a run in one line that names what to lower, in training and in evaluation."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import Shelf
from tiny import loop, make_evaluator, make_masks, make_model, make_rows, make_tokenizer, new_student

from distill.config.settings import (
    BackendConfig,
    EvaluateConfig,
    PrecisionConfig,
    PseudoPerplexityConfig,
    StudentConfig,
)
from distill.distributed.single import Single
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.masked_copies import Copies, head_rows_at_masks
from distill.evaluation.sets import EvaluationSet
from distill.evaluation.speed import check_memory, try_once
from distill.models.check import available, require_memory_for_step
from distill.models.language_model import LanguageModel
from distill.models.precision import dtype_of
from distill.models.student import make_student
from distill.runtime.errors import SettingError
from distill.runtime.host import memory_failure

BACKEND = Single(BackendConfig(device="cpu"))


def allocate() -> None:
    torch.empty(2**62, dtype=torch.uint8)


def gpu_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def system_error() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize("fail", [allocate, lambda: np.zeros(2**60, np.uint8), gpu_error, system_error])
def test_a_failed_allocation_is_recognised(fail: Callable[[], None]) -> None:
    with pytest.raises((MemoryError, OSError, RuntimeError)) as caught:
        fail()
    assert "lower train.batch_size" in str(memory_failure(caught.value))


# --- training


def least(student: Any, precision: str, rows: int, length: int, checkpoints: bool = False) -> int:
    """Bytes that `require_memory_for_step` takes to be the least: of each block four numbers a component, or its input.

    Of blocks that are computed again one at a time needs all four.
    """
    depth = getattr(student.config, "num_hidden_layers", 1)
    kept = depth + 3 if checkpoints else 4 * depth
    return dtype_of(precision).itemsize * kept * student.config.hidden_size * rows * length


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_that_is_sure_to_be_too_much_is_refused_before_it(
    precision: str, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = make_model("bert", 4).train()
    monkeypatch.setattr("distill.models.check.available", lambda _: least(student, precision, 4, 32, checkpoints))
    require_memory_for_step(student, precision, 4, 32, BACKEND, checkpoints)
    with pytest.raises(SettingError, match=r"train\.batch_size=5: .* set train\.sequences_per_step") as raised:
        require_memory_for_step(student, precision, 5, 32, BACKEND, checkpoints)
    assert ("student.gradient_checkpointing=true" in str(raised.value)) != checkpoints
    require_memory_for_step(torch.nn.Linear(1, 1), precision, 5, 32, BACKEND)  # whose sizes nobody knows


def test_a_student_that_memory_does_not_hold_is_not_built() -> None:
    fields = {"hidden_size": 32_000, "num_hidden_layers": 200, "num_attention_heads": 2, "intermediate_size": 64_000}
    settings = StudentConfig(init="random", architecture="bert", config=fields)
    with pytest.raises(SettingError, match=r"student\.config=.*: its weights and their gradients take .* GB, and "):
        make_student(settings, None, make_tokenizer(), 32)


def test_memory_that_runs_out_in_training_has_one_line_and_checkpointing_lets_a_refused_batch_run(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loop, "step", lambda *_, **__: gpu_error())
        assert shelf.run(shelf.root / "too_large") == 2
    assert "distill: not enough memory (CUDA out of memory" in capfd.readouterr().err
    free = 4 * 32 * 8 * 32 * (2 * 4 - 1)  # less than two blocks of width 32 keep of 8 sequences of 32 positions
    monkeypatch.setattr("distill.models.check.available", lambda ranks: free)
    folder, more = shelf.root / "fits", ("train.steps=1", "student.gradient_checkpointing=true")
    assert shelf.run(folder, "train.steps=1") == 2
    assert "set student.gradient_checkpointing=true" in capfd.readouterr().err
    assert shelf.run(folder, *more) == 0


# --- free memory


@pytest.mark.parametrize(("own", "where"), [("/", ""), ("/pod/me", "pod"), ("/elsewhere", "")])
@pytest.mark.parametrize("limit", ["1000", "max"])
def test_the_limit_of_a_container_or_of_a_group_above_is_a_limit(
    own: str, where: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has read from the disk counts as free; without a limit the memory of the machine counts."""
    (tmp_path / "own").write_text(f"0::{own}\n")
    group = tmp_path / "groups" / where
    group.mkdir(parents=True)
    stat = "anon 400\ninactive_file 200\nactive_file 50"
    for name, text in {"current": "700", "stat": stat, "max": limit}.items():
        (group / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr("distill.runtime.host.GROUPS", tmp_path / "groups")
    monkeypatch.setattr("distill.runtime.host.GROUPS_OF_PROCESS", tmp_path / "own")
    monkeypatch.setattr(BACKEND, "local_size", 5)
    assert available(BACKEND) == (1000 - 700 + 250) // 5 or (limit == "max" and available(BACKEND) > 10_000_000)


# --- evaluation


def evaluator_of(fraction: float) -> Evaluator:
    single = PseudoPerplexityConfig(fraction=fraction, batch_size=64)
    settings = EvaluateConfig(batch_size=4, pseudo_perplexity=single)
    masks = make_masks(make_tokenizer(), make_rows(8))
    return make_evaluator(settings, masks, PrecisionConfig(evaluate="fp32"), BACKEND)


def set_of(length: int) -> EvaluationSet:
    return EvaluationSet(f"of {length}", "made up", make_rows(6, length), 1)


def not_to_be_run() -> None:
    raise AssertionError


@pytest.mark.parametrize(("run", "size"), [(allocate, 0), (gpu_error, 0), (not_to_be_run, 10**15)])
def test_a_batch_that_memory_does_not_hold_is_refused(run: Callable[[], None], size: int) -> None:
    with pytest.raises(SettingError, match=r"^evaluate\.batch_size=7: a batch of evaluation takes .*; lower it$"):
        try_once(run, size, "evaluate.batch_size=7", BACKEND)


def test_the_largest_batch_of_each_kind_is_computed_once_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the set with the longest sequences."""
    student, seen = new_student(), list[int]()
    largest = 4 * 32 * (8 + 4 * student.config.hidden_size)  # ids and one layer's output
    with monkeypatch.context() as patch:
        patch.setattr("distill.evaluation.speed.available", lambda ranks: largest - 1)
        check_memory(evaluator_of(0.0), [student], [set_of(8)])
        with pytest.raises(SettingError, match=r"evaluate\.batch_size=4: a batch of evaluation takes"):
            check_memory(evaluator_of(0.0), [student], [set_of(8), set_of(32)])

    def rows_of(model: LanguageModel, copies: Copies) -> torch.Tensor:
        seen.append(len(copies.row))
        return head_rows_at_masks(model, copies)

    monkeypatch.setattr("distill.evaluation.pseudo_perplexity.head_rows_at_masks", rows_of)
    check_memory(evaluator_of(1.0), [student, student], [set_of(32)])
    assert seen == [64, 64]
    monkeypatch.setattr("distill.evaluation.pseudo_perplexity.head_rows_at_masks", lambda *_: allocate())
    with pytest.raises(SettingError, match=r"evaluate\.pseudo_perplexity\.batch_size=64: .* more memory than there is"):
        check_memory(evaluator_of(1.0), [student], [set_of(32)])
