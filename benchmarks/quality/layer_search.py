"""How good a choice of layers `student.layers=auto` finds in how many seconds.

    DISTILL_DATA=DATA python benchmarks/quality/layer_search.py --json curve.json        # about half an hour
    DISTILL_DATA=DATA python benchmarks/quality/layer_search.py smollm2-20 --seconds 5 30

For each pair and each limit of `student.search_seconds` (and without one) a run searches layers, takes one step whose
learning rate is next to nothing, and scores the student on books that the search has not seen. The rules are scored by
the search itself. The rows of SmolLM2 need the packages that docs/how-to/students.md names.
"""

import argparse
import math
import os
import sys
from pathlib import Path

from benchmarks.common import digest_of, execute, save, table, title
from distill.runs.facts import ChosenLayers, LayerSearch
from distill.runs.record import Record

COMMON = ["train.epochs=null", "train.steps=1", "optimizer.lr=1e-12", "schedule.warmup=0", "student.layers=auto"]
COMMON += ["evaluate.max_sequences=64", "evaluate.pseudo_perplexity.fraction=0", "corpus.max_sequences=2000"]
SMOLLM2 = ["+recipe=distilgpt2_gutenberg", "teacher=smollm2", "evaluate.samples=0"]
PAIRS = {
    "small-2": ["+recipe=distilbert_gutenberg", "teacher=bundled_small", "student.num_layers=2"],
    "deep-3": ["+recipe=distilbert_gutenberg", "student.num_layers=3"],
    "smollm2-20": [*SMOLLM2, "student.num_layers=20"],
    "smollm2-10": [*SMOLLM2, "student.num_layers=10"],
}
TITLES = {
    "small-2": "2 of 4 layers, masked",
    "deep-3": "3 of 10 layers, masked",
    "smollm2-20": "20 of 30 layers, causal (SmolLM2-135M)",
    "smollm2-10": "10 of 30 layers, causal (SmolLM2-135M)",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=f"{', '.join(PAIRS)}; default: all")
    parser.add_argument("--seconds", nargs="+", type=float, default=[2.0, 10.0, 30.0, 60.0], help="limits")
    parser.add_argument("--work", type=Path, default=Path("runs/layer_search"), help="folder of the runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := [name for name in options.pairs if name not in PAIRS]:
        parser.error(f"there is no pair {unknown[0]}; choose among {', '.join(PAIRS)}")
    cells, measured = list[list[str]](), list[dict[str, object]]()
    for name in options.pairs or PAIRS:
        for limit in [*options.seconds, None]:
            settings = f"student.search_seconds={'null' if limit is None else limit}"
            arguments = [*PAIRS[name], *COMMON, settings]
            digest = digest_of([*arguments, os.environ.get("DISTILL_DATA", "")])
            record = Record.from_json(execute((options.work / f"{name}-{digest}").resolve(), arguments))
            cells.append(line(name, limit, record))
            search = search_of(record)
            measured.append({"pair": name, "limit": limit, "seconds": search.seconds, "layers": search.layers})
    head = ["student", "limit", "took", "choices", "perplexity where chosen", "on unseen text", "best rule", "layers"]
    print(f"{title()}\n\n{table(head, cells)}")
    save(options.json, measured)
    return 0


def search_of(record: Record) -> LayerSearch:
    search = record.student.start.search
    assert search is not None, "the run has searched no layers"
    return search


def line(name: str, limit: float | None, record: Record) -> list[str]:
    search = search_of(record)
    assert search.teacher is not None and search.best[0].loss is not None
    rule = min(search.by_rule, key=lambda choice: choice.loss or math.inf, default=ChosenLayers())
    scores = [record.student.score("perplexity", data) for data in record.sets_of("perplexity")]
    return [
        TITLES[name],
        "none" if limit is None else f"{limit:g} s",
        f"{search.seconds or 0:.1f} s",
        str(search.tried),
        f"{math.exp(search.best[0].loss):.1f} (teacher {math.exp(search.teacher):.1f})",
        ", ".join(f"{score:.1f}" for score in scores if score is not None),
        f"{math.exp(min(rule.loss, 700)):.3g} ({', '.join(rule.rules)})" if rule.loss else "not scored",
        str(search.layers).replace(" ", ""),
    ]


if __name__ == "__main__":
    sys.exit(main())
