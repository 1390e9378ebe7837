"""Training loops in processes that take turns, each perhaps in an environment of its own: needs Python and torch alone.

A process trains and answers each call with the seconds of a step, and the last call with the versions of its packages,
once it has written the student's weights.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "trl", "accelerate", "distill-kd")
WARM_UP = 2  # steps: compiled, and malloc has found its size
# In the folder of a `PeerJob`: models as transformers writes them, and sequences [N, S] in their order.
STUDENT, TEACHER, SEQUENCES = "student", "teacher", "sequences.npy"
QUIET = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
SPIN = "from distill.runtime.host import limit_spinning; limit_spinning(); "  # as a run does before it loads torch


class PeerJob(NamedTuple):
    """What a process of `beside_peers.py` trains, in whichever environment; all of them read the same folder."""

    folder: Path
    loss: str  # distill, compiled, or one of `trl_steps.LOSSES`
    format: str  # fp32 or bf16
    batch_size: int
    threads: int
    lr: float
    clip: float  # largest norm of the gradient
    new_tokens: int  # that the student writes behind the first half of each sequence; 0: it learns from all of it


class Over(Exception):
    """Enough steps were made."""


class Turns:
    """The side that trains: `after_step` is called after each of its steps, and waits for the next call."""

    def __init__(self, calls: Connection) -> None:
        self.calls, self.steps, self.began = calls, 0, time.perf_counter()
        self.weights: Path | None = None  # where they are to be written in the end

    def after_step(self) -> None:
        """Raises Over where no further step is wanted."""
        _wait_for_gpu()
        seconds = time.perf_counter() - self.began
        self.steps += 1
        if self.steps >= WARM_UP:
            self.calls.send(seconds)
            again = self.calls.recv()
            if again is not True:
                self.weights = again
                raise Over
        self.began = time.perf_counter()


def serve() -> None:
    """Train in this process; its argument is the number of the open file through which it is called."""
    calls = Connection(int(sys.argv[1]))
    module, name = calls.recv().split(":")
    train, turns = getattr(import_module(module), name), Turns(calls)
    student = train(calls.recv(), turns)
    if turns.weights is not None:
        import torch

        torch.save(student.state_dict(), turns.weights)
    calls.send(_versions())


class Worker:
    """A process that trains, by a function of a job and `Turns` that gives the student; it is warm once it is made."""

    def __init__(self, function: str, job: object, threads: int | None = None, python: str = sys.executable) -> None:
        """`function`: MODULE:NAME, imported by that Python."""
        self.calls, other = Pipe()
        code = f"{SPIN * (python == sys.executable)}from benchmarks.step.turns import serve; serve()"
        environment = os.environ | QUIET | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        command = [python, "-c", code, str(other.fileno())]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[other.fileno()], stdout=sys.stderr
        )
        other.close()  # so that the end of the process is an error here, and no waiting
        self.calls.send(function)
        self.calls.send(job)
        self.calls.recv()

    def step(self) -> float:
        """Seconds of its next step."""
        self.calls.send(True)
        return float(self.calls.recv())

    def end(self, weights: Path | None = None) -> dict[str, str]:
        """The versions of its packages; `weights`: where it leaves its student."""
        self.calls.send(weights)
        versions: dict[str, str] = self.calls.recv()
        self.process.wait()
        return versions


def take_turns(
    workers: Sequence[Worker], enough: Callable[[list[float]], bool], between: Callable[[], object]
) -> list[list[float]]:
    """Seconds of the steps of each, which makes them until it has `enough`; `between` is called before each round."""
    seconds: list[list[float]] = [[] for _ in workers]
    while not all(map(enough, seconds)):
        between()
        for worker, own in zip(workers, seconds, strict=True):
            if not enough(own):
                own.append(worker.step())
    return seconds


def _wait_for_gpu() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _versions() -> dict[str, str]:
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {name: found[name] for name in PACKAGES if name in found}
