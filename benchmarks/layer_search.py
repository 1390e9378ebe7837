"""How good a choice of layers `student.layers=auto` finds in how many seconds.

    DISTILL_DATA=DATA python -m benchmarks.headline search                        # about half an hour
    DISTILL_DATA=DATA python -m benchmarks.headline search smollm2-20 --seconds 5 30

For each pair and each limit of `student.search_seconds` (and without one) a run searches layers, takes one step whose
learning rate is next to nothing, and scores the student on books that the search has not seen. The rules are scored by
the search itself. The rows of SmolLM2 need the packages that docs/how-to/students.md names.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from benchmarks.common import Results, digest_of, execute
from distill.runs.facts import ChosenLayers
from distill.runs.record import Record

COMMON = ["train.epochs=null", "train.steps=1", "optimizer.lr=1e-12", "schedule.warmup=0", "student.layers=auto"]
COMMON += ["evaluate.max_sequences=64", "evaluate.pseudo_perplexity.fraction=0", "corpus.max_sequences=2000"]
SMOLLM2 = ["+recipe=distilgpt2_gutenberg", "teacher=smollm2", "evaluate.samples=0"]
PAIRS = {  # the number is that of the student's layers
    "small-2": ["+recipe=distilbert_gutenberg", "teacher=bundled_small", "student.num_layers=2"],
    "deep-3": ["+recipe=distilbert_gutenberg", "student.num_layers=3"],
    "smollm2-20": [*SMOLLM2, "student.num_layers=20"],
    "smollm2-10": [*SMOLLM2, "student.num_layers=10"],
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="PAIR or SETTING=VALUE", help=f"pairs: {', '.join(PAIRS)}")
    parser.add_argument("--seconds", nargs="+", type=float, default=[2.0, 10.0, 30.0, 60.0], help="limits")
    parser.add_argument("--work", type=Path, default=Path("runs/layer_search"), help="folder of the runs")


def run(options: argparse.Namespace, results: Results) -> None:
    settings = [word for word in options.words if "=" in word]
    for name in [word for word in options.words if "=" not in word] or PAIRS:
        for limit in [*options.seconds, None]:
            limited = f"student.search_seconds={'null' if limit is None else limit}"
            arguments = [*PAIRS[name], *COMMON, limited, *settings]
            folder = (options.work / f"{name}-{digest_of(arguments)}").resolve()
            results.row(pair=name, limit=limit, **found(Record.from_json(execute(folder, arguments))))


def found(record: Record) -> dict[str, Any]:
    """Seconds, choices and perplexities of a search: where it chose, and on unseen text."""
    search = record.student.start.search
    assert search is not None and search.teacher is not None and search.best[0].loss is not None
    rule = min(search.by_rule, key=lambda choice: choice.loss or math.inf, default=ChosenLayers())
    unseen = {data: record.student.score("perplexity", data) for data in record.sets_of("perplexity")}
    return {
        "seconds": search.seconds,
        "choices": search.tried,
        "perplexity": math.exp(search.best[0].loss),
        "of_teacher": math.exp(search.teacher),
        **{f"on_{data}": score for data, score in unseen.items()},
        "best_rule": ", ".join(rule.rules),
        "of_best_rule": math.exp(min(rule.loss, 700)) if rule.loss else None,
        "layers": search.layers,
    }
