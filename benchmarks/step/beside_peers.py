"""Distill's step against what a user would take instead, on the same pair, sequences and machine, in turns.

    python -m venv PEERS                              # an environment of their own
    PEERS/bin/pip install trl==1.16.0 transformers==5.23.0 torch==2.13.0 \
        --extra-index-url https://download.pytorch.org/whl/cpu
    python -m benchmarks.step peers --peers PEERS/bin/python
    python -m benchmarks.step peers --peers PEERS/bin/python --formats bf16 --quality 600
    python -m benchmarks.step peers --peers PEERS/bin/python --formats bf16 --only 'l$' --on-policy

The pair is SmolLM2-135M-Instruct (`teacher=smollm2`, whose packages `docs/how-to/students.md` names) and a student of
20 of its 30 layers. The loss is the forward divergence alone, at temperature 1. Distill's step is that of a run, plain
and `compiled` by `precision.compile=true`; the others are in `trl_steps.py`. Each has a process of its own. bf16 is
autocast with fp32 weights, but for the teacher's: all keep them in bf16, as its file has them.

With --on-policy the student writes the second half of each sequence, and learns from that alone, as GKDTrainer does
with lmbda=1.

With --quality they take turns until each has had so many seconds of steps, and are then scored: perplexity on held-out
sequences.
"""

import argparse
import math
import re
import statistics
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import Results
from benchmarks.step.models import Work, matrix_rate, pair_operations, whole_sequences
from benchmarks.step.training import Plan, train_by_plan
from benchmarks.step.turns import SEQUENCES, STUDENT, TEACHER, Over, PeerJob, Turns, Worker, take_turns
from distill.config import HERE
from distill.config.objective import OnPolicyConfig
from distill.config.settings import ObjectiveConfig, OptimizerConfig, PrecisionConfig, StudentConfig, TeacherConfig
from distill.data.sources.gutenberg import books
from distill.models.kind import CAUSAL
from distill.models.student import make_student
from distill.models.teacher import load_teacher
from distill.optim.schedules.constant import Constant

LAYERS = [0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 19, 20, 21, 22, 23, 24, 25, 27, 28, 29]
OURS = ("distill", "compiled")  # the second by precision.compile=true
LOSSES = (*OURS, "trl", "distillkit")
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
HELDOUT = "heldout.npy"


def train(job: PeerJob, turns: Turns) -> Any:
    """Distill's loop with the forward divergence alone, AdamW as TRL has it, and a constant learning rate."""
    torch.set_num_threads(job.threads)
    disable_progress_bar()
    pair = pair_of(job.folder)
    source = whole_sequences(np.load(job.folder / SEQUENCES), pair[1].config.vocab_size, job.batch_size)
    objective = ObjectiveConfig(task="clm", soft={"weight": 1.0, "positions": "targets", "temperature": 1.0})
    optimizer = OptimizerConfig(lr=job.lr, clip=job.clip, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    precision = PrecisionConfig(student=job.format, teacher=job.format, compile=job.loss == "compiled")
    plan = Plan(objective, precision, optimizer=optimizer, schedule=Constant(warmup=0.0))
    if count := job.new_tokens:
        sizes = {"max_new_tokens": count, "prompt_tokens": count, "group_size": job.batch_size}
        plan = plan._replace(on_policy=OnPolicyConfig(fraction=1.0, **sizes))
    with suppress(Over):
        train_by_plan(source, pair, plan, source.steps_per_epoch, turns.after_step)
    return pair[1]


def pair_of(folder: Path) -> tuple[Any, Any]:
    """Teacher and student, fp32."""
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in (TEACHER, STUDENT)
    )
    return teacher.eval().requires_grad_(False), student.train()


def sequences_of(folder: Path, tokenizer: PreTrainedTokenizerBase, length: int, most: int) -> np.ndarray:
    """Stretches of the books in a folder in a random order, [N, length]; of all of them, as far as `most` allows."""
    rows = []
    for path in sorted(folder.iterdir()):
        for text in (text for _, text in books(str(path)) if isinstance(text, str)):
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            rows.append(np.array(ids[: len(ids) // length * length], np.uint16).reshape(-1, length))
        if sum(map(len, rows)) > 10 * most:
            break
    return np.random.default_rng(0).permutation(np.concatenate(rows))[:most]


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """Write models, tokenizer and sequences, which all processes read."""
    teacher, tokenizer, _ = load_teacher(TeacherConfig(path=options.teacher), CAUSAL)
    layers = [int(number) for number in options.layers.split(",")]
    settings = StudentConfig(layers=layers, dropout=0.0)  # which TRL turns off, too, where it finds it
    student = make_student(settings, teacher, tokenizer, options.length, CAUSAL)
    for name, model in ((TEACHER, teacher), (STUDENT, student)):
        model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / TEACHER)
    np.save(folder / SEQUENCES, sequences_of(options.books / "train", tokenizer, options.length, options.sequences))
    np.save(folder / HELDOUT, sequences_of(options.books / "heldout", tokenizer, options.length, options.heldout))


@torch.no_grad()
def perplexity(model: nn.Module, rows: np.ndarray) -> float:
    """Of the sequences [N, S], whose first token is given; by transformers' own loss, fp32."""
    batches = [torch.from_numpy(rows[i : i + 8].astype(np.int64)) for i in range(0, len(rows), 8)]
    losses = [float(model(input_ids=ids, labels=ids).loss) * len(ids) for ids in batches]
    return math.exp(sum(losses) / len(rows))


def measure(format: str, folder: Path, options: argparse.Namespace, results: Results) -> None:
    """All losses in one format take turns, and between the rounds the matrix rate is measured."""
    losses = [loss for loss in LOSSES if re.search(options.only, loss)]
    sizes = options.batch, options.threads, options.lr, options.clip, options.on_policy * options.length // 2
    jobs = [PeerJob(folder, loss, format, *sizes) for loss in losses]
    workers = []
    for job in jobs:
        where = {} if job.loss in OURS else {"python": options.peers}
        function = f"benchmarks.step.{'beside_peers' if job.loss in OURS else 'trl_steps'}:train"
        workers.append(Worker(function, job, options.threads, **where))
    teacher, student = pair_of(folder)
    tokens = options.batch * options.length
    width, inner = student.config.hidden_size, student.config.intermediate_size
    products = [(tokens, width, inner), (tokens, inner, width), (tokens, width, student.config.vocab_size)]
    rates: list[float] = []
    quality = options.quality is not None
    seconds = take_turns(
        workers,
        lambda own: sum(own) >= options.quality if quality else len(own) == options.rounds,
        lambda: (
            rates.append(matrix_rate(FORMATS[format], torch.device("cpu"), products, times=3))
            if len(rates) < options.rounds
            else None
        ),
    )
    work = pair_operations(teacher, student, Work(tokens, options.length / 2, tokens - options.batch))
    for job, worker, own in zip(jobs, workers, seconds, strict=True):
        weights = folder / f"{job.loss}-{format}.pt"
        versions = worker.end(weights if quality else None)
        scores: dict[str, float] = {}
        if quality:
            student.load_state_dict(torch.load(weights, weights_only=True))
            scores = {"steps": len(own), "perplexity": perplexity(student.eval(), np.load(folder / HELDOUT))}
        results.row(
            step=f"{job.loss} {format}",
            tokens_per_second=tokens / statistics.median(own),
            **(faster_by(seconds[0], own) if job is not jobs[0] and losses[0] == "distill" else {}),
            **({} if options.on_policy else {"of_the_floor": work / statistics.median(rates) / statistics.median(own)}),
            **scores,
            seconds=own,
            versions=versions,
        )


def faster_by(first: list[float], other: list[float]) -> dict[str, float]:
    """How many times as fast the first is, which is Distill, and the least and the largest of the rounds."""
    rounds = [slower / own for own, slower in zip(first, other, strict=False)]
    return {"faster": statistics.median(other) / statistics.median(first), "least": min(rounds), "most": max(rounds)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", help="the Python of the environment that has TRL; without it Distill runs alone")
    parser.add_argument("--formats", default="fp32,bf16")
    parser.add_argument("--only", default="", help=f"of {', '.join(LOSSES)}: those that this regular expression finds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--on-policy", action="store_true", help="learn from what the student writes")
    parser.add_argument("--quality", type=float, metavar="SECONDS", help="of steps that each one trains")
    parser.add_argument("--teacher", default="smollm2", help="a folder, or a name that teacher.path takes")
    parser.add_argument("--layers", default=",".join(map(str, LAYERS)), help="of the teacher, for the student")
    parser.add_argument("--books", type=Path, default=HERE / "data" / "books", help="with train/ and heldout/")
    parser.add_argument("--sequences", type=int, default=4000, help="most that are learnt")
    parser.add_argument("--heldout", type=int, default=64, help="sequences that are scored")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--clip", type=float, default=1.0)


def run(options: argparse.Namespace, results: Results) -> None:
    if not options.peers:
        options.only = f"^({'|'.join(OURS)})$"
    torch.set_num_threads(options.threads)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, options)
        if options.quality is not None:
            rows = np.load(folder / HELDOUT)
            for what, model in zip(("teacher", "student before training"), pair_of(folder), strict=True):
                results.row(step=what, perplexity=perplexity(model.eval(), rows))
        for format in options.formats.split(","):
            measure(format, folder, options, results)
