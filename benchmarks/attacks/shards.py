"""Prepared sequences that are damaged in every way: refused by name."""

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.attacks.case import Case, Outcome, either, finished
from benchmarks.attacks.ground import Ground, student_of
from benchmarks.attacks.ingredients import DAMAGES, damage, distilled
from benchmarks.attacks.prepare import many_units
from benchmarks.attacks.stopped import is_same

NAMES = r"data\.(tokens|cache)=.*(is damaged|restore that file)|\.bin (is|cannot)"
FILES = ["index.json", "train-00000.bin", "heldout-00000.bin"]


class Place(NamedTuple):
    """Where the sequences of the run lie."""

    name: str
    settings: tuple[str, ...] = ()  # `{}` stands for the folder


LOCAL = ("data.tokens={}/shared", "data.local={}/local", "data.local_bytes=200000", "data.shuffle_bytes=20000")
PLACES = (
    Place("cache"),
    Place("tokens", ("data.tokens={}/shared",)),
    Place("local", LOCAL),
)


def command(ground: Ground, place: Place, stored: Path, folder: Path, *more: str) -> list[str]:
    settings = [each.format(stored) for each in place.settings]
    return distilled(ground, stored, folder, "data.shard_bytes=20000", *settings, *more)


def stored_by(ground: Ground, place: Place, *more: str) -> tuple[str, Path]:
    """The student of a run on sound sequences, and the folder of these, of which cases take copies."""

    def make(folder: Path) -> tuple[str, Path]:
        arguments = command(ground, place, folder / "stored", folder / "run", *more)
        ended = ground.distill(*arguments, change=many_units)
        assert ended.status == 0, ended.errors
        return student_of(folder / "run"), folder / "stored"

    return ground.shared.get(f"shards {place.name} {len(more)}", make)


def folder_in(place: Place, stored: Path) -> Path:
    """Where the files of the sequences lie."""
    inside = {"cache": "tokens"}.get(place.name, "shared")
    (index,) = stored.glob(f"{inside}/*/index.json")
    return index.parent


def at_rest(ground: Ground, place: Place, file: str, kind: str, seed: int) -> Outcome:
    """A file is damaged: it is refused by name. Where its content had been fetched before, the student is the same."""
    student, sound = stored_by(ground, place)
    stored = Path(shutil.copytree(sound, ground.folder / "stored"))
    folder = folder_in(place, stored)
    (path,) = folder.glob(file.replace("-00000.", "-00000*."))  # its name has the number of its units
    hit(path, folder, kind, random.Random(seed))
    arguments = command(ground, place, stored, ground.run)
    ended = ground.distill(*arguments, change=many_units)
    if (file, kind) == ("index.json", "gone"):  # without it, they were never finished
        return finished(ended, is_same(ground, student))
    return either(ended, NAMES, None, is_same(ground, student), (2, 74))


def hit(path: Path, folder: Path, kind: str, draw: random.Random) -> None:
    """Damage of the content as in `DAMAGES`, or of the entry in the folder."""
    match kind:
        case "of the other part":
            part, other = ("train", "heldout") if path.name.startswith("train") else ("heldout", "train")
            shutil.copyfile(folder / path.name.replace(part, other), path)
        case "a folder":
            path.unlink()
            path.mkdir()
        case "a link to nowhere":
            path.unlink()
            path.symlink_to("nowhere")
        case "a link to itself":
            path.unlink()
            path.symlink_to(path.name)
        case "unreadable":
            path.chmod(0)
        case _:
            damage(path, kind, draw)


def several(ground: Ground, place: Place, count: int, seed: int) -> Outcome:
    """Several files are damaged at once, those of the cache among them."""
    draw, (student, sound) = random.Random(seed), stored_by(ground, place)
    stored = Path(shutil.copytree(sound, ground.folder / "stored"))
    paths = [path for path in sorted(stored.rglob("*")) if path.is_file() and path.name != ".lock"]
    for path in draw.sample(paths, min(count, len(paths))):
        damage(path, draw.choice([*DAMAGES]), draw)
    ended = ground.distill(*command(ground, place, stored, ground.run), change=many_units)
    return either(ended, NAMES, None, is_same(ground, student), (2, 74))


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    for place in PLACES:
        for file in FILES:
            kinds = ["of the other part"] * (file != "index.json") + [
                "a folder",
                "a link to nowhere",
                "a link to itself",
            ]
            content = [*DAMAGES] if file.endswith(".bin") else draw.sample([*DAMAGES], 3)
            for kind in [*content, *draw.sample(kinds, 1)]:
                attack = partial(at_rest, place=place, file=file, kind=kind, seed=draw.randrange(1 << 30))
                attacks[f"{place.name}: {file}: {kind}"] = attack
        for number in range(4):
            attack = partial(several, place=place, count=draw.randint(2, 9), seed=draw.randrange(1 << 30))
            attacks[f"{place.name}: several {number}"] = attack
    return [Case("shards", name, attack) for name, attack in attacks.items()]
