"""What is set in the environment before torch reads it, and that a user's own choice stays."""

import os
from pathlib import Path

import pytest

from distill.runtime.threads import keep_compiled_kernels, limit_spinning

KERNELS = "TORCHINDUCTOR_CACHE_DIR"


def unset(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """For the time of a test, also where it was not set before: then it is not set after it either."""
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)


def test_waiting_threads_give_way_unless_the_user_says_how_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        unset(monkeypatch, name)
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    unset(monkeypatch, "GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_compiled_kernels_stay_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    unset(monkeypatch, KERNELS)
    keep_compiled_kernels()
    assert os.environ[KERNELS] == str(tmp_path / ".cache/distill/kernels") and Path(os.environ[KERNELS]).is_dir()
    monkeypatch.setenv(KERNELS, "/elsewhere")
    keep_compiled_kernels()
    assert os.environ[KERNELS] == "/elsewhere"


def test_without_a_home_torch_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    unset(monkeypatch, KERNELS)
    keep_compiled_kernels()
    assert KERNELS not in os.environ
