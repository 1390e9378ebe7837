"""Limits of the process and of what is around it: commands finish, or end in one line and finish without the limit."""

import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.attacks.case import Case, Ended, Kind, Outcome, finished, problem_of
from benchmarks.attacks.conditions import (
    IS_ROOT,
    all_of,
    block,
    disk,
    ignore,
    into,
    limit,
    more_memory,
    no_network,
    plain_user,
    read_only,
    without_reader,
)
from benchmarks.attacks.ground import Ground, student_of
from benchmarks.attacks.ingredients import distilled, undisturbed

MB = 1 << 20
FOLDERS = ("missing", "readonly", "file", "/proc", "/dev/null", "")  # for variables that name a folder
HOMES = ("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCH_HOME")
COMMANDS = ("train", "train on prepared sequences", "prepare", "evaluate", "predict", "report", "compare")


@dataclass(frozen=True)
class Condition:
    """Under which a command runs."""

    change: Callable[[], Any] | None = None
    variables: tuple[tuple[str, str], ...] = ()  # `{}` stands for the folder of the case
    statuses: tuple[int, ...] = (2, 74)  # that it may end with, besides 0
    settings: tuple[str, ...] = ()
    is_mute: bool = False  # what it writes goes nowhere


def set_to(**variables: str) -> Condition:
    return Condition(plain_user, tuple(variables.items()))


def memory() -> dict[str, Condition]:
    sizes = {f"ulimit -v, {size} MB more": Condition(partial(more_memory, size * MB)) for size in (0, 8, 60, 200, 2000)}
    kinds = {"-l": resource.RLIMIT_MEMLOCK, "-c": resource.RLIMIT_CORE, "-q": resource.RLIMIT_MSGQUEUE}
    none = {f"ulimit {name} 0": Condition(partial(limit, kind, 0)) for name, kind in kinds.items()}
    return sizes | none | {"ulimit -s 256": Condition(partial(limit, resource.RLIMIT_STACK, 256 << 10))}


def files() -> dict[str, Condition]:
    counts = (12, 16, 20, 24, 32, 48, 64, 256)
    opened = {f"ulimit -n {count}": Condition(partial(limit, resource.RLIMIT_NOFILE, count)) for count in counts}
    sizes = (0, 100, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
    return opened | {
        f"ulimit -f, {size} bytes": Condition(partial(limit, resource.RLIMIT_FSIZE, size)) for size in sizes
    }


def places() -> dict[str, Condition]:
    """Folders of variables that are not there, cannot be written, or are none."""
    made = {}
    for name in HOMES:
        for folder in FOLDERS:
            value = folder if folder.startswith("/") or not folder else "{}/" + folder
            made[f"{name}={folder}"] = set_to(**{name: value})
    return made


def mounts() -> dict[str, Condition]:
    """Of /dev/shm and /tmp, and a network that is away."""
    two = ("data.workers=2", "train.workers=2")
    return {
        "/dev/shm of 4 kB": Condition(partial(disk, "/dev/shm", 4096), settings=two),
        "/dev/shm is full": Condition(partial(disk, "/dev/shm", 8192, True), settings=two),
        "/dev/shm is read-only": Condition(partial(read_only, "/dev/shm"), settings=two),
        "/dev is empty": Condition(partial(disk, "/dev", 4096), settings=two),
        "no network": Condition(no_network, settings=two),
        "no network, the Hub is asked": Condition(no_network, (("HF_HUB_OFFLINE", "0"),)),
    }


def streams() -> dict[str, Condition]:
    return {
        "stdin is closed": Condition(partial(into, "/dev/null", 0)),
        "stdin is a folder": Condition(partial(into_folder, 0)),
        "stdout is full": Condition(partial(into, "/dev/full", 1), is_mute=True),
        "stderr is full": Condition(partial(into, "/dev/full", 2), is_mute=True),
        "both are full": Condition(
            partial(all_of, partial(into, "/dev/full", 1), partial(into, "/dev/full", 2)), is_mute=True
        ),
        "nobody reads stdout": Condition(partial(without_reader, 1), statuses=(141,), is_mute=True),
        "nobody reads stderr": Condition(partial(without_reader, 2), statuses=(141,), is_mute=True),
    }


def into_folder(number: int) -> None:
    """The stream is a folder."""
    os.dup2(os.open("/", os.O_RDONLY), number)


def process() -> dict[str, Condition]:
    """Signals, masks, the working directory, processors."""
    made = {
        f"{each.name} is ignored": Condition(partial(ignore, each))
        for each in (signal.SIGHUP, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGTERM)
    }
    made |= {
        f"{each.name} is blocked": Condition(partial(block, each))
        for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM)
    }
    made |= {
        f"umask {mask:04o}": Condition(partial(all_of, plain_user, partial(os.umask, mask)))
        for mask in (0o777, 0o277, 0o077, 0)
    }
    made["one processor"] = Condition(partial(os.sched_setaffinity, 0, [0]))
    made["the last priority"] = Condition(partial(os.nice, 19))
    return made


def variables() -> dict[str, Condition]:
    """Locales and other variables with odd values."""
    values = {
        "LC_ALL": ("C", "POSIX", "tr_TR.UTF-8", "nowhere"), "LANG": ("", "C"), "PYTHONIOENCODING": ("ascii", "latin-1"),
        "PYTHONUTF8": ("0",), "TERM": ("", "dumb"), "COLUMNS": ("0", "x", "100000000"), "TZ": ("nowhere", "UTC+99"),
        "PATH": ("",), "USER": ("",), "OMP_NUM_THREADS": ("0", "x", "100000", "1,1"), "MKL_NUM_THREADS": ("x",),
        "CUDA_VISIBLE_DEVICES": ("x", "9"), "RANK": ("3", "x"), "WORLD_SIZE": ("2", "0", "x"), "LOCAL_RANK": ("7",),
        "MASTER_PORT": ("x", "99999999"), "SLURM_PROCID": ("x",), "SLURM_NTASKS": ("4",), "HF_HUB_OFFLINE": ("x", "0"),
        "DISTILL_DATA": ("/nowhere", "/dev/null"), "PYTORCH_CUDA_ALLOC_CONF": ("x",), "NO_COLOR": ("1",),
        "TOKENIZERS_PARALLELISM": ("x",), "HYDRA_FULL_ERROR": ("1",), "SOURCE_DATE_EPOCH": ("x",),
        "TRANSFORMERS_VERBOSITY": ("x", "debug"), "TORCH_LOGS": ("x",), "MPLBACKEND": ("nowhere",),
    }  # fmt: skip
    return {f"{name}={value}": set_to(**{name: value}) for name, some in values.items() for value in some}


def arguments(ground: Ground, command: str, cache: Path, folder: Path) -> list[str]:
    """Of a command; all but the runs work on a copy of a finished one."""
    done = ground.folder / "done"
    return {
        "prepare": ["prepare", *distilled(ground, cache, folder)],
        "evaluate": ["evaluate", f"model={done}", f"output={ground.folder / 'scores'}"],
        "predict": ["predict", f"model={done}", "text=The [MASK] king.", f"output={ground.folder / 'predicted.jsonl'}"],
        "report": ["report", f"run={done}"],
        "compare": ["compare", f"run=[{done},{done}]", f"output={ground.folder / 'compared'}"],
    }.get(command, distilled(ground, cache, folder))


def finished_run(ground: Ground) -> Path:
    """A run that is finished, with its cache beside it."""
    _, cache = undisturbed(ground, "three steps", partial(distilled, ground))
    return cache.parent / "run"


def under(ground: Ground, command: str, condition: Condition) -> Outcome:
    """The command under the condition, and where it was not finished again without it."""
    run = finished_run(ground)
    student = student_of(run)
    (ground.folder / "readonly").mkdir(mode=0o555)
    (ground.folder / "file").touch()
    cache = ground.folder / "cache"
    if command == "train on prepared sequences":
        shutil.copytree(run.parent / "cache", cache)
    if not command.startswith(("train", "prepare")):
        shutil.copytree(run, ground.folder / "done")
    words = [*arguments(ground, command, cache, ground.run)]
    settings = condition.settings if command.startswith(("train", "prepare")) else ()
    values = {name: value.format(ground.folder) for name, value in condition.variables}
    ended = ground.distill(*words, *settings, change=condition.change, **values)
    return assessed(ground, condition, ended, words, student if command.startswith("train") else None)


def assessed(ground: Ground, condition: Condition, ended: Ended, words: list[str], student: str | None) -> Outcome:
    """What came of the command, and of the same one without the condition where it has not finished.

    Args:
        student: that the run has to have; None: it makes none.
    """
    is_same: Callable[[], bool] = lambda: student is None or student_of(ground.run) == student  # noqa: E731
    statuses = (0, *condition.statuses)
    if condition.is_mute and ended.status in statuses and "Traceback" not in ended.errors:
        ended = ended._replace(errors="distill: nobody reads this line" if ended.status else "")
    if (ended.status or 0) >= 0 and (problem := problem_of(ended, statuses)):
        return problem
    if ended.status not in statuses:
        return Outcome(Kind.WRONG_STATUS, f"status {ended.status}: {ended.errors[-3000:]}")
    if ended.status == 0:
        return finished(ended, is_same)
    again = finished(ground.distill(*words), is_same)
    return Outcome(Kind.RESUMED, ended.refusal) if again.kind is Kind.FINISHED else again


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject: each condition with a command that is drawn, limits with a run besides."""
    conditions = memory() | files() | streams() | process() | variables() | places() | (mounts() if IS_ROOT else {})
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    for name, condition in conditions.items():
        some = ["train", draw.choice(COMMANDS[1:])] if "ulimit" in name else [draw.choice(COMMANDS)]
        for command in some:
            attacks[f"{command}: {name}"] = partial(under, command=command, condition=condition)
    return [Case("limits", name, attack) for name, attack in attacks.items()]
