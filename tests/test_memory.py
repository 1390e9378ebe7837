"""A lack of memory ends a run in one line that names what to lower."""

import errno
from collections.abc import Callable

import numpy as np
import pytest
import torch
from job import Shelf
from tiny import new_student

from distill.errors import SettingError
from distill.memory import memory_failure, require_memory_for_step

CPU = torch.device("cpu")


def test_a_step_that_is_sure_to_be_too_much_is_refused_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    student = new_student()
    per_row = 4 * 8 * student.config.hidden_size * student.config.num_hidden_layers * 32
    monkeypatch.setattr("distill.memory.available", lambda device: 4 * per_row)
    require_memory_for_step(student, 4, 32, CPU)
    with pytest.raises(SettingError, match=r"train\.batch_size=5: .* raise train\.accumulate"):
        require_memory_for_step(student, 5, 32, CPU)


def test_nothing_is_foreseen_of_a_model_without_a_width() -> None:
    require_memory_for_step(torch.nn.Linear(2, 2), 10**9, 10**9, CPU)


def test_the_estimate_is_below_what_a_step_keeps() -> None:
    """Counted by the tensors that autograd keeps, each storage once."""
    student, kept = new_student().train(), {}
    weights = {weight.untyped_storage().data_ptr() for weight in student.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = student.base_model(torch.randint(5, 20, (4, 32))).last_hidden_state
    least = 4 * 8 * student.config.hidden_size * student.config.num_hidden_layers * 4 * 32
    assert out.requires_grad
    assert least < sum(size for where, size in kept.items() if where not in weights)


def torch_error() -> None:
    torch.empty(2**62, dtype=torch.uint8)


def numpy_error() -> None:
    np.zeros(2**60, dtype=np.uint8)


def gpu_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def system_error() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize("fail", [torch_error, numpy_error, gpu_error, system_error])
def test_a_failed_allocation_is_recognised(fail: Callable[[], None]) -> None:
    with pytest.raises((MemoryError, OSError, RuntimeError)) as caught:
        fail()
    assert "lower train.batch_size" in str(memory_failure(caught.value))


def test_other_errors_stay_what_they_are() -> None:
    assert memory_failure(RuntimeError("shapes do not fit")) is None
    assert memory_failure(ValueError("out of memory")) is None


def test_memory_that_runs_out_in_training_has_one_line(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("distill.train.accumulate_gradients", lambda *_, **__: gpu_error())
    assert shelf.run(shelf.root / "too_large") == 2
    lines = capfd.readouterr().err.splitlines()
    assert any("distill: there is not enough memory (CUDA out of memory" in line for line in lines)


def test_a_batch_that_the_machine_cannot_hold_is_refused(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("distill.memory.available", lambda device: 1000)
    assert shelf.run(shelf.root / "refused") == 2
    assert "train.batch_size=" in capfd.readouterr().err
