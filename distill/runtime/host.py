"""What this host gives a run: memory, storage and threads; and where there is too little, the error in one line."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from distill.runtime.errors import SettingError, StorageFailed, first_line

GROUPS, GROUPS_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Parts of the messages of torch, of the system and of oneDNN where an allocation has failed.
SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "Unable to allocate", "create a primitive")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# A file system's own, whatever else an error says: those of a file that is already open name none.
CERTAIN = FULL | {errno.EIO, errno.EROFS, errno.ESTALE}
# Where an error names a file: sockets and system calls know these numbers, too. No program can mend such a condition.
OF_FILES = {errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
OF_FILES |= {errno.ENODEV, errno.ENXIO}
IN_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers put the number into the text
IN_NUMPY = re.compile(r"\d+ requested and \d+ written")  # its writer gives no reason; a full disk is the usual one
RESERVE = 1 << 20  # bytes of a file system that are left for its own tables
# Rounds of a loop that a thread spins before it sleeps, by default for milliseconds. Where another program needs the
# core, the thread that is waited for then does not run, and two threads were up to thirteen times slower than one: a
# few microseconds are best. Where cores are idle, spinning costs nothing, and to wake a thread takes time: a step of
# SmolLM2 on two cores was 1.3 times as fast with the longer wait (docs/explanation/benchmarks.md#the-step).
SPINS_BESIDE_OTHERS, SPINS_ON_IDLE_CORES = "1000", "10000"
OBSERVED = 0.05  # seconds in which other programs are looked at


def free_memory() -> int:
    """Bytes of memory that programs may still take, by the system and by the limits of control groups."""
    import psutil

    return min([psutil.virtual_memory().available, *_free_in_groups()])


def _free_in_groups() -> Iterator[int]:
    """Of every control group (version 2) with a limit that this process belongs to, such as that of its container."""
    lines = GROUPS_OF_PROCESS.read_text().splitlines() if GROUPS_OF_PROCESS.exists() else []
    for name in [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]:
        # In a container its own group may be the root of those that are visible.
        for folder in [GROUPS / name, *(GROUPS / above for above in Path(name).parents)]:
            with suppress(OSError, ValueError):  # no such group, no such limit, or "max"
                left = int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
                parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                files = int(parts["active_file"]) + int(parts["inactive_file"])  # can be read again
                yield max(left + files, 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed: a RuntimeError of torch, a MemoryError of numpy, an OSError of the system."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    failed = isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    return failed or isinstance(error, MemoryError)


def memory_failure(error: BaseException) -> SettingError | None:
    """A failed allocation as a SettingError that names the settings to lower; None for any other error."""
    if not is_out_of_memory(error):
        return None
    return SettingError(
        f"not enough memory ({first_line(error)[:200]}): for training, lower train.batch_size and set "
        "train.sequences_per_step to the sequences that a step has now, or set student.gradient_checkpointing=true; "
        "for evaluation, lower evaluate.batch_size and evaluate.pseudo_perplexity.batch_size; or choose a smaller "
        "model. The same command then resumes"
    )


def limit_failure(error: BaseException) -> SettingError | None:
    """An error of the limits on open files or on threads as a SettingError that names the limit; None for any other."""
    for current, _ in _behind(error):
        if isinstance(current, OSError) and current.errno in (errno.EMFILE, errno.ENFILE):
            return SettingError("too many open files: raise the limit (`ulimit -n`); the same command then resumes")
        if isinstance(current, RuntimeError) and str(current) == "can't start new thread":
            return SettingError(
                "the system starts no further thread: raise the limits on memory and processes (`ulimit -v`, `ulimit "
                "-u`), or those of the container; the same command then resumes"
            )
    return None


def failure_of(error: BaseException, folder: str = "") -> StorageFailed | SettingError | None:
    """The error as a failure of storage, of a limit or of memory; None for any other. See `storage_failure`."""
    return storage_failure(error, folder) or limit_failure(error) or memory_failure(error)


def storage_failure(error: BaseException, folder: str = "") -> StorageFailed | None:
    """The error as one of storage, if that is what it is or comes from; `folder` is named where it names no path."""
    for current, deliberate in _behind(error):
        if isinstance(current, StorageFailed):
            return current
        # What happens to be raised while another error is dealt with may be a bug: a folder that exists is no cause of
        # a KeyError. A file system that fails is one of all that follows, such as torch's error in closing a file.
        if (number := _number(current)) in (CERTAIN | OF_FILES if deliberate else CERTAIN):
            path = _path(current) or folder or "a file of this run"
            cure = "make room" if number in FULL else "repair it"
            return StorageFailed(
                f"{path}: {os.strerror(number)}: {cure}, or choose another folder; the same command then resumes"
            )
    return None


def _behind(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """An error and those that it comes from, each with whether all before it were raised `from` the next one."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    deliberate = True
    while current is not None and current not in seen:
        yield current, deliberate
        seen.append(current)
        deliberate = deliberate and current.__cause__ is not None
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _number(error: BaseException) -> int:
    """The number of the condition that an error reports; 0 where it reports none."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in CERTAIN or _path(error) else 0
    if match := IN_RUST.search(str(error)):
        return int(match[1])
    return errno.ENOSPC if isinstance(error, OSError) and IN_NUMPY.search(str(error)) else 0


def _path(error: BaseException) -> str:
    name = getattr(error, "filename", None)
    return os.fsdecode(name) if isinstance(name, str | bytes) else ""


def require_room(folder: Path, num_bytes: int, what: str) -> None:
    """Raises StorageFailed where the file system of `folder` has no room for so many bytes, before any is written."""
    free = shutil.disk_usage(folder).free
    if num_bytes + RESERVE > free:
        raise StorageFailed(
            f"{folder}: {what} needs {size(num_bytes)} and {size(free)} are free: make room, or choose another folder; "
            "the same command then resumes"
        )


def size(num_bytes: float) -> str:
    """A number of bytes with its unit, such as 1.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def limit_spinning() -> None:
    """Let waiting threads give way in time, unless the environment says how they wait; ranks inherit it."""
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    import psutil

    cores, threads = os.cpu_count() or 1, os.environ.get("OMP_NUM_THREADS", "")
    wanted = int(threads) if threads.isdecimal() else cores
    others = round(cores * psutil.cpu_percent(OBSERVED) / 100)  # cores that are busy while this process waits
    os.environ["GOMP_SPINCOUNT"] = SPINS_ON_IDLE_CORES if wanted + others <= cores else SPINS_BESIDE_OTHERS


def keep_compiled_kernels() -> None:
    """Let the kernels that torch.compile makes outlive /tmp, where the user has a home and has chosen no folder."""
    folder = Path("~/.cache/distill/kernels").expanduser()
    with suppress(OSError):
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def quiet_libraries() -> None:
    """Leave out the warnings of torch's C++ parts: a connection that breaks is reported in one line, without frames."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
