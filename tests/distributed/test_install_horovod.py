"""The set-up of Horovod: what is missing is said in one line; a second call is quick."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

from distill.distributed.install_horovod import CannotBuild, _build_settings, _cmake, _cuda_settings, _has_mpi


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


def refusal() -> str:
    with pytest.raises(CannotBuild) as caught:
        _build_settings(gpu=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", folder_with(tmp_path / "bin"))
    assert "C++ compiler" in refusal() and "apt-get install g++" in refusal()
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert "C++ compiler" in refusal()


def test_compiler_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", folder_with(tmp_path / "bin", g__="exit 1"))
    assert "C++20" in refusal()


@pytest.mark.skipif(
    Path(sysconfig.get_paths()["scripts"], "cmake").exists(), reason="pip has installed CMake beside this Python"
)
def test_missing_cmake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", folder_with(tmp_path / "bin"))
    with pytest.raises(CannotBuild, match=r"CMake >= 3\.15: pip install cmake"):
        _cmake()


def test_cmake_of_the_machine_is_taken_when_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder_with(tmp_path / "bin", cmake="echo cmake version 4.1.2-rc1")
    monkeypatch.setenv("PATH", path)
    assert _cmake() == f"{path}/cmake"


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    """The whole command, on a machine without compiler and with an empty cache."""
    if importlib.util.find_spec("horovod") is not None:
        pytest.skip("Horovod is installed: nothing is built")
    environment = {**os.environ, "PATH": folder_with(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path)}
    done = install({**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.returncode == 1 and "C++ compiler" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_a_second_call_is_quick() -> None:
    began = time.monotonic()
    done = install({**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.returncode == 0 and "Horovod is here" in done.stdout, done.stderr
    assert time.monotonic() - began < 60


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
