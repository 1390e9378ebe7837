"""Distill's step against what a user would take instead, on the same pair, sequences and machine, in turns.

    python -m venv PEERS                              # an environment of their own
    PEERS/bin/pip install trl==1.16.0 transformers==5.23.0 torch==2.13.0 \
        --extra-index-url https://download.pytorch.org/whl/cpu
    python benchmarks/step/peers.py --peers PEERS/bin/python
    python benchmarks/step/peers.py --peers PEERS/bin/python --formats bf16 --quality 600

The pair is SmolLM2-135M-Instruct (`teacher=smollm2`, whose packages `docs/how-to/students.md` names) and a student of
20 of its 30 layers. The loss is the forward divergence alone, at temperature 1. Distill's step is that of a run, and
the others are in `trl_steps.py`. Each variant has a process of its own. Memory is the peak of a process after two steps
that warm up. bf16 is autocast with fp32 weights, but for the teacher's: all keep them in bf16, as its file has them.
The floor is the time that the step's matrix products take by themselves (`products.py`), between the rounds.

With --quality the variants take turns until each has had so many seconds of steps, and are then scored: perplexity on
held-out sequences.
"""

import argparse
import math
import re
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import save, table, title
from benchmarks.step.distill_steps import pair_of
from benchmarks.step.products import Floor, products
from benchmarks.step.turns import SEQUENCES, STUDENT, TEACHER, Job, start
from distill.config import HERE
from distill.config.settings import StudentConfig, TeacherConfig
from distill.data.sources.gutenberg import books
from distill.models.kind import CAUSAL
from distill.models.student import make_student
from distill.models.teacher import load_teacher

LAYERS = [0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 19, 20, 21, 22, 23, 24, 25, 27, 28, 29]
LOSSES = ("distill", "trl", "trl-chunked", "distillkit")
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
HELDOUT = "heldout.npy"


@dataclass
class Result:
    """A variant's numbers; times of its steps by round."""

    format: str
    loss: str
    tokens: int  # of a step
    seconds: list[float] = field(default_factory=list)
    floor: float = 0.0  # seconds
    peak: int = 0  # bytes
    state: int = 0  # bytes of it that weights and the optimizer's state take
    versions: dict[str, str] = field(default_factory=dict)
    perplexity: float | None = None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / statistics.median(self.seconds)


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


def measure(jobs: list[Job], options: argparse.Namespace, floor: Floor) -> list[Result]:
    """All variants of one format take turns, and between the rounds the floor is measured."""
    started, results = [], []
    for job in jobs:
        python = sys.executable if job.loss == "distill" else options.peers
        started.append(start(python, job))
        results.append(Result(job.format, job.loss, job.batch_size * options.length))
        started[-1][0].recv()  # warm
    turns = [call for call, _ in started]

    def is_over(result: Result) -> bool:
        if options.quality is None:
            return len(result.seconds) == options.rounds
        return sum(result.seconds) >= options.quality

    while not all(map(is_over, results)):
        for call, result in zip(turns, results, strict=True):
            if not is_over(result):
                call.send(True)
                result.seconds.append(call.recv())
        if floor.rounds < options.rounds:
            floor.measure()
    for job, (call, process), result in zip(jobs, started, results, strict=True):
        call.send(weights_of(job) if options.quality is not None else None)
        ended = call.recv()
        result.peak, result.versions, result.floor = ended["peak"], ended["versions"], floor.seconds
        process.wait()
    return results


def weights_of(job: Job) -> Path:
    return job.folder / f"{job.loss}-{job.format}.pt"


def run_format(format: str, folder: Path, options: argparse.Namespace) -> list[Result]:
    """Measure the variants of a format; their perplexities, too, where quality is asked for."""
    sizes = options.batch, options.threads, options.lr, options.clip
    jobs = [Job(folder, loss, format, *sizes) for loss in LOSSES if re.search(options.only, loss)]
    teacher, student = pair_of(folder)
    floor = Floor(products(teacher, student, options.batch, options.length), FORMATS[format])
    state = sum(p.numel() for p in teacher.parameters()) * FORMATS[format].itemsize
    state += sum(p.numel() for p in student.parameters()) * 3 * 4  # weights and two moments
    results = measure(jobs, options, floor)
    for job, result in zip(jobs, results, strict=True):
        result.state = state
        if options.quality is not None:
            student.load_state_dict(torch.load(weights_of(job), weights_only=True))
            result.perplexity = perplexity(student.eval(), np.load(folder / HELDOUT))
    return results


def ratio(result: Result, results: list[Result]) -> str:
    """How many times as fast Distill is, and the least and the largest of the rounds."""
    distill = next((each for each in results if each.format == result.format and each.loss == "distill"), result)
    if distill is result:
        return "-"
    rounds = [other / own for other, own in zip(result.seconds, distill.seconds, strict=False)]
    return f"{distill.rate / result.rate:.2f} ({min(rounds):.2f} to {max(rounds):.2f})"


def report(results: list[Result], options: argparse.Namespace) -> None:
    """Print versions and the table."""
    for name in ("distill", "trl"):
        about = next((each.versions for each in results if (each.loss == "distill") == (name == "distill")), {})
        if about:
            print(f"{'Distill' if name == 'distill' else 'peers'}: {', '.join(' '.join(e) for e in about.items())}")
    head = ["step", "tokens/s", "Distill is faster by", "of the floor", "peak GB", "above weights and moments"]
    rows = [
        [
            f"{r.loss} {r.format}", f"{r.rate:.0f}", ratio(r, results), f"{r.floor * r.rate / r.tokens:.0%}",
            f"{r.peak / 1e9:.2f}", f"{(r.peak - r.state) / 1e9:.2f}",
        ]
        for r in results
    ]  # fmt: skip
    if options.quality is not None:
        head += ["steps", "perplexity"]
        rows = [[*row, str(len(r.seconds)), f"{r.perplexity:.2f}"] for row, r in zip(rows, results, strict=True)]
    print("\n" + table(head, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="the Python of the environment that has TRL; without it Distill runs alone")
    parser.add_argument("--formats", default="fp32,bf16")
    parser.add_argument("--only", default="", help=f"of {', '.join(LOSSES)}: those that this regular expression finds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quality", type=float, metavar="SECONDS", help="of steps that each variant trains")
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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.peers:
        options.only = "^distill$"
    torch.set_num_threads(options.threads)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder, formats = Path(name), options.formats.split(",")
        prepare(folder, options)
        print(title())
        if options.quality is not None:
            rows = np.load(folder / HELDOUT)
            for what, model in zip(("teacher", "student before training"), pair_of(folder), strict=True):
                print(f"{what}: perplexity {perplexity(model.eval(), rows):.2f}")
        results = [result for format in formats for result in run_format(format, folder, options)]
    report(results, options)
    save(options.json, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
