"""Links in run folders and caches, to everywhere, and files that are another user's: the same student, or a refusal."""

import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.attacks.case import Case, Kind, Outcome, problem_of
from benchmarks.attacks.conditions import IS_ROOT, plain_user
from benchmarks.attacks.ground import Ground, student_of
from benchmarks.attacks.stopped import Prepared, copied

OTHER = 12345  # the number of a user that nobody is
IN_RUN = (
    "", "checkpoints", "config.yaml", "metrics.jsonl", "history.jsonl", "student", "results.json", "report.html",
    "plots", "student/model.safetensors", ".lock", "checkpoints/NEWEST", "checkpoints/NEWEST/model.safetensors",
    "checkpoints/NEWEST/SHA256SUMS",
)  # fmt: skip
IN_CACHE = ("", "tokens", "tokens/PREPARED", "tokens/PREPARED/index.json", "tokens/PREPARED/SHARD")
PRECIOUS = "what somebody else keeps\n"


def moved(path: Path, aside: Path) -> Path:
    """Where the file or the folder is afterwards."""
    aside.mkdir()
    shutil.move(path, aside / "moved")
    return aside / "moved"


def linked_to(target: str) -> Callable[[Path, Path], None]:
    """In place of the path there is a link to the target."""

    def change(path: Path, aside: Path) -> None:
        shutil.move(path, aside)
        path.symlink_to(target.format(path.name))

    return change


def _relative(path: Path, aside: Path) -> None:
    path.symlink_to(os.path.relpath(moved(path, aside), path.parent))


def _absolute(path: Path, aside: Path) -> None:
    path.symlink_to(moved(path, aside))


def _chain(path: Path, aside: Path) -> None:
    target = moved(path, aside)
    for number in range(5):
        (aside / f"link{number}").symlink_to(target)
        target = aside / f"link{number}"
    path.symlink_to(target)


def _precious(path: Path, aside: Path) -> None:
    """To a folder, or a file, of somebody."""
    is_folder = path.is_dir()
    shutil.move(path, aside)
    other = aside.parent / "precious"
    if is_folder:
        other.mkdir()
    (other / "file" if is_folder else other).write_text(PRECIOUS)
    path.symlink_to(other)


def _hard(path: Path, aside: Path) -> None:
    """Every file has a second name, as after `cp -al`."""
    shutil.copytree(path, aside, copy_function=os.link) if path.is_dir() else os.link(path, aside)


def _mode(mode: int, owner: int = 0) -> Callable[[Path, Path], None]:
    def change(path: Path, aside: Path) -> None:
        for each in [*path.rglob("*"), path] if path.is_dir() else [path]:
            each.chmod(mode if mode != 0o555 or each.is_dir() else 0o444)
            if owner:
                os.chown(each, owner, owner)

    return change


def _pipe(path: Path, aside: Path) -> None:
    shutil.move(path, aside)
    os.mkfifo(path)


def _other_kind(path: Path, aside: Path) -> None:
    is_folder = path.is_dir()
    shutil.move(path, aside)
    path.touch() if is_folder else path.mkdir()


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "moved, a link to it": _absolute,
    "moved, a relative link": _relative,
    "moved, a chain of links": _chain,
    "a link to nowhere": linked_to("/nowhere/at/all"),
    "a link to itself": linked_to("{}"),
    "a link to its parent": linked_to(".."),
    "a link to /proc/self": linked_to("/proc/self"),
    "a link to /proc/self/mem": linked_to("/proc/self/mem"),
    "a link to /dev/zero": linked_to("/dev/zero"),
    "a link to /dev/full": linked_to("/dev/full"),
    "a link to somebody's": _precious,
    "hard links": _hard,
    "a FIFO": _pipe,
    "of another kind": _other_kind,
    "read-only": _mode(0o555),
    "unreadable": _mode(0),
} | ({"another user's": _mode(0o700, OTHER), "another user's, readable": _mode(0o755, OTHER)} if IS_ROOT else {})


def path_of(ground: Ground, place: str, name: str) -> Path:
    """Of a file in the copy of the run or of its cache."""
    folder = ground.run if place == "run" else ground.folder / "cache"
    parts: list[str] = []
    for part in Path(name).parts:
        if part in ("NEWEST", "PREPARED"):
            inside = sorted(path.name for path in folder.joinpath(*parts).iterdir() if path.is_dir())
            part = inside[-1 if part == "NEWEST" else 0]
        if part == "SHARD":
            part = min(path.name for path in folder.joinpath(*parts).glob("train-*.bin"))
        parts.append(part)
    return folder.joinpath(*parts)


def changed(ground: Ground, state: str, place: str, name: str, way: str) -> Outcome:
    """The command on a run or a cache in which one file or folder is something else."""
    prepared = copied(ground, state)
    path = path_of(ground, place, name)
    if not path.exists():
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    WAYS[way](path, ground.folder / "aside")
    try:
        return assessed(ground, prepared)
    finally:
        for folder, folders, _ in os.walk(ground.folder):
            for each in folders:
                if not Path(folder, each).is_symlink():
                    Path(folder, each).chmod(0o755)


def assessed(ground: Ground, prepared: Prepared) -> Outcome:
    """The same student, or a refusal that names a place in the case's folder; what is somebody's is as it was."""
    before = contents(ground.folder / "aside") if not (ground.folder / "aside" / "moved").exists() else {}
    ended = ground.distill(*prepared.arguments, change=plain_user)
    if problem := problem_of(ended, (0, 2, 74)):
        return problem
    precious = ground.folder / "precious"
    kept = precious / "file" if precious.is_dir() else precious
    if precious.exists() and kept.read_text() != PRECIOUS:
        return Outcome(Kind.SILENT, f"somebody's file was written over: {ended.errors[-1000:]}")
    if contents(ground.folder / "aside") != before and before:
        return Outcome(Kind.SILENT, f"files outside of the run were changed: {ended.errors[-1000:]}")
    if ended.status:
        is_named = str(ground.folder) in ended.refusal or "hydra.run.dir" in ended.refusal
        return Outcome(Kind.REFUSED if is_named else Kind.WRONG_STATUS, ended.refusal)
    if student_of(ground.run) != prepared.student:
        return Outcome(Kind.SILENT, f"status 0 with another student: {ended.errors[-2000:]}")
    return Outcome(Kind.FINISHED)


def contents(folder: Path) -> dict[str, bytes]:
    """The files that were put aside; logs grow, and are left out."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith((".jsonl", ".lock"))]
    return {str(path): path.read_bytes() for path in paths}


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject: each place is hit in some ways, and each way is used."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    places = [("run", name) for name in IN_RUN] + [("cache", name) for name in IN_CACHE]
    for place, name in places:
        for way in draw.sample([*WAYS], 4):
            state = draw.choice(("stopped", "finished")) if place == "run" else draw.choice(("new", "stopped"))
            attack = partial(changed, state=state, place=place, name=name, way=way)
            attacks[f"{place} {name or 'itself'}, {way}, a {state} run"] = attack
    return [Case("links", name, attack) for name, attack in attacks.items()]
