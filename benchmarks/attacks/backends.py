"""Runs of two ranks on every backend with signals to ranks and launcher: no orphans, and the same student."""

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.attacks.case import Case, Kind, Outcome, finished, problem_of
from benchmarks.attacks.ground import Ground, student_of
from benchmarks.attacks.ingredients import distilled, undisturbed
from benchmarks.attacks.stopped import slow_steps, wait_for_step
from benchmarks.reliability.chaos import members, send

BACKENDS = ("ddp", "fsdp", "horovod")
# Signals, and whom they hit: the launcher, one rank, or all.
EVENTS = (
    (signal.SIGKILL, "a rank"), (signal.SIGKILL, "the launcher"), (signal.SIGKILL, "all"),
    (signal.SIGTERM, "the launcher"),
    (signal.SIGINT, "all"), (signal.SIGSTOP, "a rank"), (signal.SIGHUP, "the launcher"), (signal.SIGTERM, "a rank"),
)  # fmt: skip
STOPPED = 1.5  # seconds
LONGEST = 240.0  # seconds of a command of three processes


def command(ground: Ground, backend: str, cache: Path, folder: Path) -> list[str]:
    ranks = [f"backend={backend}", "backend.processes=2", "backend.timeout=30"]
    return distilled(ground, cache, folder, *ranks, "train.batch_size=2", "train.steps=8", "train.save_every=2")


def signalled(ground: Ground, backend: str, number: signal.Signals, whom: str, seed: int) -> Outcome:
    """A signal in the start or at a step that is drawn; then the same command finishes with the same student."""
    student, cache = undisturbed(ground, backend, partial(command, ground, backend))
    draw, words = random.Random(seed), command(ground, backend, cache, ground.run)
    process = ground.start(*words, change=partial(slow_steps, 0.15))
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0.3, 4))
    else:
        wait_for_step(process, ground.run, draw.randint(1, 7), LONGEST)
    alive = members(process.pid)
    ranks = [pid for pid in alive if pid != process.pid] or alive
    chosen = {"all": alive, "the launcher": [process.pid], "a rank": [draw.choice(ranks)] if ranks else []}[whom]
    for pid in chosen:
        send(pid, number)
    if number == signal.SIGSTOP:
        time.sleep(STOPPED)
        for pid in chosen:
            send(pid, signal.SIGCONT)
    ended = ground.end(process, LONGEST)
    allowed = {0} if number == signal.SIGSTOP else {0, 4, -number, 128 + number}
    is_killed = ended.status == -signal.SIGKILL == -number and not ended.orphans
    if not is_killed and (problem := problem_of(ended, allowed)):
        return problem
    same: Callable[[], bool] = lambda: student_of(ground.run) == student  # noqa: E731
    again = finished(ground.end(ground.start(*words), LONGEST), same)
    return Outcome(Kind.RESUMED) if again.kind is Kind.FINISHED and ended.status else again


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    for backend in BACKENDS:
        for number, whom in EVENTS:
            attack = partial(signalled, backend=backend, number=number, whom=whom, seed=draw.randrange(1 << 30))
            attacks[f"{backend}, {number.name} to {whom}"] = attack
    return [Case("backends", name, attack) for name, attack in attacks.items()]
