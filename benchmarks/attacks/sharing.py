"""Several commands at once on one cache, in one folder, or on a run that is training: each is what it is alone."""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.attacks.case import Case, Ended, Kind, Outcome, problem_of
from benchmarks.attacks.ground import Ground, student_of
from benchmarks.attacks.prepare import many_units
from benchmarks.attacks.stopped import Prepared, command, copied, is_same, slow_steps, wait_for_step, whole


def slowly() -> None:
    """In a run: its text is many pieces of work, and its steps take a moment."""
    many_units(slowly=True)
    slow_steps(0.05)


def started(ground: Ground, commands: list[list[str]], draw: random.Random, pause: float) -> list[Any]:
    processes = []
    for words in commands:
        processes.append(ground.start(*words, change=slowly))
        time.sleep(draw.uniform(0, pause))
    return processes


def one_cache(ground: Ground, count: int, kind: str, seed: int) -> Outcome:
    """Several runs, or preparations, fill one cache; all have the student that each has alone."""
    student, _ = whole(ground)
    cache, draw = ground.folder / "cache", random.Random(seed)
    runs = [ground.folder / f"run{number}" for number in range(count)]
    commands = [command(ground, cache, run) for run in runs]
    if kind == "a preparation and runs":
        commands[0] = ["prepare", *commands[0]]
        runs = runs[1:]
    ends = [ground.end(process) for process in started(ground, commands, draw, 0.4)]
    for ended in ends:
        if problem := problem_of(ended, (0,)):
            return problem
    if differ := [run.name for run in runs if student_of(run) != student]:
        return Outcome(Kind.SILENT, f"{differ} have other students")
    if len([*cache.glob("tokens/*/index.json")]) != 1:
        return Outcome(Kind.LEFTOVERS, f"the cache has {sorted(path.name for path in cache.rglob('*'))}")
    return Outcome(Kind.FINISHED)


def one_folder(ground: Ground, state: str, count: int, other: bool, seed: int) -> Outcome:
    """Several times the same command, or ones with other settings: one of them trains, the others are refused."""
    prepared, draw = copied(ground, state), random.Random(seed)
    commands = [prepared.arguments, *[[*prepared.arguments, *(["seed=7"] if other else [])]] * (count - 1)]
    first, *others = started(ground, commands, draw, 0.3)
    ends = [ground.end(process) for process in (first, *others)]
    for ended in ends:
        if problem := problem_of(ended, (0, 2)):
            return problem
    if not any(ended.status == 0 for ended in ends):
        return Outcome(Kind.WRONG_STATUS, "; ".join(ended.refusal for ended in ends))
    if wrong := [ended.refusal for ended in ends if ended.status and "hydra.run.dir" not in ended.refusal]:
        return Outcome(Kind.WRONG_STATUS, f"the line names no folder: {wrong}")
    if not other or ends[0].status == 0:
        return same(ground, prepared)
    return Outcome(Kind.FINISHED)


def same(ground: Ground, prepared: Prepared) -> Outcome:
    if is_same(ground, prepared.student)():
        return Outcome(Kind.FINISHED)
    return Outcome(Kind.SILENT, "status 0 with another student")


def reading(ground: Ground, reader: str) -> list[str]:
    """A command that reads the run."""
    run = ground.run
    return {
        "evaluate": ["evaluate", f"model={run}", f"output={ground.folder / 'scores'}"],
        "predict": ["predict", f"model={run}", "text=The [MASK] king."],
        "report": ["report", f"run={run}"],
        "compare": ["compare", f"run={run}", f"output={ground.folder / 'compared'}"],
        "export": ["export", f"model={run}"],
        "settings": ["settings", *command(ground, ground.folder / "cache", run)],
        "prepare": ["prepare", *command(ground, ground.folder / "cache", run)],
    }[reader]


def while_training(ground: Ground, reader: str, step: int, state: str) -> Outcome:
    """A command reads a run that is training: it finishes or is refused, and the student is the same."""
    prepared = copied(ground, state)
    process = ground.start(*prepared.arguments, change=partial(slow_steps, 0.1))
    wait_for_step(process, ground.run, step)
    read: Ended = ground.distill(*reading(ground, reader))
    ended = ground.end(process)
    for each in (read, ended):
        if problem := problem_of(each, (0, 2) if each is read else (0,)):
            return problem
    return same(ground, prepared)


def sweeping(ground: Ground, second: str, seed: int) -> Outcome:
    """Two sweeps in one folder, or a sweep and one of its runs: each run is trained once, or the command refused."""
    prepared, draw = copied(ground, "new"), random.Random(seed)
    folder = ground.folder / "sweep"
    words = [each for each in prepared.arguments if not each.startswith("hydra.run.dir")]
    sweep = [*words, f"hydra.sweep.dir={folder}", "seed=0,1", "--multirun"]
    commands = [sweep, sweep if second == "the same" else [*sweep, "objective.temperature=1,2"]]
    if second == "one of its runs":
        commands[1] = [*words, "seed=0", f"hydra.run.dir={folder / 'seed=0'}"]
    ends = [ground.end(process) for process in started(ground, commands, draw, 3.0)]
    for ended in ends:
        if problem := problem_of(ended, (0, 2)):
            return problem
    again = ground.distill(*sweep)
    if problem := problem_of(again, (0, 2)):
        return problem
    if again.status == 0 and student_of(folder / "seed=0") != prepared.student:
        return Outcome(Kind.SILENT, f"another student in {sorted(path.name for path in folder.iterdir())}")
    return Outcome(Kind.FINISHED if again.status == 0 else Kind.REFUSED, again.refusal)


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    for count in (2, 2, 3, 4):
        for kind in ("runs", "a preparation and runs"):
            attack = partial(one_cache, count=count, kind=kind, seed=draw.randrange(1 << 30))
            attacks[f"one cache, {count}, {kind} {len(attacks)}"] = attack
    for state in ("new", "stopped", "finished"):
        for count, other in ((2, False), (3, False), (2, True)):
            attack = partial(one_folder, state=state, count=count, other=other, seed=draw.randrange(1 << 30))
            attacks[f"one folder, {count} commands{', other settings' * other}, a {state} run"] = attack
    for reader in ("evaluate", "predict", "report", "compare", "export", "settings", "prepare"):
        for state in ("new", "stopped"):
            step = draw.randint(0, 11)
            attack = partial(while_training, reader=reader, step=step, state=state)
            attacks[f"{reader} from step {step} of a {state} run"] = attack
    for second in ("the same", "a larger one", "one of its runs"):
        for number in range(2):
            attacks[f"two sweeps, {second} {number}"] = partial(sweeping, second=second, seed=draw.randrange(1 << 30))
    return [Case("sharing", name, attack) for name, attack in attacks.items()]
