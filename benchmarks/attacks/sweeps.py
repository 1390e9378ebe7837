"""Sweeps, searches and chains that signals end at any moment: the same command goes on, and no run is made twice."""

import json
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.attacks.case import Case, Kind, Outcome, finished, problem_of
from benchmarks.attacks.ground import Ground, student_of
from benchmarks.attacks.ingredients import distilled, undisturbed
from benchmarks.attacks.stopped import slow_steps
from benchmarks.reliability.chaos import members, send

SWEEP = ("seed=0,1,2", "--multirun")
SEARCH = (
    "hydra/sweeper=optuna", "optimize=perplexity", "hydra.sweeper.n_trials=3", "hydra.sweeper.sampler.seed=5",
    "objective.temperature=interval(1,4)", "--multirun",
)  # fmt: skip
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
# What each kind of jobs takes undisturbed, in seconds; signals come within that time.
LASTS = {"sweep": 6.0, "search": 8.0, "chain": 25.0}
CHAIN = """# @package _global_
chain:
  stages:
    first: {{recipe: distilbert_gutenberg, settings: {settings}, seeds: [0, 1]}}
    second: {{recipe: distilbert_gutenberg, settings: {settings}}}
  table:
    first: [first]
    second: [second]
"""


def command(ground: Ground, kind: str, folder: Path) -> list[str]:
    """Of jobs in the folder, with the cache of an undisturbed run."""
    _, cache = undisturbed(ground, "three steps", partial(distilled, ground))
    words = [each for each in distilled(ground, cache, folder) if not each.startswith("hydra.run.dir")]
    if kind == "chain":
        recipe = ground.folder / "configs" / "recipe" / "two.yaml"
        recipe.parent.mkdir(parents=True, exist_ok=True)
        recipe.write_text(CHAIN.format(settings=json.dumps(words[1:])))
        return ["--config-dir", str(recipe.parents[1]), "+recipe=two", f"hydra.run.dir={folder}"]
    return [*words, f"hydra.sweep.dir={folder}", *(SWEEP if kind == "sweep" else SEARCH)]


def students(folder: Path) -> dict[str, str]:
    """Of all finished runs, by their folders."""
    runs = sorted(path.parent for path in folder.rglob("results.json"))
    return {str(run.relative_to(folder)): student_of(run) for run in runs}


def alone(ground: Ground, kind: str) -> dict[str, str]:
    """The students of jobs that nothing happens to."""

    def make(folder: Path) -> dict[str, str]:
        ended = ground.distill(*command(ground, kind, folder))
        assert ended.status == 0, ended.errors
        return students(folder)

    return ground.shared.get(f"alone {kind}", make)


def stamps(folder: Path) -> dict[Path, int]:
    """When the students of finished runs were written."""
    runs = [path.parent for path in folder.rglob("results.json")]
    return {run: (run / "student" / "model.safetensors").stat().st_mtime_ns for run in runs}


def hit(ground: Ground, words: list[str], number: signal.Signals, seconds: float, everybody: bool) -> Outcome | None:
    """The command, with a signal after so many seconds; gives what is wrong with its end."""
    process = ground.start(*words, change=partial(slow_steps, 0.2))
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    for pid in members(process.pid) if everybody else [process.pid]:
        send(pid, number)
    if number == signal.SIGSTOP:
        time.sleep(1)
        for pid in members(process.pid):
            send(pid, signal.SIGCONT)
    ended = ground.end(process)
    allowed = {0} if number == signal.SIGSTOP else {0, -number, 128 + number, 4}
    if ended.status in allowed and ended.status < 0 and not ended.orphans:
        return None
    return problem_of(ended, allowed)


def disturbed(ground: Ground, kind: str, numbers: tuple[signal.Signals, ...], seed: int) -> Outcome:
    """Signals to the jobs, one a start; then they finish: with the same students, and none that was made again."""
    expected, draw = alone(ground, kind), random.Random(seed)
    folder = ground.folder / "jobs"
    words, done = command(ground, kind, folder), dict[Path, int]()
    for number in numbers:
        if problem := hit(ground, words, number, draw.uniform(0.2, LASTS[kind]), draw.random() < 0.4):
            return problem
        if again := [run.name for run, stamp in stamps(folder).items() if done.get(run, stamp) != stamp]:
            return Outcome(Kind.SILENT, f"runs that were finished were made again: {again}")
        done = stamps(folder)
    outcome = finished(ground.distill(*words), lambda: students(folder) == expected)
    if again := [run.name for run, stamp in stamps(folder).items() if done.get(run, stamp) != stamp]:
        return Outcome(Kind.SILENT, f"runs that were finished were made again: {again}")
    return Outcome(Kind.RESUMED) if outcome.kind is Kind.FINISHED else outcome


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    for kind, count in (("sweep", 12), ("search", 8), ("chain", 4)):
        for number in range(count):
            numbers = tuple(draw.choice(SIGNALS) for _ in range(1 if kind == "chain" else draw.randint(1, 2)))
            names = " and ".join(each.name for each in numbers)
            attack = partial(disturbed, kind=kind, numbers=numbers, seed=draw.randrange(1 << 30))
            attacks[f"{kind}, {names} {number}"] = attack
    return [Case("sweeps", name, attack) for name, attack in attacks.items()]
