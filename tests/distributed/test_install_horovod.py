"""The set-up of Horovod: what is missing is said in one line; a second call is quick; a built wheel is kept."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from distill.distributed import install_horovod
from distill.distributed.install_horovod import CannotBuild, _build_settings, _cuda_settings, _has_mpi, main


def folder_with(folder: Path, **programs: str) -> str:
    """A folder of little shell scripts, to be the whole search path."""
    folder.mkdir()
    for name, body in programs.items():
        script = folder / name.replace("_", "+")
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
    return str(folder)


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip finds nothing, as on a machine without network; its output is kept where it goes away."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.parametrize(
    ("programs", "missing"), [((), "apt-get install g++"), (("g__",), "make (Debian: apt-get install make)")]
)
def test_the_command_names_what_is_missing(
    machine: "Machine",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    programs: tuple[str, ...],
    missing: str,
) -> None:
    """The whole command, on a machine without Horovod and with an empty cache."""
    monkeypatch.setattr(install_horovod, "_build_settings", _build_settings)
    monkeypatch.setenv("PATH", folder_with(tmp_path / "bin", **dict.fromkeys(programs, "exit 0")))
    assert main() == 1 and not machine.kept
    error = capsys.readouterr().err
    assert missing in error and len(error.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_a_second_call_is_quick() -> None:
    began = time.monotonic()
    done = install({**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.returncode == 0 and "Horovod is here" in done.stdout, done.stderr
    assert time.monotonic() - began < 240  # it would build for many minutes


def install(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distill.distributed.install_horovod"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_mpi_without_headers_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Debian's openmpi-bin, whose mpicxx compiles nothing."""
    monkeypatch.setenv("PATH", folder_with(tmp_path / "bare", mpicxx="echo mpi.h: not found >&2; exit 1"))
    assert not _has_mpi()
    monkeypatch.setenv("PATH", folder_with(tmp_path / "whole", mpicxx="exit 0"))
    assert _has_mpi()


def test_gpus_that_are_not_here_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.cpp_extension

    for part in ("include/cuda_runtime.h", "bin/nvcc"):
        (tmp_path / part).parent.mkdir()
        (tmp_path / part).touch()
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "80,90")
    assert _cuda_settings()["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"


def no_pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    raise CannotBuild(f"pip {arguments[0]} failed")


class Machine:
    """A machine whose pip builds and installs a wheel of a few bytes, which works as long as these are `good`."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "distill" / "horovod"
        self.builds = "good"  # the bytes of what pip builds here
        self.built = 0
        self.installed = b""

    def pip(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        if arguments[0] == "wheel":
            assert environment is not None and Path(environment["CMAKE_TOOLCHAIN_FILE"]).is_file()
            self.built += 1
            Path(arguments[arguments.index("--wheel-dir") + 1], "horovod-0.28.1-linux.whl").write_text(self.builds)
        elif (wheel := Path(arguments[-1])).suffix == ".whl":
            self.installed = wheel.read_bytes()
            if self.installed == b"cut":
                raise CannotBuild("pip install failed; its output is in a file")

    def problem(self, gpu: bool) -> str | None:
        return None if self.installed == b"good" else "undefined symbol: _ZN3c10"

    def new_environment(self) -> None:
        self.installed = b""

    @property
    def kept(self) -> list[Path]:
        return [path for path in self.cache.rglob("*") if path.is_file()]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(install_horovod, "_pip", made.pip)
    monkeypatch.setattr(install_horovod, "_problem", made.problem)
    monkeypatch.setattr(install_horovod, "_build_settings", lambda gpu: {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


def test_the_wheel_is_kept_for_the_next_environment(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0 and "building Horovod" in capsys.readouterr().out
    assert [path.read_text() for path in machine.kept] == ["good"]
    machine.new_environment()
    assert main() == 0 and machine.built == 1 and machine.installed == b"good"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"installing Horovod from the kept wheel {machine.kept[0]} ..." and len(lines) == 2


@pytest.mark.parametrize("content", ["cut", "of another torch"])
def test_a_kept_wheel_that_does_not_work_is_built_again(
    machine: Machine, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether pip refuses it or it does not import."""
    assert main() == 0
    machine.kept[0].write_text(content)
    machine.new_environment()
    assert main() == 0 and machine.built == 2
    assert "building Horovod" in capsys.readouterr().out
    assert [path.read_text() for path in machine.kept] == ["good"]


def test_a_wheel_that_never_worked_is_not_kept(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.builds = "bad"
    assert main() == 1 and machine.kept == []
    assert capsys.readouterr().err == (
        "Horovod was built but does not work (undefined symbol: _ZN3c10): correct that and run it again\n"
    )


def test_a_build_that_fails_leaves_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_horovod, "_pip", no_pip)
    assert main() == 1 and machine.kept == []


def test_wheels_are_kept_by_what_they_were_built_with(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def changed(what: str) -> int:
        """How often Horovod has been built, once there is a new environment."""
        machine.new_environment()
        assert main() == 0, what
        return machine.built

    assert changed("nothing") == 1 and changed("nothing") == 1
    monkeypatch.setattr(torch, "__version__", "3.0")
    assert changed("torch") == 2
    monkeypatch.setattr(sys, "version", "3.99")
    assert changed("python") == 3
    monkeypatch.setattr(install_horovod, "STANDARD", "set(x)")
    assert changed("patch") == 4 and changed("nothing") == 4
    assert len(machine.kept) == 4
