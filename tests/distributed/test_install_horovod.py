"""The set-up of Horovod: what is missing is said in one line; a second call is quick; a built wheel is kept."""

import sys
from pathlib import Path

import pytest
import torch
import torch.utils.cpp_extension

from distill.distributed import install_horovod
from distill.distributed.install_horovod import CannotBuild, main


class Machine:
    """A machine without Horovod, whose pip builds and installs a wheel of a few bytes, which works if it is `good`."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "distill" / "horovod"
        self.builds = "good"  # the bytes of what pip builds here; "": it fails
        self.built, self.installed = list[dict[str, str]](), b""

    def pip(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        if arguments[0] == "wheel":
            assert environment is not None and Path(environment["CMAKE_TOOLCHAIN_FILE"]).is_file()
            self.built.append(environment)
            if not self.builds:
                raise CannotBuild("pip wheel failed")
            folder = Path(arguments[arguments.index("--wheel-dir") + 1])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "horovod-0.28.1-linux.whl").write_text(self.builds)
        elif (wheel := Path(arguments[-1])).suffix == ".whl":
            self.installed = wheel.read_bytes()
            if self.installed == b"cut":
                raise CannotBuild("pip install failed")

    def problem(self, gpu: bool) -> str | None:
        return None if self.installed == b"good" else "undefined symbol: _ZN3c10"

    @property
    def kept(self) -> list[Path]:
        return [path for path in self.cache.rglob("*") if path.is_file()]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(install_horovod, "_pip", made.pip)
    monkeypatch.setattr(install_horovod, "_problem", made.problem)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "c++")
    monkeypatch.setenv("PATH", folder_with(tmp_path / "bin", make="exit 0"))
    return made


def folder_with(folder: Path, **programs: str) -> str:
    """A folder of little shell scripts, to be the whole search path."""
    folder.mkdir()
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("missing", ["CXX", "PATH"])
def test_the_command_names_what_is_missing(missing: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(missing, "")
    with pytest.raises(CannotBuild, match=r"apt-get install make python3-dev g\+\+"):
        main()
    assert not machine.kept


def test_mpi_is_used_where_it_has_headers(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Debian's openmpi-bin has an mpicxx that compiles nothing."""
    for name, body in {"none": "exit 1", "whole": "exit 0"}.items():
        machine.installed = b""
        monkeypatch.setenv("PATH", folder_with(tmp_path / name, make="exit 0", mpicxx=body))
        main()
    without, with_mpi = machine.built
    assert "HOROVOD_WITHOUT_MPI" in without and "HOROVOD_WITH_MPI" in with_mpi
    assert capsys.readouterr().out.count("building Horovod") == 2


def test_gpus_that_are_not_here_can_be_named(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "80,90")
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    with pytest.raises(CannotBuild, match="set CUDA_HOME"):
        main()
    for part in ("include/cuda_runtime.h", "bin/nvcc", "site/nvidia/nccl/lib/libnccl.so.2"):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).touch()
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    main()
    (settings,) = machine.built
    assert settings["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90" and settings["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert settings["HOROVOD_NCCL_INCLUDE"] == str(tmp_path / "site/nvidia/nccl/include")


@pytest.mark.parametrize("content", ["cut", "of another torch"])
def test_a_wheel_is_kept_while_it_works(content: str, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Else, whether pip refuses it or it does not import, it is built again."""
    main()
    machine.installed = b""
    main()
    assert len(machine.built) == 1 and machine.installed == b"good"
    assert f"from the kept wheel {machine.kept[0]}" in capsys.readouterr().out
    machine.kept[0].write_text(content)
    machine.installed = b""
    main()
    assert len(machine.built) == 2 and [path.read_text() for path in machine.kept] == ["good"]


@pytest.mark.parametrize(("builds", "line"), [("", "pip wheel failed"), ("bad", "undefined symbol: _ZN3c10")])
def test_what_never_worked_is_not_kept(builds: str, line: str, machine: Machine) -> None:
    machine.builds = builds
    with pytest.raises(CannotBuild, match=line):
        main()
    assert machine.kept == []


def test_wheels_are_kept_by_what_they_were_built_with(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    main()
    changes = ((torch, "__version__", "3.0"), (sys, "version", "3.99"), (install_horovod, "TOOLCHAIN", "set(x)"))
    for number, (owner, name, value) in enumerate(changes, 2):
        monkeypatch.setattr(owner, name, value)
        machine.installed = b""
        main()
        assert len(machine.built) == len(machine.kept) == number
