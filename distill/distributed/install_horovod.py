"""Build Horovod from PyPI's source for the torch installed here: `python -m distill.distributed.install_horovod`.

Horovod 0.28.1 sets C++14 or C++17, which the headers of torch >= 2.13 (C++20) refuse. Its sources stay as they are:
CMake learns through a toolchain file that all three mean C++20. Where there is a GPU it gets NCCL;
HOROVOD_BUILD_CUDA_CC_LIST=80,90 builds for these GPUs where there is none, as in a container image. The wheel is kept
in `$XDG_CACHE_HOME/distill/horovod` (else `~/.cache`), and taken from there the next time.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

COMMAND = "python -m distill.distributed.install_horovod"
VERSION = "0.28.1"
NEEDED = ["setuptools", "wheel", "packaging", "psutil", "pyyaml", "cloudpickle", "cmake>=3.15"]
CAPABILITIES = "HOROVOD_BUILD_CUDA_CC_LIST"
# CMake sets these variables itself after it has read the file, so each project reads it once more.
TOOLCHAIN = """\
set(CMAKE_PROJECT_INCLUDE "${CMAKE_CURRENT_LIST_FILE}")
set(CMAKE_POLICY_VERSION_MINIMUM 3.5)
foreach(version 11 14 17)
  set(CMAKE_CXX${version}_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CXX${version}_EXTENSION_COMPILE_OPTION "-std=gnu++20")
  set(CMAKE_CUDA${version}_STANDARD_COMPILE_OPTION "-std=c++17")
  set(CMAKE_CUDA${version}_EXTENSION_COMPILE_OPTION "-std=c++17")
endforeach()
"""
CHECK = "import horovod.torch as hvd, torch; hvd.init(); print('nccl' if hvd.nccl_built() else 'cpu'); "
CHECK += "assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == 1"


class CannotBuild(SystemExit):
    """Something that the build needs is not here: one line, with which the command ends, and status 1."""


def main() -> None:
    """Install Horovod unless a working one is here."""
    gpu = torch.cuda.is_available() or bool(os.environ.get(CAPABILITIES))
    if _problem(gpu) is not None:
        _pip("install", *NEEDED)
        folder = _cache_folder(gpu)
        for kept in folder.glob("*.whl"):
            print(f"installing Horovod from the kept wheel {kept} ...", flush=True)
            with suppress(CannotBuild):
                _install(kept, gpu)
                break
        else:
            _install(_build(folder, gpu), gpu)
    print(f"Horovod is here, for torch {torch.__version__}, {'NCCL and Gloo' if gpu else 'Gloo'}.")


def _install(wheel: Path, gpu: bool) -> None:
    """Raises CannotBuild where Horovod does not work after this wheel is installed, which is then removed."""
    try:
        _pip("install", "--force-reinstall", "--no-deps", str(wheel))
        if (problem := _problem(gpu)) is not None:
            raise CannotBuild(f"Horovod was built but does not work ({problem}): correct that and run it again")
    except CannotBuild:
        wheel.unlink(missing_ok=True)
        raise


def _problem(gpu: bool) -> str | None:
    """Why Horovod does not import and sum here, or lacks NCCL with a GPU; None when it does all of it."""
    # Gloo alone suffices for one process; without this an MPI build would look for its launcher.
    environment = {**os.environ, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    process = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, env=environment)
    if process.returncode:
        return process.stderr.strip().rpartition("\n")[2] or f"status {process.returncode}"
    return None if not gpu or "nccl" in process.stdout else "it has no NCCL"


def _cache_folder(gpu: bool) -> Path:
    """Where the wheel is kept for this Python and torch, and for how Horovod is built here."""
    torch_here = torch.__version__, torch.version.git_version, gpu, os.environ.get(CAPABILITIES)
    what = repr((VERSION, TOOLCHAIN, sys.version, sysconfig.get_platform(), _has_mpi(), torch_here))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "distill" / "horovod"
    return cache / hashlib.sha256(what.encode()).hexdigest()[:16]


def _build(folder: Path, gpu: bool) -> Path:
    """Build the wheel (about 3 minutes on two cores) and keep it in that folder. Raises CannotBuild."""
    compiler = os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))
    if not (compiler and shutil.which("make") and Path(sysconfig.get_paths()["include"], "Python.h").exists()):
        need = "Horovod needs make, the headers of Python and a C++20 compiler"
        raise CannotBuild(f"{need}: on Debian `apt-get install make python3-dev g++`, or set CXX to one")
    with tempfile.TemporaryDirectory() as scratch:
        (toolchain := Path(scratch, "toolchain.cmake")).write_text(TOOLCHAIN)
        chosen = ["WITH_PYTORCH", "WITH_GLOO", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET"]
        settings = {f"HOROVOD_{each}": "1" for each in [*chosen, "WITH_MPI" if _has_mpi() else "WITHOUT_MPI"]}
        settings["HOROVOD_CMAKE"] = shutil.which("cmake", path=sysconfig.get_paths()["scripts"]) or "cmake"
        settings["MAKEFLAGS"] = os.environ.get("MAKEFLAGS") or f"-j{len(os.sched_getaffinity(0))}"
        settings |= {"CMAKE_TOOLCHAIN_FILE": str(toolchain), **(_cuda_settings(Path(scratch)) if gpu else {})}
        print(f"building Horovod {VERSION} (minutes, not hours) ...", flush=True)
        # pip's own cache of wheels ignores the torch that a wheel was built against.
        options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-binary", "horovod"]
        _pip("wheel", *options, "--wheel-dir", str(folder), f"horovod=={VERSION}", environment=settings)
    return next(folder.glob("*.whl"))


def _cuda_settings(scratch: Path) -> dict[str, str]:
    """Where the CUDA toolkit and NCCL are, and for which GPUs to build. Raises CannotBuild without a toolkit."""
    from torch.utils.cpp_extension import CUDA_HOME as home

    if home is None or not all(Path(home, file).exists() for file in ("bin/nvcc", "include/cuda_runtime.h")):
        need = f"for GPUs Horovod needs the CUDA toolkit (nvcc; torch has version {torch.version.cuda})"
        raise CannotBuild(f"{need}: install it or set CUDA_HOME; CUDA_VISIBLE_DEVICES= builds without")
    here = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
    settings = {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        CAPABILITIES: os.environ.get(CAPABILITIES) or ",".join(f"{major}{minor}" for major, minor in here),
        # Horovod, torch and CMake each look somewhere else.
        **dict.fromkeys(("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDAToolkit_ROOT"), home),
        "PATH": f"{home}/bin{os.pathsep}{os.environ['PATH']}",
    }
    # The NCCL that torch loads, so that there are not two of them; the machine's own where torch brought none.
    for nccl in (Path(folder, "nvidia", "nccl") for folder in sys.path):
        if (library := nccl / "lib" / "libnccl.so.2").exists():
            (scratch / "libnccl.so").symlink_to(library)
            places = {"HOROVOD_NCCL_LIB": str(scratch), "HOROVOD_NCCL_INCLUDE": str(nccl / "include")}
            return settings | places | {"HOROVOD_NCCL_LINK": "SHARED"}
    return settings


def _has_mpi() -> bool:
    """Whether MPI programs compile here: Debian's openmpi-bin alone has the compiler without its headers."""
    if (mpicxx := shutil.which("mpicxx")) is None:
        return False
    probe = [mpicxx, "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(probe, input="#include <mpi.h>\n", text=True, stderr=subprocess.DEVNULL).returncode == 0


def _pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    """Run pip, which prints what fails. Raises CannotBuild then."""
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", *arguments[1:]]
    if subprocess.call(command, env={**os.environ, **(environment or {})}):
        raise CannotBuild(f"pip {arguments[0]} failed: its output above gives the reason")


if __name__ == "__main__":
    main()
