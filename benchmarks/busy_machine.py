"""What other programs on the machine cost, by how many threads compute and how they wait for each other.

    python benchmarks/busy_machine.py --json busy_machine.json
    python benchmarks/busy_machine.py --busy 0 4 --work linear train --rounds 1

OpenMP's threads wait for each other by spinning. On a machine with more busy processes than cores a waiting thread then
takes the core of the one that it waits for. Distill lets them give way after `GOMP_SPINCOUNT=1000` rounds
(`distill.runtime.threads`). Measured is each kind of work with one thread, with all of them as OpenMP has it, with
Distill's limit, and with `OMP_WAIT_POLICY=passive`, beside so many other processes that never rest
(`--busy`). Each is a process of its own; the settings take turns, and medians count. Kinds of work:

    linear     20 linear layers of 256, forward, 256 rows: many short parallel regions
    train      a training step of the bundled pair (4 x 192 -> 2 x 192, 16 rows of 128 tokens), as `step.py` times it
    compiled   the same with precision.compile=true, whose kernels are compiled C++ with threads of their own
    score      the forward of evaluation: hidden states and logits of the bundled teacher's shape

Expected: on a quiet machine the limit costs 3 % at most; beside four busy processes all threads with it are at least
as fast as one thread, where OpenMP's own way is several times slower than that.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import save, table, title

WAYS: dict[str, tuple[bool, dict[str, str]]] = {  # whether all threads compute, and the environment
    "one thread": (False, {}),
    "all, as OpenMP has it": (True, {}),
    "all, Distill's limit": (True, {"GOMP_SPINCOUNT": "1000"}),
    "all, passive": (True, {"OMP_WAIT_POLICY": "passive"}),
}
WORK = ("linear", "train", "compiled", "score")
SECONDS = 6.0  # that each is timed for


def work(kind: str, threads: int, seconds: float) -> float:
    """Units of work a second, in this process."""
    import torch

    torch.set_num_threads(threads)
    do = {"linear": linear, "train": training, "compiled": training, "score": scoring}[kind]
    times: list[float] = []
    began = time.perf_counter()
    for _ in do(kind):
        now = time.perf_counter()
        times.append(now - began)
        began = now
        if len(times) > 3 and sum(times[2:]) > seconds:
            break
    return 1 / statistics.median(times[2:])


def linear(kind: str) -> Iterator[None]:
    import torch
    from torch import nn

    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20)))
    rows = torch.randn(256, 256)
    with torch.inference_mode():
        while True:
            layers(rows)
            yield


def training(kind: str) -> Iterator[None]:
    """A step of two micro-batches each time; the loop of `step.py` calls back, so that it runs in another thread."""
    import threading
    from queue import Queue

    import torch
    from step import train_with_distill
    from step_models import SHAPES, Variant, batches, make_student, make_teacher

    from distill.config.settings import PrecisionConfig

    steps, done = 100_000, Queue[None]()
    shape, device = SHAPES["bundled"], torch.device("cpu")
    precision = PrecisionConfig(compile=kind == "compiled")
    variant = Variant("eager objective", "masked", precision)
    pair = make_teacher(shape, device), make_student(shape, device)
    source = batches(shape, 2, 200)  # rows enough; they begin anew after these
    arguments = (source, pair, variant, steps, lambda: done.put(None))
    threading.Thread(target=train_with_distill, args=arguments, daemon=True).start()
    while True:
        done.get()
        yield


def scoring(kind: str) -> Iterator[None]:
    import torch
    from step_models import SHAPES, make_teacher

    shape = SHAPES["bundled"]
    model = make_teacher(shape, torch.device("cpu"))
    ids = torch.randint(5, shape.vocabulary, (16, shape.tokens))
    with torch.inference_mode():
        while True:
            model(input_ids=ids)
            yield


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that never rest."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measured(kind: str, way: str, seconds: float) -> float:
    """Units of work a second of a process of its own."""
    every, environment = WAYS[way]
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    threads = len(os.sched_getaffinity(0)) if every else 1
    command = [sys.executable, __file__, "--worker", kind, "--threads", str(threads), "--seconds", str(seconds)]
    done = subprocess.run(command, env={**plain, **environment}, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 4], help="other processes that never rest")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=WORK, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(work(options.worker, options.threads, options.seconds), flush=True)
        os._exit(0)  # whatever the loop in its thread is doing
    found: dict[str, dict[str, Any]] = {}
    for kind in options.work:
        for busy in options.busy:
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            with neighbours(busy):
                for _ in range(options.rounds):
                    for way, values in rates.items():
                        values.append(measured(kind, way, options.seconds))
            found[f"{kind}, {busy} busy"] = rates
    print(title())
    lines = [[name, *(f"{statistics.median(rates[way]):.3g}" for way in WAYS)] for name, rates in found.items()]
    print(table(["work, other processes; units a second", *WAYS], lines))
    save(options.json, found)


if __name__ == "__main__":
    main()
