"""Clocks that jump, and files from the past and the future: the student is the same, and the report is written."""

import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.attacks.case import Case, Outcome, finished
from benchmarks.attacks.conditions import wrong_clock
from benchmarks.attacks.ground import Ground
from benchmarks.attacks.stopped import copied, is_same, slow_steps, wait_for_step

DAY, YEAR = 86400.0, 365 * 86400.0
WALL, STEADY = ("time", "time_ns"), ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
JUMPS = {
    "an hour back": (-3600.0,),
    "an hour forward": (3600.0,),
    "back and forward": (-7.0, 11.0) * 20,
    "to 1970": (-55 * YEAR,),
    "before 1970": (-60 * YEAR,),
    "to 2040": (14 * YEAR,),
    "to the year 9999": (7970 * YEAR,),
    "to the year 12000": (10_000 * YEAR,),
    "a little back again and again": (-0.2,) * 40,
}
SLEPT = {"a day of sleep": (DAY,), "a year of sleep": (YEAR,), "sleeping again and again": (60.0,) * 40}
STAMPS = {
    "1970": 0.0,
    "before 1970": -10 * YEAR,
    "tomorrow": 1.8e9,
    "2100": 130 * YEAR,
    "the year 2400": 430 * YEAR,
}
PLACES = ("run", "cache", "run/checkpoints", "cache run")


class Jumps(NamedTuple):
    """Of the clocks of these names."""

    clocks: tuple[str, ...]
    seconds: tuple[float, ...]
    every: float

    def set_up(self) -> None:
        """In a run: its steps take long enough for the clock to jump between them."""
        slow_steps(0.03)
        wrong_clock(self.clocks, self.seconds, self.every)


def jumping(ground: Ground, state: str, jumps: Jumps) -> Outcome:
    """A run that begins, resumes, or is reported, while its clocks jump."""
    prepared = copied(ground, state)
    words = ["report", f"run={ground.run}"] if state == "finished" else prepared.arguments
    return finished(ground.distill(*words, change=jumps.set_up), is_same(ground, prepared.student))


def preparing(ground: Ground, jumps: Jumps) -> Outcome:
    """The same with sequences that are not prepared yet."""
    prepared = copied(ground, "new")
    words = [*prepared.arguments, f"data.cache={ground.folder / 'new cache'}"]
    return finished(ground.distill(*words, change=jumps.set_up), is_same(ground, prepared.student))


def stamp(folder: Path, seconds: float, draw: random.Random) -> None:
    """Files and folders get this time of change, some of them a moment later than others."""
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (seconds, seconds + draw.choice((0.0, 0.0, 1.0))))


def stamped(ground: Ground, state: str, places: str, seconds: float, seed: int) -> Outcome:
    """A run, and its sequences, with files of another time."""
    prepared, draw = copied(ground, state), random.Random(seed)
    for place in places.split():
        if (ground.folder / place).exists():
            stamp(ground.folder / place, seconds, draw)
    words = ["report", f"run={ground.run}"] if seed % 2 and state == "finished" else prepared.arguments
    return finished(ground.distill(*words), is_same(ground, prepared.student))


def asleep(ground: Ground, seconds: float, seed: int) -> Outcome:
    """The machine sleeps in a step: the run is stopped, and its clocks have gone on when it continues."""
    import time

    prepared, draw = copied(ground, "new"), random.Random(seed)
    process = ground.start(*prepared.arguments, change=partial(slow_steps, 0.05))
    wait_for_step(process, ground.run, draw.randint(1, 8))
    for number in (signal.SIGSTOP, signal.SIGCONT):
        process.send_signal(number)
        time.sleep(seconds)
    return finished(ground.end(process), is_same(ground, prepared.student))


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    for clocks, some in ((WALL, JUMPS), (STEADY, SLEPT), (WALL + STEADY, SLEPT)):
        kind = "all clocks" if len(clocks) == len(WALL + STEADY) else f"{clocks[0]}()"
        for name, seconds in some.items():
            jumps = Jumps(clocks, seconds, draw.choice((0.001, 0.05, 0.3)))
            for state in draw.sample(("new", "stopped", "finished"), 2):
                attacks[f"{kind} {name}, a {state} run"] = partial(jumping, state=state, jumps=jumps)
            if draw.random() < 0.4:
                attacks[f"{kind} {name}, prepared"] = partial(preparing, jumps=jumps)
    for name, moment in STAMPS.items():
        for state in ("stopped", "finished"):
            place = draw.choice(PLACES)
            attack = partial(stamped, state=state, places=place, seconds=moment, seed=draw.randrange(1 << 30))
            attacks[f"files of {name} in {place}, a {state} run"] = attack
    for number in range(2):
        attacks[f"asleep {number}"] = partial(asleep, seconds=1.0 + number, seed=draw.randrange(1 << 30))
    return [Case("clock", name, attack) for name, attack in attacks.items()]
