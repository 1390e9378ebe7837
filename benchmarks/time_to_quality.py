"""How long a training takes until its student is so good: the public example's recipe against Distill's.

    DISTILL_DATA=DATA python -m benchmarks.headline time --seeds 3
    python -m benchmarks.headline time --turns 0                 # trainings alone, on a busy machine
    python -m benchmarks.headline time --teacher distill/teacher/bundled_deep --student-layers 3
    python -m benchmarks.headline time --pair causal --teacher runs/gpt2_pretrain corpus.path=BOOKS

Three kinds of recipe train students of the same teacher on the same books, and are scored on the same unseen ones:
the example's as it stands (1,000 updates), the example's with an equal budget of tuning (layers, rows of an update,
learning rate; the best of four is named), and Distill's defaults. Every training is a real run by `python -m distill`,
in Distill's step, which gives the example's gradients to 1e-10 (`tests/objective`); what is counted is its rows. The
time of a row is measured apart, on a quiet machine and in turns (`--turns`): of the example its own step, in the
re-implementation of `step/training.py` (full logits of both models, fp32), of Distill a run. So the example's time is
rows times seconds a row, and nobody waits for it.

Targets are the final perplexities of the example and of the best tuned one, the largest of the seeds, and the teacher's
times 1.25, 1.1, 1.05 and 1.03. Between two scores of a run the logarithm of perplexity is taken for a straight line.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Results, digest_of, execute
from benchmarks.step.models import Shape, batches, make_student, make_teacher
from benchmarks.step.training import Variant, train_plainly
from benchmarks.step.turns import WARM_UP, Over, Turns, Worker
from distill.config.settings import PrecisionConfig
from distill.models.teacher import bundled_folder

# Soft targets at every position, masks smoothed by rarity, every second layer of the teacher, dropout, AdamW without
# decay. An update has 50 rows, the least that the example's accumulation of 50 micro-batches permits, in micro-batches
# of its 5 rows: its own 250 rows an update would take five times as long for as many updates.
MASKED = ("objective=distilbert", "objective.masking.mlm_probability=0.15")
EXAMPLE = {
    "masked": (*MASKED, "objective.masking.smoothing=0.7", "student.layers=null", "student.dropout=0.1"),
    "causal": ("objective=distilgpt2", "student.layers=null", "student.dropout=0.1"),
}
EXAMPLE_ROWS, EXAMPLE_ACCUMULATE = 5, 10
# With a budget of tuning of its own: the step, the layers, and of its settings those that need no other code.
TUNED = {
    "masked": (*MASKED, "objective.masking.smoothing=0", "student.layers=auto", "student.dropout=0"),
    "causal": ("objective=distilgpt2", "student.layers=auto", "student.dropout=0"),
}
TUNED_STEPS = tuple(itertools.product((8, 16), ("1e-3", "2e-3")))  # rows of an update, learning rate
RECIPES = {"masked": "distilbert_gutenberg", "causal": "distilgpt2_gutenberg"}
UPDATES = 1000  # of the example, at least
POINTS = 12  # at which a run is scored
TARGETS = (1.25, 1.1, 1.05, 1.03)
QUICK = ["corpus.sequence_length=32", "evaluate.max_sequences=16"]


@dataclass(frozen=True)
class Contestant:
    """A recipe that trains students of one pair."""

    name: str
    settings: tuple[str, ...]
    rows: int  # of an update
    updates: int
    plain: bool  # timed by the plain step


@dataclass(frozen=True)
class Course:
    """How the perplexity of one run fell."""

    rows: list[int]  # seen in training, at each point
    perplexity: list[float]
    teacher: float

    def rows_to(self, target: float) -> float | None:
        """Rows until the perplexity is reached, between two points by a straight line of its logarithm."""
        before: tuple[float, float] | None = None
        for rows, value in zip(self.rows, self.perplexity, strict=True):
            if value <= target:
                if before is None:
                    return float(rows)
                share = math.log(before[1] / target) / math.log(before[1] / value)
                return before[0] + share * (rows - before[0])
            before = (rows, value)
        return None


def contestants(kind: str, rows: int, updates: int = UPDATES) -> list[Contestant]:
    """The first is what all others are compared with; `rows`: of a short training, `updates`: of the example."""

    def step(rows: int, accumulate: int, lr: str) -> tuple[str, ...]:
        sizes = (f"train.batch_size={rows}", f"train.accumulate={accumulate}")
        return (*sizes, f"optimizer.lr={lr}", "optimizer.weight_decay=0")

    short = (f"corpus.max_sequences={rows}", "train.epochs=1")
    long = ("corpus.max_sequences=null", "train.epochs=null", f"train.steps={updates}")
    first = (*EXAMPLE[kind], *step(EXAMPLE_ROWS, EXAMPLE_ACCUMULATE, "5e-4"), *long)
    tuned = [
        Contestant(f"example, tuned {n}", (*TUNED[kind], *step(size, 1, lr), *short), size, -(-rows // size), True)
        for n, (size, lr) in enumerate(TUNED_STEPS)
    ]
    example = Contestant("example", first, EXAMPLE_ROWS * EXAMPLE_ACCUMULATE, updates, True)
    return [example, *tuned, Contestant("distill", short, 8, -(-rows // 8), False)]


def course(kind: str, contestant: Contestant, seed: int, options: argparse.Namespace, common: list[str]) -> Course:
    """One run, which is trained unless it is there, scored on unseen books at a dozen points."""
    arguments = [f"+recipe={RECIPES[kind]}", *contestant.settings]
    arguments.append(f"evaluate.sets=[{'books' if os.environ.get('DISTILL_DATA') else 'heldout'}]")
    arguments += [f"evaluate.max_sequences={options.score_rows}", "evaluate.pseudo_perplexity.fraction=0"]
    arguments += [f"evaluate.every_steps={max(1, contestant.updates // POINTS)}", *common, f"seed={seed}"]
    name = contestant.name.replace(",", "").replace(" ", "-")
    folder = options.work / kind / f"{name}-seed{seed}-{digest_of(arguments)}"
    content = execute(folder, arguments)
    data, teacher = next(iter(content["teacher"]["perplexity"].items()))
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    points = [line for line in lines if data in line.get("perplexity", {})]
    rows = [line["step"] * contestant.rows for line in points]
    return Course(rows, [line["perplexity"][data] for line in points], teacher)


def train(job: tuple[Shape, int], turns: Turns) -> None:
    """The plain step in a process of its own, for so many updates."""
    shape, updates = job
    device = torch.device("cpu")
    variant = Variant("plain", "targets" if shape.documents else "all", PrecisionConfig(), plain=True)
    pair, steps = (make_teacher(shape, device), make_student(shape, device)), WARM_UP + updates + 1
    with suppress(Over):
        train_plainly(batches(shape, EXAMPLE_ACCUMULATE, steps), pair, variant, steps, turns.after_step)


def plain_seconds(shape: Shape, updates: int) -> float:
    """Seconds a row of the example's step."""
    worker = Worker("benchmarks.time_to_quality:train", (shape, updates))
    times = [worker.step() for _ in range(updates)]
    worker.end()
    return statistics.median(times) / (EXAMPLE_ACCUMULATE * shape.rows)


def distill_seconds(kind: str, own: Contestant, folder: Path, common: list[str], steps: int) -> float:
    """Seconds a row of a short run of Distill; its first steps, which compile, are left out."""
    short = ["train.epochs=null", f"train.steps={steps}", "train.log_every=1", "evaluate.max_sequences=4"]
    short += ["evaluate.pseudo_perplexity.fraction=0", "evaluate.sets=[heldout]"]
    execute(folder, [f"+recipe={RECIPES[kind]}", *own.settings, *common, *short])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [after["seconds"] - before["seconds"] for before, after in itertools.pairwise(lines)]
    return statistics.median(seconds[len(seconds) // 3 :]) / own.rows


def rates(kind: str, shape: Shape, options: argparse.Namespace, common: list[str]) -> dict[str, list[float]]:
    """Seconds a row of both steps in turns; those of before where `turns` is 0."""
    own = contestants(kind, options.rows)[-1]
    path = options.work / f"rates-{kind}-{digest_of([str(shape), *own.settings, *common])}.json"
    if options.turns:
        found: dict[str, list[float]] = {"plain": [], "distill": []}
        for _ in range(options.turns):
            folder = options.work / "rates" / f"{kind}-{time.time_ns()}"
            found["plain"].append(plain_seconds(shape, 3 if options.quick else 12))
            found["distill"].append(distill_seconds(kind, own, folder, common, 6 if options.quick else 150))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def final(found: list[Course]) -> float:
    """The median perplexity at the end."""
    return statistics.median(each.perplexity[-1] for each in found)


def targets_of(courses: dict[str, list[Course]]) -> tuple[list[str], dict[str, float]]:
    """The example as it stands, its best tuned relative, and Distill; and the perplexities that are to be reached."""
    tuned = [name for name in courses if "tuned" in name]
    best = min(tuned, key=lambda name: final(courses[name]), default=None)
    kept = [name for name in courses if "tuned" not in name or name == best]
    teacher = next(iter(courses.values()))[0].teacher
    # The worst of the seeds, so that a recipe reaches its own end with each.
    ends = {name: max(each.perplexity[-1] for each in courses[name]) for name in kept if name != "distill"}
    targets = {f"the end of {name}": value for name, value in ends.items()}
    return kept, targets | {f"{factor} x the teacher": factor * teacher for factor in TARGETS}


def reached(kind: str, courses: dict[str, list[Course]], seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Rows and seconds of each recipe to each target; none where a seed has not reached it."""
    kept, targets = targets_of(courses)
    lines = list[dict[str, Any]]()
    for (target, value), name in itertools.product(targets.items(), kept):
        line = {"pair": kind, "until": target, "perplexity": value, "recipe": name}
        rows = [each.rows_to(value) for each in courses[name]]
        of = "distill" if name == "distill" else "plain"
        if all(each is not None for each in rows):
            line["rows"] = statistics.median(each for each in rows if each is not None)
            if of in seconds:
                line["seconds"] = line["rows"] * statistics.median(seconds[of])
        lines.append(line)
    return lines


def shape_of(folder: Path, student_layers: int | None, tokens: int) -> Shape:
    """The shape of a pair by the config.json of its teacher, in micro-batches of the example."""
    config = next(path for path in (folder / "student/config.json", folder / "config.json") if path.is_file())
    teacher = json.loads(config.read_text())
    causal = "n_layer" in teacher
    names = ("n_layer", "n_embd") if causal else ("num_hidden_layers", "hidden_size")
    layers, width = (teacher[name] for name in names)
    sizes = teacher["vocab_size"], EXAMPLE_ROWS, tokens
    return Shape(layers, student_layers or layers // 2, width, *sizes, documents=int(causal))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="SETTING=VALUE", help="of every run")
    parser.add_argument("--work", type=Path, default=Path("runs/time_to_quality"), help="folder of the runs")
    parser.add_argument("--pair", choices=("masked", "causal"), default="masked")
    parser.add_argument("--teacher", type=Path, help="folder of a teacher, by default the small bundled one")
    parser.add_argument("--student-layers", type=int, help="by default half of the teacher's")
    parser.add_argument("--only", nargs="+", default=["*"], help="of the recipes; * stands for anything")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=5000, help="of a short training, for the tuned example and Distill")
    parser.add_argument("--score-rows", type=int, default=300)
    parser.add_argument("--turns", type=int, default=3, help="of measuring the time of a row; 0: take those of before")
    parser.add_argument("--quick", action="store_true", help="everything once, at a size that says nothing")


def run(options: argparse.Namespace, results: Results) -> None:
    kind, common, updates = options.pair, list(options.words), UPDATES
    options.work = options.work.resolve()
    if kind == "causal" and options.teacher is None:
        raise SystemExit("--pair causal needs --teacher")
    common += [f"teacher.path={options.teacher}" if options.teacher else "teacher=bundled_small"]
    common += [f"student.num_layers={options.student_layers}"] if options.student_layers else []
    if options.quick:
        common += [*QUICK]
        options.rows, options.score_rows, options.seeds, options.only = 64, 4, 1, ["example", "distill"]
        updates = 2
    folder = options.teacher or Path(bundled_folder("bundled_small"))
    shape = shape_of(folder, options.student_layers, 32 if options.quick else 128)
    seconds = rates(kind, shape, options, common)
    results.row(pair=kind, shape=str(shape), **{f"{name}_seconds": value for name, value in seconds.items()})
    courses: dict[str, list[Course]] = {}
    for seed in range(options.seeds):
        for each in contestants(kind, options.rows, updates):
            if any(fnmatch(each.name, name) for name in options.only):
                found = course(kind, each, seed, options, common)
                courses.setdefault(each.name, []).append(found)
                results.row(
                    pair=kind,
                    recipe=each.name,
                    seed=seed,
                    rows=found.rows[-1],
                    perplexity=found.perplexity[-1],
                    of_teacher=found.perplexity[-1] / found.teacher,
                    points=list(zip(found.rows, found.perplexity, strict=True)),
                )
    for line in reached(kind, courses, seconds):
        results.row(**line)
