"""Build Horovod from PyPI's source for the torch installed here: `python -m distill.distributed.install_horovod`.

Horovod 0.28.1 sets C++14 or C++17, which the headers of torch >= 2.13 (C++20) refuse. Its sources stay
as they are: CMake learns through a toolchain file that all three mean C++20. Where there is a GPU it gets NCCL;
HOROVOD_BUILD_CUDA_CC_LIST=80,90 builds for these GPUs where there is none, as in a container image.

The wheel is kept in the user's cache folder, `$XDG_CACHE_HOME/distill/horovod`, and taken from there the next time.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

COMMAND = "python -m distill.distributed.install_horovod"
VERSION = "0.28.1"
NEEDED = ["setuptools", "wheel", "packaging", "psutil", "pyyaml", "cloudpickle", "cmake>=3.15"]
CAPABILITIES = "HOROVOD_BUILD_CUDA_CC_LIST"
TOOLCHAIN = """\
set(CMAKE_PROJECT_INCLUDE "{folder}/standard.cmake")
set(CMAKE_POLICY_VERSION_MINIMUM 3.5)
"""
STANDARD = """\
foreach(version 11 14 17)
  set(CMAKE_CXX${version}_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CXX${version}_EXTENSION_COMPILE_OPTION "-std=gnu++20")
  set(CMAKE_CUDA${version}_STANDARD_COMPILE_OPTION "-std=c++17")
  set(CMAKE_CUDA${version}_EXTENSION_COMPILE_OPTION "-std=c++17")
endforeach()
"""
CHECK = """\
import horovod.torch as hvd, torch
hvd.init(); assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == 1
print("nccl" if hvd.nccl_built() else "cpu")
"""


class CannotBuild(RuntimeError):
    """Something that the build needs is not here; the message is one line."""


def main() -> int:
    """Install Horovod unless a working one is here. Returns the exit status."""
    if importlib.util.find_spec("torch") is None:
        print("Horovod is built against torch, which is not installed: pip install torch", file=sys.stderr)
        return 1
    import torch

    gpu = torch.cuda.is_available() or bool(os.environ.get(CAPABILITIES))
    build = f"for torch {torch.__version__}, {'NCCL and Gloo' if gpu else 'Gloo'}"
    if _problem(gpu) is None:
        print(f"Horovod is here, {build}.")
        return 0
    folder = _cache_folder(gpu)
    try:
        _pip("install", *NEEDED)
        kept = next(folder.glob("*.whl"), None)
        if kept is not None:
            print(f"installing Horovod from the kept wheel {kept} ...", flush=True)
        if kept is None or _problem_of_wheel(kept, gpu) is not None:
            problem = _problem_of_wheel(_build(folder, gpu), gpu)
            if problem is not None:
                raise CannotBuild(f"Horovod was built but does not work ({problem}): correct that and run it again")
    except CannotBuild as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Horovod {VERSION} is installed, {build}.")
    return 0


def _problem_of_wheel(wheel: Path, gpu: bool) -> str | None:
    """Why Horovod does not work after this wheel is installed, which is then removed; None when it does."""
    try:
        _pip("install", "--force-reinstall", "--no-deps", str(wheel))
        problem = _problem(gpu)
    except CannotBuild as error:
        problem = str(error)
    if problem is not None:
        wheel.unlink(missing_ok=True)
    return problem


def _problem(gpu: bool) -> str | None:
    """Why Horovod does not import and sum here, or lacks NCCL with a GPU; None when it does all of it."""
    if importlib.util.find_spec("horovod") is None:
        return "it is not installed"
    # Gloo alone suffices for one process; without this an MPI build would look for its launcher.
    environment = {**os.environ, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    process = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, env=environment)
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"status {process.returncode}"
    return None if not gpu or "nccl" in process.stdout else "it has no NCCL"


def _cache_folder(gpu: bool) -> Path:
    """Where the wheel is kept for this Python and torch, and for how Horovod is built here."""
    import torch

    of_torch = f"{torch.__version__}{torch.version.git_version}"
    gpus = f"{gpu}{os.environ.get(CAPABILITIES, '')}"
    what = [VERSION, sys.version, platform.machine(), of_torch, gpus, _has_mpi(), TOOLCHAIN, STANDARD]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "distill" / "horovod"
    return cache / hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def _build(folder: Path, gpu: bool) -> Path:
    """Build the wheel (about 3 minutes on two cores) and keep it in that folder."""
    environment = {**os.environ, **_build_settings(gpu)}
    print(f"building Horovod {VERSION} (minutes, not hours) ...", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    # The wheel is built beside its place: who looks for one there meanwhile finds a whole one or none.
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir=folder) as wheels:
        toolchain = Path(scratch, "toolchain.cmake")
        toolchain.write_text(TOOLCHAIN.format(folder=scratch))
        Path(scratch, "standard.cmake").write_text(STANDARD)
        environment["CMAKE_TOOLCHAIN_FILE"] = str(toolchain)
        if gpu:
            environment |= _nccl_settings(Path(scratch))
        # pip's own cache of wheels ignores the torch that a wheel was built against.
        options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-binary", "horovod"]
        _pip("wheel", *options, "--wheel-dir", wheels, f"horovod=={VERSION}", environment=environment)
        built = next(Path(wheels).glob("*.whl"))
        return built.replace(folder / built.name)


def _build_settings(gpu: bool) -> dict[str, str]:
    """Environment of the build. Raises CannotBuild when a tool is missing."""
    if not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))):
        raise CannotBuild("Horovod needs a C++20 compiler: install g++ >= 10 (Debian: apt-get install g++) or set CXX")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise CannotBuild("Horovod needs the headers of Python (Debian: apt-get install python3-dev)")
    if shutil.which("make") is None:
        raise CannotBuild("Horovod needs make (Debian: apt-get install make)")
    settings = {
        "HOROVOD_CMAKE": shutil.which("cmake", path=sysconfig.get_paths()["scripts"]) or "cmake",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI" if _has_mpi() else "HOROVOD_WITHOUT_MPI": "1",
        "MAKEFLAGS": os.environ.get("MAKEFLAGS") or f"-j{len(os.sched_getaffinity(0))}",
    }
    return {**settings, **_cuda_settings()} if gpu else settings


def _cuda_settings() -> dict[str, str]:
    """Where the CUDA toolkit is, and for which GPUs to build."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    homes = [folder for folder in (CUDA_HOME, "/usr/local/cuda") if folder]
    home = next((folder for folder in homes if Path(folder, "include", "cuda_runtime.h").exists()), None)
    if home is None or not Path(home, "bin", "nvcc").exists():
        raise CannotBuild(
            f"for GPUs Horovod needs the CUDA toolkit (nvcc; torch has version {torch.version.cuda}): install it or "
            "set CUDA_HOME; CUDA_VISIBLE_DEVICES= builds without"
        )
    here = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        CAPABILITIES: os.environ.get(CAPABILITIES) or ",".join(f"{major}{minor}" for major, minor in sorted(here)),
        # Horovod, torch and CMake each look somewhere else.
        **dict.fromkeys(("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDAToolkit_ROOT"), home),
        "PATH": f"{home}/bin{os.pathsep}{os.environ['PATH']}",
    }


def _nccl_settings(scratch: Path) -> dict[str, str]:
    """The NCCL that torch loads, so that there are not two of them; the machine's own where torch brought none."""
    for library in (Path(folder, "nvidia", "nccl", "lib", "libnccl.so.2") for folder in sys.path):
        if library.exists():
            link = scratch / "nccl" / "libnccl.so"
            link.parent.mkdir()
            link.symlink_to(library)
            include = str(library.parent.parent / "include")
            place = {"HOROVOD_NCCL_LIB": str(link.parent), "HOROVOD_NCCL_INCLUDE": include}
            return {**place, "HOROVOD_NCCL_LINK": "SHARED"}
    return {}


def _has_mpi() -> bool:
    """Whether MPI programs compile here: Debian's openmpi-bin alone has the compiler without its headers."""
    if shutil.which("mpicxx") is None:
        return False
    probe = ["mpicxx", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(probe, input="#include <mpi.h>\n", capture_output=True, text=True).returncode == 0


def _pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    """Run pip quietly. Raises CannotBuild with the path of its output when it fails."""
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if process.returncode != 0:
        with tempfile.NamedTemporaryFile("w", prefix="distill-horovod-", suffix=".log", delete=False) as log:
            log.write(process.stdout)
        raise CannotBuild(f"pip {arguments[0]} failed; its output is in {log.name}")


if __name__ == "__main__":
    sys.exit(main())
