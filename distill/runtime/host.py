"""How much memory this host or container has left, and the errors where its limits are too low."""

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from distill.runtime.errors import SettingError, first_line

GROUPS, GROUPS_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of a control group: its limit, what of that is taken, and the parts of this that files on the disk can be read into
# again. The names of version 2, then of version 1, where they are in a folder of their own.
GROUP_FILES = {
    "": ("memory.max", "memory.current", ("active_file", "inactive_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}
# Parts of the messages of torch and of the system where an allocation has failed.
SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "Unable to allocate")
ONEDNN = "could not create a primitive"  # its message where there is no memory, and only seldom another one


def free_memory() -> int | None:
    """Bytes of memory that programs may still take; None where the system has no such number."""
    free = [*_free_in_groups(GROUPS, GROUPS_OF_PROCESS), *_numbers(Path("/proc/meminfo"), ("MemAvailable:",), 1024)]
    return min(free) if free else None


def _free_in_groups(root: Path, groups: Path) -> Iterator[int]:
    """Of every control group with a limit that this process belongs to, such as that of its container."""
    for line in _lines(groups):
        _, kinds, path = line.split(":", 2)
        if (files := GROUP_FILES.get(kinds)) is None:
            continue
        limit, taken, reclaimable = files
        # In a container its own group may be the root of those that are visible.
        group = root / kinds / path.lstrip("/")
        for level in [group, *group.parents[: len(Path(path).parts) - 1]]:
            for limited, used in zip(_lines(level / limit), _lines(level / taken), strict=False):
                if limited != "max":
                    yield max(int(limited) - int(used) + sum(_numbers(level / "memory.stat", reclaimable)), 0)


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
