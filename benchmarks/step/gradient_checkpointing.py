"""Steps of a student with and without student.gradient_checkpointing: their time, and the memory that they take.

    python benchmarks/step/gradient_checkpointing.py
    python benchmarks/step/gradient_checkpointing.py --layers 24 --width 1024 --batch 8 --length 128 --precision bf16

A BERT learns masked tokens, with dropout, by the parts of a run: forward, backward, AdamW. Each variant has a process
of its own, and both take turns. The memory is the peak of a process above what it has after a step of one sequence,
when weights, gradients and the optimizer's state are there. Beside it stands what the check before a run takes to be
sure (`distill.models.memory.least_bytes`), by which it refuses a micro-batch.
"""

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

from benchmarks.common import save, table, title
from benchmarks.step.models import Shape, batches
from distill.config.settings import BackendConfig, ObjectiveConfig, OptimizerConfig, PrecisionConfig
from distill.data.batch import Batch
from distill.distributed import gradient_sync
from distill.distributed.single import Single
from distill.models.memory import least_bytes
from distill.objective.build import build_objective, make_terms
from distill.optim import updates as optim
from distill.runs.setup import setup_student
from distill.runtime.host import limit_spinning
from distill.teacher.output import NoTeacher
from distill.train import accumulate_gradients

PEAK, PRESENT = "VmHWM", "VmRSS"


def memory(name: str) -> int:
    """Bytes of this process, as the system counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def make_student(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    width = options.width
    sizes = {"hidden_size": width, "num_attention_heads": width // 64, "intermediate_size": 4 * width}
    config = BertConfig(num_hidden_layers=options.layers, max_position_embeddings=options.length, **sizes)
    return BertForMaskedLM(config).train()


def serve(calls: Connection, checkpoints: bool, options: argparse.Namespace) -> None:
    """A step for each call, answered with its seconds; the last answer is the memory."""
    torch.set_num_threads(options.threads)
    student, precision = make_student(options), PrecisionConfig(student=options.precision)
    ranks, settings = Single(BackendConfig(device="cpu")), ObjectiveConfig(mlm={"weight": 1.0})
    vocabulary = student.config.vocab_size
    objective = build_objective(make_terms(settings), settings, precision, vocabulary, 1, ranks.device)
    trainable = setup_student(student, objective, precision, ranks, checkpoints)
    sync, optimizer = gradient_sync(ranks, trainable), optim.build(trainable, OptimizerConfig())

    def step(window: list[Batch]) -> float:
        began = time.perf_counter()
        scales = objective.scales(objective.count(window), ranks.device)
        accumulate_gradients(trainable, NoTeacher(), objective, window, scales, sync)
        sync.all_reduce_gradients()
        optimizer.step()
        return time.perf_counter() - began

    def window_of(sequences: int) -> list[Batch]:
        shape = Shape(0, options.layers, options.width, vocabulary, sequences, options.length)
        return batches(shape, 1, 1).window(0)

    step(window_of(1))
    before, window = memory(PRESENT), window_of(options.batch)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    while calls.recv():
        calls.send(step(window))
    calls.send(memory(PEAK) - before)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    spawn, variants = multiprocessing.get_context("spawn"), []
    for checkpoints in (False, True):
        here, there = spawn.Pipe()
        spawn.Process(target=serve, args=(there, checkpoints, options), daemon=True).start()
        variants.append((here, checkpoints, list[float]()))
    for _ in range(options.rounds + 1):
        for calls, _, seconds in variants:
            calls.send(True)
            seconds.append(calls.recv())
    student, results = make_student(options), []
    for calls, checkpoints, seconds in variants:
        calls.send(False)
        least = least_bytes(student, options.precision, options.batch, options.length, checkpoints)
        found = {"checkpoints": checkpoints, "seconds": statistics.median(seconds[1:]), "all": seconds}
        results.append({**found, "peak": calls.recv(), "least": least})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("layers", 12),
        ("width", 768),
        ("batch", 16),
        ("length", 128),
        ("threads", 2),
        ("rounds", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    limit_spinning()
    results = measure(options)
    print(f"{title()}\n")
    rows = [
        [str(r["checkpoints"]).lower(), f"{r['seconds']:.2f}", f"{r['peak'] / 1e6:,.0f}", f"{r['least'] / 1e6:,.0f}"]
        for r in results
    ]
    print(table(["student.gradient_checkpointing", "s a step", "MB at the peak", "MB the check is sure of"], rows))
    kept, again = results
    print(
        f"\n{again['seconds'] / kept['seconds']:.2f} times the time, {again['peak'] / kept['peak']:.2f} of the memory"
    )
    save(options.json, results)


if __name__ == "__main__":
    main()
