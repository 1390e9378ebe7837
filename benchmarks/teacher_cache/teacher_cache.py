"""What a teacher cache costs and saves: bytes a token, time, and the student's perplexity against the live teacher's.

    DISTILL_DATA=DATA python benchmarks/teacher_cache/teacher_cache.py --work DIR --seeds 3 --json teacher_cache.json
    python benchmarks/teacher_cache/teacher_cache.py --work DIR --pairs masked --only live "top 64" "63 draws" \\
        [corpus.max_sequences=2000 ...]
    python benchmarks/teacher_cache/teacher_cache.py --work DIR --pairs causal --teacher runs/gpt2_pretrain

Real runs, one after the other: the recipe `distilbert_gutenberg` (the bundled teacher, which is flat; static masks,
no cosine term) and `distilgpt2_gutenberg` (a GPT-2 of `gpt2_pretrain`, made first where no `--teacher` is given).
Those of one seed see the same rows and masks in the same order: the live teacher, the largest entries of 16 to 64
with one entry for the rest, and draws without bias at no more than half of the bytes of top 64
(`teacher_cache_runs.CACHES`). The ratio is that of perplexities to the live teacher's of the same seed. Finished runs
of the same settings are not run again; every run is appended to `DIR/lines.jsonl`. Further arguments go to every run.
`--noise STEPS` adds the table of `noise.py`.

Expected before any of it was run. The bundled teacher at T = 2 gives its 64 most probable words a quarter of the
probability, and top 64 had 20 % more perplexity than the live teacher. With K draws the variance of the estimated
probabilities is about P^2 / K for a flat rest of mass P: 0.009 for 63 draws and P = 3/4. The soft term has the weight
5 and the gradient T (q - p), so its noise has the variance 10^2 x 0.009 = 0.9 a position, and that of the words,
weight 2, has about 4 x 1. So draws should make the gradient's noise larger by a fifth or so, as if a step had a fifth
fewer rows, and cost 0.5 to 2 % of perplexity: 63 draws and 46 beside 8 exact entries alike, 16 exact ones and 30
draws a little worse, 12 draws (noise doubled) 3 to 8 % worse,
since its weights have to be stored. The causal teacher is sharper: top 64 should be within 5 %, draws within 1 %.
Training from any cache should be a third faster than from the live teacher.
"""

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import digest_of, execute, save, table
from benchmarks.teacher_cache.runs import CACHES, LIVE, Line, evaluation, pair_settings, run

HEAD = (
    "teacher",
    "bytes a token",
    "kept exactly",
    "pass of the teacher, s",
    "training, s",
    "perplexity, median",
    "lowest to highest",
    "ratio to live",
    "KL",
)
QUICK = [
    "corpus.fallback=true",  # the bundled books, without DISTILL_DATA
    "corpus.max_sequences=16",
    "corpus.sequence_length=32",
    "train={batch_size:8,accumulate:1,epochs:null,steps:2}",
    "evaluate.max_sequences=4",
]


def make_teacher(work: Path, minutes: float, settings: list[str]) -> str:
    """The run folder of the causal pair's teacher, which is trained for so long unless it is there."""
    length = ["train.epochs=null", f"train.minutes={minutes}", "train.log_every=50"]
    arguments = ["+recipe=gpt2_pretrain", *length, *settings]
    folder = work / f"gpt2-{digest_of(arguments)}"
    execute(folder, arguments)
    return str(folder)


def median(values: list[float | None], digits: int) -> str:
    found = [value for value in values if value is not None]
    return f"{statistics.median(found):,.{digits}f}" if found else ""


def cells(lines: list[Line], live: dict[int, Line]) -> list[str]:
    """The runs of one cache in a line, by the first evaluation set."""
    data = next(iter(lines[0].perplexity))
    scores = [line.perplexity[data] for line in lines]
    ratios: list[float | None] = [
        line.perplexity[data] / live[line.seed].perplexity[data] for line in lines if line.seed in live
    ]
    kept = [None if line.kept_mass is None else 100 * line.kept_mass for line in lines]
    return [
        lines[0].teacher,
        median([line.bytes_per_token for line in lines], 1),
        f"{median(kept, 1)} %" if any(value is not None for value in kept) else "",
        median([line.build_seconds for line in lines], 0),
        median([line.training_seconds for line in lines], 0),
        f"{statistics.median(scores):.2f}",
        f"{min(scores):.2f} to {max(scores):.2f}",
        median(ratios, 3),
        f"{statistics.median(line.agreement[data]['kl'] for line in lines):.3f}",
    ]


def table_of(lines: list[Line]) -> str:
    """All runs of one pair, a line for each cache."""
    live = {line.seed: line for line in lines if line.teacher == LIVE}
    found = [[line for line in lines if line.teacher == name] for name in CACHES]
    data, score = next(iter(lines[0].teacher_perplexity.items()))
    head = f"{lines[0].pair}, {data}; the teacher itself: {score:.2f}\n\n"
    return head + table(HEAD, [cells(each, live) for each in found if each])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--pairs", nargs="+", choices=("masked", "causal"), default=["masked", "causal"])
    parser.add_argument("--only", nargs="+", choices=CACHES, help="of the teachers; all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1, help="how often each row is seen")
    parser.add_argument("--teacher", help="run folder of the causal pair's teacher")
    parser.add_argument("--teacher-minutes", type=float, default=40.0, help="of training it, where none is given")
    parser.add_argument("--noise", type=int, default=0, metavar="STEPS", help="measure gradients, too")
    parser.add_argument("--quick", action="store_true", help="everything once, at a size that says nothing")
    parser.add_argument("--json", type=Path)
    options, arguments = parser.parse_known_args()
    names = [name for name in CACHES if name in (options.only or CACHES)]
    common = [*arguments, *(QUICK if options.quick else [])]
    found: list[Line] = []
    gradients: dict[str, Any] = {}
    for pair in options.pairs:
        teacher = options.teacher
        if pair == "causal" and teacher is None:
            of_students = [
                each for each in arguments if each.startswith("corpus.max_sequences=")
            ]  # a teacher sees all rows
            settings = [each for each in common if each not in of_students]
            teacher = make_teacher(options.work, options.teacher_minutes, settings)
        rows = [] if pair == "masked" or options.quick else ["corpus.max_sequences=4000"]
        length = [] if options.quick else [f"train.epochs={options.epochs}"]
        settings = [*pair_settings(pair, teacher), *evaluation(800), *rows, *length, *common]
        for seed in range(options.seeds):
            found += [run(pair, name, seed, settings, options.work) for name in names]
            print("\n" + table_of([line for line in found if line.pair == pair]), flush=True)
        if options.noise:
            from benchmarks.teacher_cache.noise import compare  # which loads torch and the models

            gradients[pair] = compare(pair, teacher, names, options.noise, 2, common)
    save(options.json, {"settings": common, "runs": [asdict(line) for line in found], "gradients": gradients})


if __name__ == "__main__":
    sys.exit(main())
