"""How much memory this host, or the container that it is, has left."""

from collections.abc import Iterator, Sequence
from pathlib import Path

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of a control group: its limit, what of that is taken, and the parts of this that files on the disk can be read into
# again. The names of version 2, then of version 1, where they lie in a folder of their own.
GROUP_FILES = {
    "": ("memory.max", "memory.current", ("active_file", "inactive_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


def free_memory() -> int | None:
    """Bytes of memory that programs may still take; None where the system does not say."""
    free = [*_free_in_groups(GROUPS, OWN_GROUPS), *_numbers(Path("/proc/meminfo"), ("MemAvailable:",), 1024)]
    return min(free) if free else None


def _free_in_groups(root: Path, own: Path) -> Iterator[int]:
    """Of every control group with a limit that this process belongs to, such as that of its container."""
    for line in _lines(own):
        _, kinds, path = line.split(":", 2)
        if (files := GROUP_FILES.get(kinds)) is None:
            continue
        limit, taken, reclaimable = files
        # In a container the groups above its own one are not to be seen, and it may be the root of those that are.
        group = root / kinds / path.lstrip("/")
        for each in [group, *group.parents[: len(Path(path).parts) - 1]]:
            for most, now in zip(_lines(each / limit), _lines(each / taken), strict=False):
                if most != "max":
                    yield max(int(most) - int(now) + sum(_numbers(each / "memory.stat", reclaimable)), 0)


def _numbers(path: Path, names: Sequence[str], unit: int = 1) -> list[int]:
    """The numbers that stand behind these names in a file of lines such as `name 5`."""
    return [unit * int(line.split()[1]) for line in _lines(path) if line.split()[0] in names]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
