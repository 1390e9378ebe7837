"""Disks that are full, from the start, from the n-th byte on or for a while: the run ends in one line, and resumes."""

import errno
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.attacks.case import Case, Ended, Outcome, resumed
from benchmarks.attacks.conditions import IS_ROOT, fill, full_after
from benchmarks.attacks.ground import Ground
from benchmarks.attacks.stopped import copied, is_same, slow_steps, wait_for_step

KB = 1024
ERRORS = {"full": errno.ENOSPC, "quota": errno.EDQUOT, "broken": errno.EIO, "read-only": errno.EROFS}
SIZES = (0, 500, 3000, 9000, 40_000, 150_000, 400_000)  # bytes that are written before the disk is full
STATUSES = (2, 74)


class Failing(NamedTuple):
    """A disk that takes no more than so many bytes."""

    size: int
    number: int  # of the error
    under: str

    def set_up(self) -> None:
        full_after(self.size, self.number, self.under)


def failing(ground: Ground, state: str, place: str, size: int, kind: str) -> Outcome:
    """The place takes no more from the n-th byte on, then it does."""
    prepared = copied(ground, state)
    words = list(prepared.arguments)
    if place == "cache":
        words.append(f"data.cache={ground.folder / 'cache of its own'}")
    change = Failing(size, ERRORS[kind], str(ground.folder / place)).set_up
    ended = ground.distill(*words, change=change)
    return resumed(ended, lambda: ground.distill(*words), STATUSES, is_same(ground, prepared.student))


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes; needs root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


def small(ground: Ground, state: str, size: int, place: str) -> Outcome:
    """The disk of the run or of its cache is small; then it is larger."""
    prepared = copied(ground, state)
    with mounted(ground.folder / "disk", 4 * KB * KB) as folder:
        words = list(on(prepared.arguments, ground, folder, place))
        subprocess.run(["mount", "-o", f"remount,size={max(size + used(folder), 4096)}", folder], check=True)
        ended = ground.distill(*words)
        subprocess.run(["mount", "-o", f"remount,size={8 * KB * KB}", folder], check=True)
        same = is_same(ground, prepared.student)
        return resumed(ended, lambda: run_from(ground, folder, place, words), STATUSES, same)


def used(folder: Path) -> int:
    """Bytes of a disk that are taken, in whole pages."""
    state = os.statvfs(folder)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def on(arguments: list[str], ground: Ground, folder: Path, place: str) -> Iterator[str]:
    """The arguments of the run with the run, or a new cache, on the disk."""
    yield from arguments
    if place == "run":
        if ground.run.exists():
            shutil.copytree(ground.run, folder / "run")
        yield f"hydra.run.dir={folder / 'run'}"
    else:
        yield f"data.cache={folder / 'cache'}"


def run_from(ground: Ground, folder: Path, place: str, words: list[str]) -> Ended:
    """Run the command, and copy what it made to where it is compared."""
    ended = ground.distill(*words)
    if place == "run":
        shutil.rmtree(ground.run, ignore_errors=True)
        shutil.copytree(folder / "run", ground.run)
    return ended


def filled(ground: Ground, state: str, seed: int) -> Outcome:
    """Under training something else fills the disk, at a moment that is drawn."""
    prepared, draw = copied(ground, state), random.Random(seed)
    with mounted(ground.folder / "disk", 2 * KB * KB) as folder:
        words = list(on(prepared.arguments, ground, folder, "run"))
        process = ground.start(*words, change=partial(slow_steps, 0.1))
        wait_for_step(process, folder / "run", draw.randint(1, 11))
        time.sleep(draw.uniform(0, 0.15))
        fill(folder)
        ended = ground.end(process)
        (folder / "ballast").unlink()
        if ended.status == 0:
            run_from(ground, folder, "run", words)
        same = is_same(ground, prepared.student)
        return resumed(ended, lambda: run_from(ground, folder, "run", words), STATUSES, same)


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    for kind in ERRORS:
        for size in SIZES if kind == "full" else draw.sample(SIZES, 5):
            place = draw.choice(("run", "run", "cache"))
            state = draw.choice(("new", "stopped")) if place == "run" else "new"
            attack = partial(failing, state=state, place=place, size=size, kind=kind)
            attacks[f"{kind} after {size} bytes of the {place}, a {state} run"] = attack
    for size in (0, 8, 32, 100, 200, 300, 400, 600) if IS_ROOT else ():
        for state, place in (("new", "run"), ("stopped", "run"), ("new", "cache"))[:: draw.choice((1, 2))]:
            attack = partial(small, state=state, size=size * KB, place=place)
            attacks[f"{size} kB for the {place}, a {state} run"] = attack
    for number in range(16 if IS_ROOT else 0):
        state = draw.choice(("new", "stopped"))
        attacks[f"filled {number}, a {state} run"] = partial(filled, state=state, seed=draw.randrange(1 << 30))
    return [Case("disks", name, attack) for name, attack in attacks.items()]
