"""A batch of evaluation that memory does not hold is refused before the first step."""

import pytest
import torch
from job import Shelf

from distill.backends.single import Single
from distill.config import BackendConfig
from distill.errors import SettingError
from distill.evaluation.rehearsal import rehearse

BACKEND = Single(BackendConfig(device="cpu"))


def test_what_is_sure_to_be_too_much_is_not_tried() -> None:
    with pytest.raises(SettingError, match=r"evaluate\.batch_size=7: .* takes 1e\+06 GB at least"):
        rehearse(lambda: pytest.fail("it was tried"), 10**15, 7, BACKEND)


def allocate() -> None:
    torch.empty(2**62, dtype=torch.uint8)


def raise_like_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("run", [allocate, raise_like_a_gpu])
def test_a_lack_of_memory_has_one_line(run: object) -> None:
    with pytest.raises(SettingError, match=r"evaluate\.batch_size=7: .* lower it"):
        rehearse(run, 0, 7, BACKEND)  # type: ignore[arg-type]


def test_other_errors_stay_as_they_are() -> None:
    def broken() -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        rehearse(broken, 0, 7, BACKEND)


def test_a_run_is_refused_before_its_first_step(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    folder = shelf.root / "rehearsed"
    monkeypatch.setattr("distill.evaluation.rehearsal.available", lambda backend: 1_000_000)
    assert shelf.run(folder, "evaluate.batch_size=64") == 2
    assert "evaluate.batch_size=64: a batch of evaluation takes" in capfd.readouterr().err
    assert not list((folder / "checkpoints").glob("*"))
