"""Quality of pairs and of mixes of losses: teacher, student and its baseline without a teacher, for two seeds each.

    DISTILL_DATA=DATA python benchmarks/pairs.py --work DIR                 # everything, about two hours on 2 cores
    DISTILL_DATA=DATA python benchmarks/pairs.py --work DIR --group causal  # one of the tables

`DATA` holds gutenberg/train, gutenberg/heldout, wikitext-2-raw/test.txt and imdb; see README.md. Every line of a table
is a run of `python -m distill` with the arguments that stand in GROUPS, one core for each seed; a run that is finished
is not run again. Scores are perplexities on unseen books and on WikiText-2 (raw test), for causal models bits per byte
too.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import save, table

SETS = ["evaluate.sets=[books,wikitext2]", "evaluate.max_sequences=800", "evaluate.pseudo_perplexity.fraction=0"]
SEEDS = (0, 1)
TEACHERS = {
    "gpt2": ["+recipe=gpt2_pretrain", "train.epochs=null", "train.minutes=40", "train.log_every=50", *SETS],
    # The small bundled teacher at home in reviews: it goes on with masked words of IMDB.
    "reviews": [
        "+recipe=bert_pretrain",
        "corpus=imdb",
        "student=pretrained",
        "student.path=BUNDLED",
        "train.batch_size=32",
        "train.accumulate=1",
        "train.epochs=null",
        "train.minutes=6",
        "optimizer.lr=5e-4",
        *SETS,
    ],
}
# The weights, temperature and layers of the published table, whatever the recipe has by now.
SMALL = "teacher=bundled_small"
BUNDLED = ["+recipe=distilbert_gutenberg", "objective=masked", "student.layers=[0,1]", *SETS]
CAUSAL = ["+recipe=distilgpt2_gutenberg", "teacher.path=TEACHER/gpt2", "corpus.max_sequences=4000", *SETS]
CAUSAL_BASELINE = ["+recipe=distilgpt2_gutenberg_baseline", *CAUSAL[1:]]
NARROW = [
    *("+recipe=distilbert_gutenberg", SMALL, "objective=masked", "student=bert", "student.init=neighbours"),
    "student.dropout=0",
    "student.config={hidden_size: 96, num_hidden_layers: 3, num_attention_heads: 4, intermediate_size: 384}",
    *("student.layers=null", "corpus.max_sequences=24000", "objective.cosine.weight=0", "optimizer.lr=2e-3", *SETS),
]
MODERN = [
    *("+recipe=distilbert_gutenberg", SMALL, "objective=masked", "student=modernbert", "student.layers=null"),
    "student.dropout=0",
    "student.config={hidden_size: 192, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 384}",
    *("corpus.max_sequences=6000", "optimizer.lr=1e-3", *SETS),
]
RELATIONS = "objective.relations={weight: 1.0, relation_heads: 12}"
BASELINE = ["objective.soft.weight=0", "objective.cosine.weight=0", "objective.mlm.weight=1"]


@dataclass(frozen=True)
class Run:
    """One line of a table: a run for each seed."""

    name: str
    arguments: list[str]


BOTH = [
    *("teacher=several", "teacher.members.books={kind: bundled_small}"),
    *("teacher.members.reviews={path: TEACHER/reviews}", "objective.cosine.weight=0"),
]
REVIEWS = ["teacher=pretrained", "teacher.path=TEACHER/reviews", "objective.cosine.weight=0"]
IMDB = "evaluate.sets=[books,wikitext2,imdb]"
GROUPS: dict[str, list[Run]] = {
    "causal": [
        Run("first half", [*CAUSAL, "student.layers=first"]),
        Run("first half, baseline", [*CAUSAL_BASELINE, "student.layers=first"]),
        Run("evenly spread", [*CAUSAL, "student.layers=even"]),
    ],
    "hidden": [
        Run("default mix", [*BUNDLED, SMALL]),
        Run("+ hidden states (MSE)", [*BUNDLED, SMALL, "objective.hidden_mse.weight=1"]),
        Run("+ relations", [*BUNDLED, SMALL, RELATIONS]),
    ],
    "narrow": [
        Run("soft + mlm", NARROW),
        Run("soft + mlm + relations", [*NARROW, RELATIONS]),
        Run("baseline: mlm", [*NARROW, *BASELINE]),
    ],
    "families": [
        Run("ModernBERT from BERT", MODERN),
        Run("baseline: mlm", [*MODERN, *BASELINE]),
    ],
    "teachers": [
        Run("the small bundled teacher", [*BUNDLED, SMALL, "objective.cosine.weight=0", IMDB]),
        Run("a teacher of reviews", [*BUNDLED, *REVIEWS, IMDB]),
        Run("both", [*BUNDLED, *BOTH, IMDB]),
    ],
}


def execute(folder: Path, arguments: list[str], teachers: Path) -> dict[str, Any]:
    """The results of a run, which is run unless it is finished."""
    from distill.models.teacher import bundled_folder

    if not (folder / "results.json").is_file():
        words = [
            word.replace("TEACHER", str(teachers)).replace("BUNDLED", bundled_folder("bundled_small"))
            for word in arguments
        ]
        command = [sys.executable, "-m", "distill", *words, f"hydra.run.dir={folder}"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.log").open("w") as log:
            print(f"{folder.name} ...", file=sys.stderr, flush=True)
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    content: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return content


def lines_of(name: str, results: list[dict[str, Any]]) -> list[str]:
    """A table line of a student: parameters, scores of both seeds, and seconds of training."""
    student = [each["student"] for each in results]
    measures = [name for name in ("perplexity", "bits_per_byte") if name in student[0]]
    cells = [name, f"{student[0]['parameters']:,}"]
    for measure in measures:
        for data in student[0][measure]:
            digits = 3 if measure == "bits_per_byte" else 1
            cells.append(", ".join(f"{each[measure][data]:.{digits}f}" for each in student))
    seconds = ", ".join(f"{each['training']['seconds']:.0f}" for each in results)
    return [*cells, seconds]


def teacher_lines(results: dict[str, Any]) -> list[list[str]]:
    """A line for the teacher of a run, where it had one."""
    teacher = results["teacher"]
    if teacher is None:
        return []
    cells = ["teacher", f"{teacher['parameters']:,}"]
    for measure, digits in (("perplexity", 1), ("bits_per_byte", 3)):
        cells += [f"{value:.{digits}f}" for value in teacher.get(measure, {}).values()]
    return [[*cells, ""]]


def group_table(group: str, work: Path) -> tuple[str, list[dict[str, Any]]]:
    """Run a group; gives its table and the results behind it."""
    rows: list[list[str]] = []
    records = []
    for number, run in enumerate(GROUPS[group]):
        folders = [work / group / f"{number}-seed{seed}" for seed in SEEDS]
        arguments = [[*run.arguments, f"seed={seed}", "backend.threads=1"] for seed in SEEDS]
        with ThreadPoolExecutor(len(SEEDS)) as pool:  # one core each
            results = list(pool.map(execute, folders, arguments, [work / "teachers"] * len(SEEDS)))
        if not rows:
            rows += teacher_lines(results[0])
            student = results[0]["student"]
            named = [m for m in ("perplexity", "bits_per_byte") if m in student]
            head = ["", "parameters", *(f"{m.replace('_', ' ')}, {data}" for m in named for data in student[m])]
        rows.append(lines_of(run.name, results))
        records += [
            {"group": group, "run": run.name, "seed": seed, "student": each["student"], "teacher": each["teacher"]}
            for seed, each in zip(SEEDS, results, strict=True)
        ]
    return table([*head, "seconds"], rows), records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--group", action="append", choices=GROUPS, help="only these tables")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    if "DISTILL_DATA" not in os.environ:
        parser.error("set DISTILL_DATA to the folder of books and evaluation sets")
    groups = options.group or list(GROUPS)
    for name, arguments in TEACHERS.items():
        if any(f"TEACHER/{name}" in word for group in groups for run in GROUPS[group] for word in run.arguments):
            execute(options.work / "teachers" / name, arguments, options.work / "teachers")
    records = []
    for group in groups:
        text, found = group_table(group, options.work)
        records += found
        print(f"\n{group}\n\n{text}\n", flush=True)
    if options.json is not None:
        save(options.json, records)


if __name__ == "__main__":
    main()
