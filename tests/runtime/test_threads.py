"""What is set in the environment before torch reads it, and that a user's own choice stays."""

import itertools
import os
from pathlib import Path

import pytest

from distill.runtime.host import keep_compiled_kernels, limit_spinning

KERNELS = "TORCHINDUCTOR_CACHE_DIR"


def unset(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """For the time of a test, also where it was not set before: then it is not set after it either."""
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)


def loadavg(monkeypatch: pytest.MonkeyPatch, *running: int) -> None:
    """Let /proc/loadavg name so many running threads, in turn and again."""
    texts = (f"0.50 0.40 0.30 {count}/150 4242\n" for count in itertools.cycle(running))
    read = Path.read_text
    name = "/proc/loadavg"
    monkeypatch.setattr(Path, "read_text", lambda path: next(texts) if str(path) == name else read(path))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


def chosen(monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        unset(monkeypatch, name)
    limit_spinning()
    return os.environ["GOMP_SPINCOUNT"]


@pytest.mark.parametrize(
    ("threads", "running", "spins"),
    [
        ("", [1], "10000"),  # this process alone
        ("", [2], "1000"),  # one beside four threads on four cores
        ("2", [3], "10000"),  # two beside two threads
        ("2", [4], "1000"),
        ("", [3, 1, 2, 2], "10000"),  # what runs for a moment is no program that computes
        ("many", [1], "10000"),
    ],
)
def test_waiting_threads_give_way_sooner_beside_other_programs(
    monkeypatch: pytest.MonkeyPatch, threads: str, running: list[int], spins: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    loadavg(monkeypatch, *running)
    assert chosen(monkeypatch) == spins


@pytest.mark.parametrize("text", [None, "", "0.1 0.1 0.1 few/100 1"])
def test_where_nothing_tells_what_runs_they_give_way_soon(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    def read(path: Path) -> str:
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read)
    assert chosen(monkeypatch) == "1000"


def test_a_users_own_way_of_waiting_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    unset(monkeypatch, "OMP_WAIT_POLICY")
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
