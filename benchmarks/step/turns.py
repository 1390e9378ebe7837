"""Training steps in processes that take turns, each perhaps in an environment of its own: needs Python alone.

A process trains a student of a pair and answers each call with the seconds of a step, and the last call with the peak
of its memory and the versions of its packages, once it has written the student's weights.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "trl", "accelerate", "distill")
WARM_UP = 2  # steps: compiled, and malloc has found its size
STUDENT, TEACHER, SEQUENCES = "student", "teacher", "sequences.npy"  # in the folder of a job


class Job(NamedTuple):
    """What a process trains; all processes of a measurement read the same folder."""

    folder: Path  # models as folders of transformers, and sequences [N, S] in the order in which they are learnt
    loss: str  # distill, or one of `trl_steps.LOSSES`
    format: str  # fp32 or bf16
    batch_size: int
    threads: int
    lr: float
    clip: float  # largest norm of the gradient


class Over(Exception):
    """Enough steps were made."""


class Turns:
    """The side that trains: `after_step` is called after each of its steps, and waits for the next call."""

    def __init__(self, calls: Connection) -> None:
        self.calls, self.steps, self.began = calls, 0, time.perf_counter()
        self.weights: Path | None = None  # where they are to be written in the end

    def after_step(self) -> None:
        """Raises Over where no further step is wanted."""
        seconds = time.perf_counter() - self.began
        self.steps += 1
        if self.steps == WARM_UP:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
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
    job: Job = calls.recv()
    if job.loss == "distill":
        from distill.runtime.host import limit_spinning

        limit_spinning()  # as a run does; the threads of the others wait as OpenMP lets them
    train = import_module(f"benchmarks.step.{'distill' if job.loss == 'distill' else 'trl'}_steps").train
    turns = Turns(calls)
    student = train(job, turns)
    if turns.weights is not None:
        import torch

        torch.save(student.state_dict(), turns.weights)
    calls.send({"peak": peak(), "versions": versions()})


def start(python: str, job: Job) -> tuple[Connection, subprocess.Popen[bytes]]:
    """A process of that Python, and what it is called by; it is warm as soon as it has sent the seconds of a step."""
    own, other = Pipe()
    code = "from benchmarks.step.turns import serve; serve()"
    command = [python, "-c", code, str(other.fileno())]
    quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
    environment = {**os.environ, **quiet, "OMP_NUM_THREADS": str(job.threads)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[other.fileno()], stdout=sys.stderr)
    other.close()  # so that the end of the process is an error here, and no waiting
    own.send(job)
    return own, process


def peak() -> int:
    """Most bytes of memory that this process had since it was warm."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def versions() -> dict[str, str]:
    """Of Python and those of `PACKAGES` that are there."""
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {name: found[name] for name in PACKAGES if name in found}
