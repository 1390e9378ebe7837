"""What this host gives a run: memory, storage and threads; and where there is too little, the error in one line."""

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from distill.runtime.errors import SettingError, StorageFailed, first_line

GROUPS, GROUPS_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Parts of the messages of torch and of the system where an allocation has failed.
SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "Unable to allocate")
ONEDNN = "could not create a primitive"  # its message where there is no memory, and only seldom another one
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A file system's own, whatever else an error says: those of a file that is already open name none.
CERTAIN = {*FULL, errno.EIO, errno.EROFS, errno.ESTALE}
# Conditions of a file system. No program can mend them, and each goes away when somebody makes room or names a folder.
# But for those above, an error has to name a file: sockets and system calls know some of these numbers, too.
CONDITIONS = {
    *CERTAIN,
    errno.EACCES,
    errno.EPERM,
    errno.EEXIST,  # a file stands where a folder should be
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENODEV,
    errno.ENXIO,
}
IN_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers put the number into the text
IN_NUMPY = re.compile(r"\d+ requested and \d+ written")  # its writer gives no reason; a full disk is the usual one
RESERVE = 1 << 20  # bytes of a file system that are left for its own tables
# Rounds of a loop that a thread spins before it sleeps, by default for milliseconds. Where another program needs the
# core, the thread that is waited for then does not run, and two threads were up to thirteen times slower than one: a
# few microseconds are best. Where cores are idle, spinning costs nothing, and to wake a thread takes time: a step of
# SmolLM2 on two cores was 1.3 times as fast with the longer wait (docs/explanation/benchmarks/quality.md).
SPINS_BESIDE_OTHERS, SPINS_ON_IDLE_CORES = "1000", "10000"
SAMPLES, BETWEEN_SAMPLES = 4, 0.005  # seconds


def free_memory() -> int | None:
    """Bytes of memory that programs may still take; None where the system has no such number."""
    free = [*_free_in_groups(GROUPS, GROUPS_OF_PROCESS), *_numbers(Path("/proc/meminfo"), ("MemAvailable:",), 1024)]
    return min(free) if free else None


def _free_in_groups(root: Path, groups: Path) -> Iterator[int]:
    """Of every control group (version 2) with a limit that this process belongs to, such as that of its container."""
    for path in [line.removeprefix("0::") for line in _lines(groups) if line.startswith("0::")]:
        # In a container its own group may be the root of those that are visible.
        group = root / path.lstrip("/")
        for level in [group, *group.parents[: len(Path(path).parts) - 1]]:
            for limit, used in zip(_lines(level / "memory.max"), _lines(level / "memory.current"), strict=False):
                if limit != "max":  # files on the disk can be read again
                    files = sum(_numbers(level / "memory.stat", ("active_file", "inactive_file")))
                    yield max(int(limit) - int(used) + files, 0)


def _numbers(path: Path, names: Sequence[str], unit: int = 1) -> list[int]:
    """The numbers that are behind these names in a file of lines such as `name 5`."""
    return [unit * int(line.split()[1]) for line in _lines(path) if line.split()[0] in names]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed.

    Torch's own error for that is a RuntimeError, numpy's a MemoryError, that of a call to the system an OSError.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in (*SIGNS, ONEDNN))
    )


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
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        if isinstance(current, OSError) and current.errno in (errno.EMFILE, errno.ENFILE):
            return SettingError(
                "too many open files: raise the limit on them (`ulimit -n 1024`); the same command then resumes"
            )
        if isinstance(current, RuntimeError) and str(current) == "can't start new thread":
            return SettingError(
                "the system starts no further thread: raise the limits on memory and processes (`ulimit -v`, `ulimit "
                "-u`), or those of the container; the same command then resumes"
            )
        seen.append(current)
        current = current.__cause__ or current.__context__
    return None


def storage_failure(error: BaseException, folder: str = "") -> StorageFailed | None:
    """The error as one of storage, if that is what it is or what it comes from; else None.

    Args:
        folder: the path to name where the error has none.
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    deliberate = True  # whether each error was raised `from` the next one
    while current is not None and current not in seen:
        if isinstance(current, StorageFailed):
            return current
        # What happens to be raised while another error is dealt with may be a bug: a folder that exists is no cause of
        # a KeyError. A file system that fails is one of all that follows, such as torch's error in closing a file.
        if (number := _number(current)) in (CONDITIONS if deliberate else CERTAIN):
            return StorageFailed(_line(number, _path(current) or folder))
        seen.append(current)
        deliberate = deliberate and current.__cause__ is not None
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return None


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


def _number(error: BaseException) -> int | None:
    """The number of the condition that an error reports; None where it may not be one of files."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in CERTAIN or _path(error) else None
    if match := IN_RUST.search(str(error)):
        return int(match[1])
    return errno.ENOSPC if isinstance(error, OSError) and IN_NUMPY.search(str(error)) else None


def _path(error: BaseException) -> str:
    name = getattr(error, "filename", None)
    return os.fsdecode(name) if isinstance(name, str | bytes) else ""


def _line(number: int, path: str) -> str:
    target = path or "a file of this run"
    free = _free(path)
    room = f", with {size(free)} free" if number in FULL and free is not None else ""
    cure = "make room" if number in FULL else "repair it"
    return f"{target}: {os.strerror(number)}{room}: {cure}, or choose another folder; the same command then resumes"


def _free(path: str) -> int | None:
    """Bytes that are free where the nearest folder above `path` lies; None where no folder can be asked."""
    for folder in Path(path).absolute().parents if path else []:
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None


def computed_seconds() -> float:
    """Seconds that this thread has computed, or would have on a core that was free; the latter is known on Linux."""
    try:
        without_core = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        without_core = 0.0
    return time.thread_time() + without_core


def limit_spinning() -> None:
    """Let waiting threads give way in time, unless the environment says how they wait; ranks inherit it."""
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        os.environ["GOMP_SPINCOUNT"] = SPINS_ON_IDLE_CORES if _cores_are_idle() else SPINS_BESIDE_OTHERS


def _cores_are_idle() -> bool:
    """Whether torch's threads and all other threads that run now have a core each; False where nothing tells it."""
    cores = os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    wanted = int(threads) if threads.isdecimal() else cores
    try:
        return _others_running() + wanted <= cores
    except (OSError, ValueError, IndexError):
        return False


def _others_running() -> int:
    """Threads of this machine that run or wait for a core, without this one: the least of a few samples.

    Raises:
        OSError, ValueError, IndexError: the system has no /proc/loadavg, or one of another form.
    """
    samples = []
    for _ in range(SAMPLES):
        running, _, _ = Path("/proc/loadavg").read_text().split()[3].partition("/")
        samples.append(int(running) - 1)
        time.sleep(BETWEEN_SAMPLES)
    return min(samples)


def keep_compiled_kernels() -> None:
    """Let the kernels that torch.compile makes outlive /tmp, which batch systems and containers empty.

    They are beside Distill's other caches unless the user has chosen a folder, or has no home that can be written.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    folder = Path("~/.cache/distill/kernels").expanduser()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def quiet_libraries() -> None:
    """Leave out the warnings of torch's C++ parts: a connection that breaks is reported in one line, without frames."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
