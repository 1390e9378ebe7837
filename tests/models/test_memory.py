"""A lack of memory ends a run in one line that names what to lower."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import Shelf
from tiny import loop, make_model, make_tokenizer, new_student
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from distill.config.settings import BackendConfig, StudentConfig
from distill.distributed.single import Single
from distill.models.check import available, least_bytes, require_memory_for_step
from distill.models.kernels.dropout import replace_dropout
from distill.models.kernels.packed_linear import use_one_gelu
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.precision import dtype_of
from distill.models.student import make_student
from distill.runtime.errors import SettingError
from distill.runtime.host import memory_failure

BACKEND = Single(BackendConfig(device="cpu"))


def least(student: Any, rows: int, length: int) -> int:
    """Bytes in fp32 that `require_memory_for_step` takes to be the least."""
    return 4 * 4 * student.config.hidden_size * student.config.num_hidden_layers * rows * length


def test_a_step_that_is_sure_to_be_too_much_is_refused_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    student = new_student()
    monkeypatch.setattr("distill.models.check.available", lambda ranks: least(student, 4, 32))
    require_memory_for_step(student, "fp32", 4, 32, BACKEND)
    require_memory_for_step(student, "bf16", 8, 32, BACKEND)  # whose numbers take half as much
    for precision, rows in (("fp32", 5), ("bf16", 9)):
        with pytest.raises(SettingError, match=rf"train\.batch_size={rows}: .* set train\.sequences_per_step"):
            require_memory_for_step(student, precision, rows, 32, BACKEND)


def test_gradient_checkpointing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four blocks three keep their input, and one at a time all that its backward pass needs."""
    student = make_model("bert", 4).train()
    assert least_bytes(student, "fp32", 4, 32) == least(student, 4, 32) == 16 * 4 * 32 * 4 * 32
    assert least_bytes(student, "fp32", 4, 32, checkpoints=True) == 7 * 4 * 32 * 4 * 32
    monkeypatch.setattr("distill.models.check.available", lambda ranks: 7 * 4 * 32 * 4 * 32)
    require_memory_for_step(student, "fp32", 4, 32, BACKEND, checkpoints=True)
    with pytest.raises(SettingError, match=r"or set student\.gradient_checkpointing=true, which keeps less"):
        require_memory_for_step(student, "fp32", 4, 32, BACKEND)
    with pytest.raises(SettingError, match=r"sequences that a step has now$"):
        require_memory_for_step(student, "fp32", 5, 32, BACKEND, checkpoints=True)


def kept_bytes(student: Any, precision: str, rows: int, checkpoints: bool = False) -> int:
    """Of what autograd keeps of a forward of so many rows of 32 positions, each storage once."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that no other one comes to lie there
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.randint(5, 20, (rows, 32))
        model = LanguageModel(student, precision, checkpoints=checkpoints)
        hidden = model({"input_ids": ids}, None, OutputSpec(layers=(LAST,))).hidden[LAST]
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1, "vocab_size": 50}
NARROW: dict[str, dict[str, Any]] = {
    "bert": SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "distilbert": {"dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 1, "dropout": 0.0, "vocab_size": 50},
    "albert": SMALL | {"embedding_size": 8},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 1, "resid_pdrop": 0.0, "vocab_size": 50},
    "llama": SMALL | {"num_key_value_heads": 1},
    "gemma": SMALL | {"num_key_value_heads": 1, "head_dim": 4},
}


@pytest.mark.parametrize(("family", "precision"), [*((family, "fp32") for family in NARROW), ("bert", "bf16")])
def test_the_estimate_is_below_what_a_step_keeps(family: str, precision: str) -> None:
    """Also of models whose inner layers are as narrow as can be; what does not grow with the batch does not count."""
    config = AutoConfig.for_model(family, **NARROW[family])
    kind = AutoModelForCausalLM if family in ("gpt2", "llama", "gemma") else AutoModelForMaskedLM
    student = kind.from_config(config).train()
    replace_dropout(student)
    use_one_gelu(student)
    per_row = (kept_bytes(student, precision, 12) - kept_bytes(student, precision, 4)) / 8
    assert least(student, 1, 32) * dtype_of(precision).itemsize / 4 < per_row
    of_inputs = (kept_bytes(student, precision, 12, True) - kept_bytes(student, precision, 4, True)) / 8
    assert of_inputs < per_row / 2, "far less is kept where blocks are computed again, one after the other"
    assert least_bytes(student, precision, 1, 32, checkpoints=True) < of_inputs + per_row / 4


# --- free memory ---------------------------------------------------------------------------------------------------


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


VERSION_2 = {"memory__current": "700\n", "memory__stat": "anon 400\ninactive_file 200\nactive_file 50\n"}


@pytest.mark.parametrize(
    ("own", "where", "files"),
    [
        ("0::/\n", "", VERSION_2 | {"memory__max": "1000\n"}),
        ("0::/pod/me\n", "pod", VERSION_2 | {"memory__max": "1000\n"}),  # the limit of a group above its own
        ("0::/elsewhere\n", "", VERSION_2 | {"memory__max": "1000\n"}),  # in a container that sees its own alone
    ],
)
def test_the_limit_of_a_container_is_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, where: str, files: dict[str, str]
) -> None:
    """What it has read from the disk counts as free."""
    (tmp_path / "own").write_text(own)
    write_group(tmp_path / "groups" / where, **files)
    monkeypatch.setattr("distill.runtime.host.GROUPS", tmp_path / "groups")
    monkeypatch.setattr("distill.runtime.host.GROUPS_OF_PROCESS", tmp_path / "own")
    assert available(BACKEND) == 1000 - 700 + 250
    monkeypatch.setattr(BACKEND, "local_size", 5)
    assert available(BACKEND) == 110


@pytest.mark.parametrize("files", [{}, VERSION_2 | {"memory__max": "max\n"}])
def test_without_a_limit_the_memory_of_the_machine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    (tmp_path / "own").write_text("0::/\n")
    write_group(tmp_path / "groups", **files)
    monkeypatch.setattr("distill.runtime.host.GROUPS", tmp_path / "groups")
    monkeypatch.setattr("distill.runtime.host.GROUPS_OF_PROCESS", tmp_path / "own")
    free = available(BACKEND)
    assert free is not None and free > 100_000_000


# --- errors --------------------------------------------------------------------------------------------------------


def test_a_student_that_memory_does_not_hold_is_not_built() -> None:
    fields = {"hidden_size": 32_000, "num_hidden_layers": 200, "num_attention_heads": 2, "intermediate_size": 64_000}
    settings = StudentConfig(init="random", architecture="bert", config=fields)
    with pytest.raises(
        SettingError,
        match=r"student\.config=.*: its weights and their gradients take .* GB, and .* are free: choose a smaller",
    ):
        make_student(settings, None, make_tokenizer(), 32)


def gpu_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def system_error() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize(
    "fail", [lambda: torch.empty(2**62, dtype=torch.uint8), lambda: np.zeros(2**60, np.uint8), gpu_error, system_error]
)
def test_a_failed_allocation_is_recognised(fail: Callable[[], None]) -> None:
    with pytest.raises((MemoryError, OSError, RuntimeError)) as caught:
        fail()
    assert "lower train.batch_size" in str(memory_failure(caught.value))


def test_memory_that_runs_out_in_training_has_one_line(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(loop, "step", lambda *_, **__: gpu_error())
    assert shelf.run(shelf.root / "too_large") == 2
    lines = capfd.readouterr().err.splitlines()
    assert any("distill: not enough memory (CUDA out of memory" in line for line in lines)


def test_gradient_checkpointing_lets_a_refused_batch_run(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    free = 4 * 32 * 8 * 32 * (2 * 4 - 1)  # less than two blocks of width 32 keep of 8 sequences of 32 positions
    monkeypatch.setattr("distill.models.check.available", lambda ranks: free)
    folder, more = shelf.root / "fits", ("train.steps=1", "student.gradient_checkpointing=true")
    assert shelf.run(folder, "train.steps=1") == 2
    assert "set student.gradient_checkpointing=true" in capfd.readouterr().err
    assert shelf.run(folder, *more) == 0
