"""The trainings that `time_to_quality.py` compares: the public example's recipe, the same tuned, and Distill's own."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import digest_of, execute
from benchmarks.step.models import Shape, layer_operations

# The example: soft targets at every position, masks smoothed by rarity, every second layer of the teacher, dropout,
# AdamW without decay. An update has 50 rows, the least that its accumulation of 50 micro-batches permits, in
# micro-batches of its 5 rows: its own 250 rows an update would take five times as long for as many updates.
EXAMPLE = {
    "masked": [
        "objective=distilbert",
        "objective.masking.mlm_probability=0.15",
        "objective.masking.smoothing=0.7",
        "student.layers=null",
        "student.dropout=0.1",
    ],
    "causal": ["objective=distilgpt2", "student.layers=null", "student.dropout=0.1"],
}
EXAMPLE_STEP = ["train.batch_size=5", "train.accumulate=10", "optimizer.lr=5e-4", "optimizer.weight_decay=0"]
# With a budget of tuning of its own: the step, the layers, and of its settings those that need no other code.
TUNED = {
    "masked": [
        "objective=distilbert",
        "objective.masking.mlm_probability=0.15",
        "objective.masking.smoothing=0",
        "student.layers=auto",
        "student.dropout=0",
    ],
    "causal": ["objective=distilgpt2", "student.layers=auto", "student.dropout=0"],
}
TUNED_STEPS = [
    [f"train.batch_size={rows}", "train.accumulate=1", f"optimizer.lr={lr}", "optimizer.weight_decay=0"]
    for rows in (8, 16)
    for lr in ("1e-3", "2e-3")
]
RECIPES = {"masked": "distilbert_gutenberg", "causal": "distilgpt2_gutenberg"}
UPDATES = 1000  # of the example, at least
POINTS = 12  # at which a run is scored


@dataclass(frozen=True)
class Contestant:
    """A recipe that trains students of one pair."""

    name: str
    settings: tuple[str, ...]
    plain: bool  # timed by the plain step


@dataclass(frozen=True)
class Course:
    """How the perplexity of one run fell."""

    rows: list[int]  # seen in training, at each point
    perplexity: list[float]
    teacher: float
    seconds: list[float]  # of training, on a machine that was perhaps busy
    training: float  # seconds of the whole training, likewise

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


def contestants(kind: str, rows: int) -> list[Contestant]:
    """The first is what all others are compared with; `rows`: of a short training."""
    short = [f"corpus.max_sequences={rows}", "train.epochs=1"]
    example = [
        *EXAMPLE[kind],
        *EXAMPLE_STEP,
        "corpus.max_sequences=null",
        "train.epochs=null",
        f"train.steps={UPDATES}",
    ]
    tuned = [
        Contestant(f"example, tuned {number}", (*TUNED[kind], *step, *short), True)
        for number, step in enumerate(TUNED_STEPS)
    ]
    return [Contestant("example", tuple(example), True), *tuned, Contestant("distill", tuple(short), False)]


def scored(rows: int, updates: int) -> list[str]:
    """Scores on unseen books where there are any, at a dozen points of a run."""
    sets = "[books]" if os.environ.get("DISTILL_DATA") else "[heldout]"
    return [
        f"evaluate.sets={sets}",
        f"evaluate.max_sequences={rows}",
        f"evaluate.every_steps={max(1, updates // POINTS)}",
        "evaluate.pseudo_perplexity.fraction=0",
    ]


def rows_per_step(contestant: Contestant) -> int:
    given = dict(each.split("=", 1) for each in contestant.settings)
    return int(given.get("train.batch_size", 8)) * int(given.get("train.accumulate", 1))


def updates_of(contestant: Contestant) -> int:
    """How many steps a run takes."""
    given = dict(each.split("=", 1) for each in contestant.settings)
    if "train.steps" in given:
        return int(given["train.steps"])
    return -(-int(given["corpus.max_sequences"]) // rows_per_step(contestant))


def course(kind: str, contestant: Contestant, seed: int, work: Path, common: list[str], score_rows: int) -> Course:
    """One run, which is trained unless it is there."""
    updates = updates_of(contestant)
    arguments = [f"+recipe={RECIPES[kind]}", *contestant.settings, *scored(score_rows, updates), *common]
    arguments.append(f"seed={seed}")
    folder = work / kind / f"{contestant.name.replace(',', '').replace(' ', '-')}-seed{seed}-{digest_of(arguments)}"
    content = execute(folder, arguments)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    data, teacher = next(iter(content["teacher"]["perplexity"].items()))
    points = [line for line in lines if data in line.get("perplexity", {})]
    return Course(
        [line["step"] * rows_per_step(contestant) for line in points],
        [line["perplexity"][data] for line in points],
        teacher,
        [line["seconds"] for line in points],
        content["training"]["seconds"],
    )


def operations_of_row(shape: Shape, masked: float, all_rows: bool) -> float:
    """Matrix operations that a training spends on a row: the teacher's forward, the student's and its backward.

    Args:
        masked: the share of the positions at which a word is predicted.
        all_rows: whether both heads work at every position.
    """
    seen = shape.tokens / 2 if shape.documents else shape.tokens
    layer = layer_operations(shape.width, 4 * shape.width, seen)
    heads = shape.tokens * (1.0 if all_rows or shape.documents else masked)
    head = 2 * shape.width * (shape.vocabulary + (0 if shape.documents else shape.width))
    return shape.tokens * layer * (shape.teacher_layers + 3 * shape.student_layers) + 4 * heads * head


def shape_of(teacher: dict[str, Any], student_layers: int, rows: int, tokens: int) -> Shape:
    """The shape of a pair by the config.json of its teacher."""
    causal = "n_layer" in teacher
    layers, width = (
        (teacher["n_layer"], teacher["n_embd"]) if causal else (teacher["num_hidden_layers"], teacher["hidden_size"])
    )
    return Shape(layers, student_layers, width, teacher["vocab_size"], rows, tokens, documents=int(causal))
