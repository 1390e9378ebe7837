"""Two preparations at once, of which some are killed at random moments: a third one gives the same tokens."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shards import read_rows, write_text

from benchmarks.attacks.case import Case, Ended, Kind, Outcome, finished, problem_of
from benchmarks.attacks.ground import Ground
from benchmarks.attacks.ingredients import SHORT, bert
from benchmarks.reliability.chaos import members, send
from distill.data.shards import PARTS

KINDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
STOPPED = 1.5  # seconds between SIGSTOP and SIGCONT


def many_units(slowly: bool = False) -> None:
    """In a preparation: every file is a unit of work; `slowly`: each unit takes a moment."""
    from distill.data import build_tokens
    from distill.data.sources import _files

    _files.SHARD_BYTES = 1
    build_tokens.POLL, build_tokens.FEW_BYTES = 0.1, 0
    if slowly:
        pack: Any = build_tokens.pack
        build_tokens.pack = lambda *work: (time.sleep(0.1), pack(*work))[1]


class Place(NamedTuple):
    """Where two hosts keep their sequences."""

    shared: bool  # they fill one folder `data.tokens` from caches of their own; else they share the cache
    workers: int = 1

    @property
    def name(self) -> str:
        where = "data.tokens" if self.shared else "a cache"
        return f"{where}, {self.workers} processes"


PLACES = (Place(False), Place(False, workers=2), Place(True), Place(True, workers=2))


def command(ground: Ground, place: Place, host: int) -> list[str]:
    text = ground.shared.get("text", write_text)
    cache = ground.folder / (f"cache{host}" if place.shared else "cache")
    settings = [f"data.tokens={ground.folder / 'tokens'}"] if place.shared else []
    return [
        "prepare", "+recipe=distilbert_gutenberg", "corpus=jsonl", f"corpus.path={text}", SHORT[0],
        "corpus.heldout=0.2",
        "evaluate.sets=[heldout]", f"data.cache={cache}", f"data.workers={place.workers}",
        "corpus.max_unknown=1", "data.shard_bytes=4000", "teacher=pretrained", f"teacher.path={bert(ground)}",
        *settings,
    ]  # fmt: skip


def rows_in(folder: Path) -> list[bytes]:
    """The sequences of each part."""
    (index,) = folder.glob("*/index.json")
    return [read_rows(index.parent, part).tobytes() for part in PARTS]


def undisturbed(ground: Ground) -> list[bytes]:
    """The sequences of one preparation that nothing happens to."""

    def make(folder: Path) -> list[bytes]:
        ended = ground.distill(*command(ground, PLACES[0], 0), f"data.cache={folder}")
        assert ended.status == 0, ended.errors
        return rows_in(folder / "tokens")

    return ground.shared.get("prepared", make)


def disturb(process: Any, number: int, draw: random.Random) -> None:
    """A signal to a process of the command, or to all of them."""
    alive = members(process.pid)
    chosen = alive if draw.random() < 0.3 else [process.pid]
    for pid in chosen:
        send(pid, signal.Signals(number))
    if number == signal.SIGSTOP:
        time.sleep(STOPPED)
        for pid in chosen:
            send(pid, signal.SIGCONT)


def two_at_once(ground: Ground, place: Place, numbers: tuple[int, ...], seed: int) -> Outcome:
    """Two preparations, signals to the first ones at moments that are drawn, and a third one."""
    draw, expected = random.Random(seed), undisturbed(ground)
    slow = partial(many_units, slowly=place.workers == 1)  # the other processes import what is packed with
    processes = []
    for host in range(2):
        processes.append(ground.start(*command(ground, place, host), change=slow))
        time.sleep(draw.uniform(0, 0.3))
    for process, number in zip(processes, numbers, strict=False):
        with suppress(Exception):
            process.wait(timeout=draw.uniform(0.1, 1.2))
        disturb(process, number, draw)
    statuses = set()
    for number, process in zip((*numbers, 0, 0), processes, strict=False):
        ended: Ended = ground.end(process)
        statuses.add(ended.status)
        allowed = {0} if number in (0, signal.SIGSTOP) else {0, -number, 128 + number}
        if (ended.status or 0) >= 0 and (problem := problem_of(ended, allowed)):
            return problem
        if ended.status not in allowed:
            return Outcome(Kind.WRONG_STATUS, f"{ended.status}: {ended.errors[-2000:]}")
    tokens = ground.folder / ("tokens" if place.shared else "cache/tokens")
    third = ground.distill(*command(ground, place, 0), change=many_units)
    outcome = finished(third, lambda: rows_in(tokens) == expected)
    if outcome.kind is Kind.FINISHED and (left := leftovers(tokens)):
        return Outcome(Kind.LEFTOVERS, f"{left} after {numbers}, {statuses}")
    return Outcome(Kind.RESUMED) if outcome.kind is Kind.FINISHED and statuses != {0} else outcome


def leftovers(tokens: Path) -> list[str]:
    """What is in the folder of the sequences besides their files."""
    ends = ("index.json", ".bin", ".counts.npy")
    inside = [path for folder in tokens.glob("*/index.json") for path in folder.parent.rglob("*")]
    return [os.path.relpath(path, tokens) for path in inside if path.is_dir() or not path.name.endswith(ends)]


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    for place in PLACES:
        for number in (*KINDS, signal.SIGKILL):
            attacks[f"{place.name}, {number.name} {len(attacks)}"] = partial(
                two_at_once, place=place, numbers=(number,), seed=draw.randrange(1 << 30)
            )
        for numbers in (
            (signal.SIGKILL, signal.SIGKILL),
            (signal.SIGTERM, signal.SIGKILL),
            (),
            (signal.SIGSTOP, signal.SIGKILL),
        ):
            names = " and ".join(number.name for number in numbers) or "no signal"
            attacks[f"{place.name}, {names} {len(attacks)}"] = partial(
                two_at_once, place=place, numbers=numbers, seed=draw.randrange(1 << 30)
            )
    return [Case("prepare", name, attack) for name, attack in attacks.items()]
