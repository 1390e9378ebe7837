"""What each rung from fp32 to fused kernels brings a pre-training step of ALBERT: time and memory, side by side.

    python benchmarks/step/precision_ladder.py                    # ALBERT-base; bf16, on a GPU fp16 too
    python benchmarks/step/precision_ladder.py --size small --rows 8 --tokens 128 --threads 2

The step is that of `distill.train`: masked words alone, no teacher, clipping, AdamW. The rungs, each with those before
it: torch's kernels in fp32; matrix products in 16 bits, in fp16 with a loss scale; the encoder through torch.compile;
the objective in chunks, compiled, which keeps no logits of the vocabulary. The last one stands beside them: Distill's
kernels and objective without torch.compile on the encoder. Every rung has its own process, all take turns, times are
medians. Memory on a CPU is that of the whole process, compiler included. fp32 on a GPU is without TF32.
"""

import argparse
import statistics
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AlbertConfig, AlbertForMaskedLM

from benchmarks.common import save, table, title
from benchmarks.step.models import AfterStep, Shape, batches
from benchmarks.step.step import CallAfterStep, NoHistory, answer, start
from distill.config.settings import BackendConfig, ObjectiveConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from distill.distributed import gradient_sync
from distill.distributed.single import Single
from distill.objective.build import bind_terms, build_objective, make_terms
from distill.optim import updates as optim
from distill.optim.schedules.constant import Constant
from distill.runs.checkpoint import Checkpoints, State
from distill.runs.setup import setup_student
from distill.runtime.host import limit_spinning
from distill.teacher.output import NoTeacher
from distill.train import Learner, Training, train

VOCABULARY = 30000
# Layers, width, heads, width of the embeddings.
SIZES = {
    "tiny": (2, 64, 2, 16),  # to try the script
    "small": (4, 256, 4, 64),
    "base": (12, 768, 12, 128),
    "large": (24, 1024, 16, 128),
    "xlarge": (24, 2048, 16, 128),
}


class Rung(NamedTuple):
    name: str
    precision: PrecisionConfig
    kernel: str  # of the objective


def rungs(formats: list[str]) -> list[Rung]:
    """The rungs in their order; those above fp32 for each format of 16 bits."""
    found = [Rung("fp32", PrecisionConfig(kernels="plain"), "plain")]
    for name in formats:
        found += [
            Rung(f"{name}, mixed", PrecisionConfig(student=name, kernels="plain"), "plain"),
            Rung(f"{name}, compiled", PrecisionConfig(student=name, compile=True), "plain"),
            Rung(f"{name}, compiled, fused objective", PrecisionConfig(student=name, compile=True), "auto"),
            Rung(f"{name}, fused kernels, not compiled", PrecisionConfig(student=name), "fused"),
        ]
    return found


def make_model(size: str, tokens: int, device: torch.device) -> Any:
    """An ALBERT with random weights and without dropout, as the published pre-training had it."""
    layers, width, heads, embedding = SIZES[size]
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=embedding,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=max(512, tokens),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return AlbertForMaskedLM(config).to(device).train()


def serve(calls: Connection, rung: Rung, options: argparse.Namespace) -> None:
    """One rung in a process of its own."""

    def train_for(steps: int, after_step: AfterStep) -> None:
        layers, width, *_ = SIZES[options.size]
        shape = Shape(layers, layers, width, VOCABULARY, options.rows, options.tokens)
        ranks = Single(BackendConfig(device=options.device))
        config = ObjectiveConfig(mlm={"weight": 1.0}, kernel=rung.kernel)
        model, terms = make_model(options.size, options.tokens, ranks.device), make_terms(config)
        terms = bind_terms(terms, model, None)
        objective = build_objective(terms, config, rung.precision, VOCABULARY, 1, ranks.device)
        trainable = setup_student(model, objective, rung.precision, ranks)
        sync = gradient_sync(ranks, trainable)
        with tempfile.TemporaryDirectory() as folder:
            optimizer = OptimizerConfig()
            learner = Learner(trainable, sync, optim.build(trainable, optimizer), Constant(), optimizer)
            length = TrainConfig(epochs=None, steps=steps + 1, save_every=steps + 1)
            source, checkpoints = batches(shape, options.accumulate, steps), Checkpoints(Path(folder), 1, {})
            run = Training(learner, NoTeacher(), source, ranks, length, State(), checkpoints)
            train(run, objective, (CallAfterStep(after_step),), NoHistory())

    answer(calls, options, train_for)


def measure(chosen: list[Rung], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a step and bytes at the peak of every rung; all take turns."""
    calls, processes = start(serve, [(rung, options) for rung in chosen])
    seconds: list[list[float]] = [[] for _ in chosen]
    for _ in range(options.rounds):
        for call, times in zip(calls, seconds, strict=True):
            call.send(True)
            times.append(call.recv())
    results = []
    for rung, call, times, process in zip(chosen, calls, seconds, processes, strict=True):
        call.send(False)
        results.append({"rung": rung.name, "seconds": statistics.median(times), "all": times, "peak": call.recv()})
        process.join()
    return results


def lines(results: list[dict[str, Any]]) -> list[list[str]]:
    first = results[0]
    return [
        [
            r["rung"],
            f"{1000 * r['seconds']:.1f}",
            f"{first['seconds'] / r['seconds']:.2f}",
            f"{r['peak'] / 2**30:.2f}",
            f"{r['peak'] / first['peak']:.2f}",
        ]
        for r in results
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--size", default="base", choices=list(SIZES))
    parser.add_argument("--rows", type=int, help="of a micro-batch (GPU: 32, CPU: 4)")
    parser.add_argument("--tokens", type=int, help="of a row (GPU: 512, CPU: 128)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--formats", help="of 16 bits (GPU: bf16,fp16, CPU: bf16)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    on_gpu = torch.device(options.device).type == "cuda"
    options.rows, options.tokens = options.rows or (32 if on_gpu else 4), options.tokens or (512 if on_gpu else 128)
    limit_spinning()  # as a run does; the processes of the rungs inherit it
    formats = options.formats or ("bf16,fp16" if on_gpu else "bf16")
    results = measure(rungs(formats.split(",")), options)
    layers, width, *_ = SIZES[options.size]
    rows = f"{options.accumulate} x {options.rows} rows of {options.tokens} tokens"
    print(f"ALBERT {layers}x{width}, V {VOCABULARY}, a step of {rows}; {title()}\n")
    head = ["rung", "ms a step", "times as fast as fp32", f"GiB{' on the GPU' * on_gpu}", "of fp32's"]
    print(table(head, lines(results)))
    save(options.json, results)


if __name__ == "__main__":
    main()
