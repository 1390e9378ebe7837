"""Whatever happens to a run at random moments, its student ends as that of an undisturbed one, bit for bit.

As many events as DISTILL_FUZZ says befall it, by default a few: SIGKILL to one process or to all, SIGTERM or SIGHUP,
SIGSTOP for a while, and SIGKILL followed by damage to a file of its folder.
"""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from attacked import CASES, Ended, damage, distill, end, members, send, start, steps_of, student_of
from forked import Forked
from job import TINY, library

ENGINES = {
    "single": [],
    "ddp": ["backend=ddp", "backend.processes=2", "backend.timeout=60", "train.async_checkpoints=true"],
}
STEPS = 60
SETTINGS = [
    "corpus.sequence_length=32", "corpus.vocab_size=300", "corpus.heldout=0.2", "evaluate.sets=[heldout]",
    "evaluate.max_sequences=8", TINY, "precision=fp32", "train.accumulate=2", "data.workers=1", "train.epochs=null",
    f"train.steps={STEPS}", "train.log_every=1", "train.save_every=2", "evaluate.every_steps=20",
]  # fmt: skip
# What a run may end with; a signal that comes before a handler is there, or after its last work, has Python's own.
KILLED, STOPPED, UNHANDLED = {-9, 137, 4}, {129, 143}, {-15, -1}
EARLY = 0.25  # the share of the events that come before the first step


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_whatever_happens_to_a_run_its_student_is_the_same(engine: str, tmp_path: Path) -> None:
    rows = 8 if engine == "single" else 4
    place = [f"corpus.path={library(tmp_path / 'books', 3)}", f"data.cache={tmp_path / 'cache'}"]
    command = ["+recipe=bert_pretrain", *SETTINGS, *place, f"train.batch_size={rows}", *ENGINES[engine]]
    undisturbed, folder, draw = tmp_path / "undisturbed", tmp_path / "run", random.Random(CASES)
    distill(*command, f"hydra.run.dir={undisturbed}").finished()
    began = time.monotonic()
    distill(*command, f"hydra.run.dir={folder}").finished()  # with tokenizer and tokens from the cache
    seconds, events = time.monotonic() - began, 0
    while events < (CASES or 5):
        shutil.rmtree(folder)
        while not attacked([*command, f"hydra.run.dir={folder}"], folder, seconds, draw):
            events += 1
            if events % 20 == 0:  # let it come to its end
                seconds *= 10
        events += 1
        assert student_of(folder) == student_of(undisturbed)


def attacked(command: list[str], folder: Path, seconds: float, draw: random.Random) -> bool:
    """Start the run and let one thing happen to it, within so many seconds; whether it has finished."""
    event, early, before = draw.choice([kill, stop, term, kill_and_damage]), draw.random() < EARLY, steps_of(folder)
    process = start(*command)
    while not early and steps_of(folder) == before and process.poll() is None:
        time.sleep(0.01)
    moment = time.monotonic() + draw.uniform(0, seconds * (0.5 if early else 1 - before / (STEPS + 1)))
    while time.monotonic() < moment and process.poll() is None:
        time.sleep(0.01)
    if process.poll() is not None:
        end(process).finished()
        return True
    in_training = before < steps_of(folder) < STEPS
    has_ended = (folder / "results.json").exists()
    ended: Ended = event(process, folder, draw)
    if event is term:
        assert ended.status in {0} | STOPPED | (set() if in_training and not has_ended else UNHANDLED), ended
        if in_training and ended.status and steps_of(folder) < STEPS:
            saved = [int(path.name[5:]) for path in folder.glob("checkpoints/step-*")]
            assert max(saved) == steps_of(folder), "a step is in no checkpoint"
    else:
        assert ended.status in ({0} if event is stop else {0} | KILLED), ended
    return ended.status == 0


def kill(process: Forked, folder: Path, draw: random.Random) -> Ended:
    alive = members(process.pid)
    send(alive if draw.random() < 0.3 else [draw.choice(alive or [process.pid])], signal.SIGKILL)
    return end(process)


def term(process: Forked, folder: Path, draw: random.Random) -> Ended:
    send([process.pid], draw.choice([signal.SIGTERM, signal.SIGHUP]))
    return end(process)


def stop(process: Forked, folder: Path, draw: random.Random) -> Ended:
    chosen = [draw.choice(members(process.pid) or [process.pid])]
    send(chosen, signal.SIGSTOP)
    time.sleep(2)
    send(chosen, signal.SIGCONT)
    return end(process)


def kill_and_damage(process: Forked, folder: Path, draw: random.Random) -> Ended:
    send(members(process.pid), signal.SIGKILL)
    ended = end(process)
    if files := [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]:
        damage(draw.choice(files), draw.choice(["gone", "cut", "a flipped bit", "random bytes"]), draw)
    return ended
