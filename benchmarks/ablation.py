"""What each setting of a short distillation is worth: one change at a time of DistilBERT's weights at masked positions.

    export DISTILL_DATA=DATA
    python benchmarks/ablation.py --work DIR corpus.max_sequences=3000 backend.threads=1 --json ablation.json
    python benchmarks/ablation.py --work DIR --only "base" --only "temperature 1"

Every row is a real run of `python -m distill +recipe=distilbert_gutenberg` with the settings that `CHANGES` names;
further settings of the command line hold for all rows. `BASE` is what the recipe was before this table was made.
Choices are made by the perplexity on held-out text of the corpus, and confirmed by that on books which no choice was
made on. Finished runs are not run again.

Expected before it was run, at 3,000 rows once, bundled pair: temperature 1 and a smaller weight of the words' own
term each gain 1 to 3 % on held-out text and less on the books; soft targets at every position and smoothed masks lose
2 to 15 %; every second layer is the worst row but the baseline; frozen lower layers lose less than 2 % and are quicker;
draws of a cache cost 2 %.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from machine import save, table, title
from teacher_cache_runs import digest_of, execute

BASE = ("teacher=bundled_small", "objective=masked", "student.layers=[0,1]")
CACHED = ("objective.masking.static=true", "objective.cosine.weight=0")
CHANGES: dict[str, tuple[str, ...]] = {
    "base": (),
    "temperature 1": ("objective.temperature=1",),
    "mlm weight 0.5": ("objective.mlm.weight=0.5",),
    "temperature 1, mlm 0.5": ("objective.temperature=1", "objective.mlm.weight=0.5"),
    "temperature 1, mlm 0": ("objective.temperature=1", "objective.mlm.weight=0"),
    "mlm weight 0": ("objective.mlm.weight=0",),
    "cosine weight 0": ("objective.cosine.weight=0",),
    "cosine at masked rows": ("objective.cosine.positions=masked",),
    "soft targets at all positions": ("objective.soft.positions=all",),
    "masked share 0.15": ("objective.masking.mlm_probability=0.15",),
    "masks smoothed 0.7": ("objective.masking.smoothing=0.7",),
    "every second layer": ("student.layers=null",),
    "layers chosen by scores": ("student.layers=auto",),
    "frozen embeddings and layer 0": ("student.frozen=[embeddings,0]",),
    "frozen, learning rate 2e-3": ("student.frozen=[embeddings,0]", "optimizer.lr=2e-3"),
    "learning rate 2e-3": ("optimizer.lr=2e-3",),
    "learning rate 5e-4": ("optimizer.lr=5e-4",),
    "16 rows a step": ("train.sequences_per_step=16", "train.batch_size=16"),
    "16 rows, learning rate 2e-3": ("train.sequences_per_step=16", "train.batch_size=16", "optimizer.lr=2e-3"),
    "4 rows a step": ("train.sequences_per_step=4", "train.batch_size=4"),
    "static masks, no cosine": CACHED,
    "cache of 63 draws": (*CACHED, "teacher.cache.sampled=63"),
    **{
        f"soft targets at {share} of the positions, {how}": (
            "objective.soft.weight=0",
            f"objective.picked={{_target_: ablation_terms.SoftAt{name}, weight: 5, share: {share}, temperature: 2}}",
        )
        for how, name in (("at random", "Random"), ("highest entropy", "Entropy"))
        for share in (0.3, 0.1)
    },
    "a third of the rows, three times": ("corpus.max_sequences=1000", "train.epochs=3", "objective.cosine.weight=0"),
    "the same, one stored set of masks": ("corpus.max_sequences=1000", "train.epochs=3", *CACHED),
    "no teacher": ("objective=mlm", "objective.masking.mlm_probability=0.3", "objective.masking.smoothing=0"),
}

# Two runs instead of one, each of half of the tokens, of which the second goes on from the student of the first.
HALVES: dict[str, tuple[str, ...]] = {
    "two halves": (),
    "two halves, rows of 64 tokens first": ("corpus.sequence_length=64",),
    "two halves, 4 rows a step first": ("train.sequences_per_step=4", "train.batch_size=4"),
}


def arguments_of(name: str, seed: int, rows: int, common: list[str]) -> list[str]:
    sets = "[heldout,books]" if os.environ.get("DISTILL_DATA") else "[heldout]"
    scores = [f"evaluate.sets={sets}", f"evaluate.max_sequences={rows}", "evaluate.pseudo_perplexity.fraction=0"]
    scores += ["evaluate.curve.points=0", "evaluate.every_epoch=false"]
    return ["+recipe=distilbert_gutenberg", *BASE, *scores, *common, *CHANGES[name], f"seed={seed}"]


def run(name: str, seed: int, rows: int, common: list[str], work: Path) -> dict[str, Any]:
    """What one run has to say for the table."""
    arguments = arguments_of(name, seed, rows, common)
    content = execute(folder_of(work, name, seed, arguments), arguments)
    return line_of(name, seed, content, content["training"]["seconds"])


def run_halves(name: str, seed: int, rows: int, common: list[str], work: Path) -> dict[str, Any]:
    """The same of two runs, one after the other."""
    given = [word.removeprefix("corpus.max_sequences=") for word in common if word.startswith("corpus.max_sequences=")]
    total = int(given[-1]) if given else 5000
    longer = 2 if "corpus.sequence_length=64" in HALVES[name] else 1
    base = arguments_of("base", seed, rows, common)
    first = [*base, "schedule=constant", f"corpus.max_sequences={longer * total // 2}", *HALVES[name]]
    folder = folder_of(work, f"{name} first", seed, first)
    before = execute(folder, first)["training"]["seconds"]
    second = [word for word in base if not word.startswith("student.layers")]
    second += ["schedule.warmup=0", f"corpus.max_sequences={total // 2}", f"seed={seed + 100}"]
    second += ["student=pretrained", f"student.path={folder}", "student.dropout=0"]
    content = execute(folder_of(work, f"{name} second", seed, second), second)
    return line_of(name, seed, content, before + content["training"]["seconds"])


def folder_of(work: Path, name: str, seed: int, arguments: list[str]) -> Path:
    plain = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name)
    return work / f"{plain}-seed{seed}-{digest_of(arguments)}"


def line_of(name: str, seed: int, content: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Of a run's results, what the table needs."""
    return {
        "change": name,
        "seed": seed,
        "training_seconds": seconds,
        "perplexity": content["student"]["perplexity"],
        "teacher": (content["teacher"] or {}).get("perplexity", {}),
    }


def show(lines: list[dict[str, Any]], base: str) -> str:
    """Medians over seeds; ratios are of the same seeds' row `base`, where that was run."""
    names = list(dict.fromkeys(line["change"] for line in lines))
    sets = list(lines[0]["perplexity"])
    bases = {line["seed"]: line["perplexity"] for line in lines if line["change"] == base}
    rows = []
    for name in names:
        found = [line for line in lines if line["change"] == name]
        cells = [name, str(len(found))]
        for data in sets:
            cells.append(f"{statistics.median(line['perplexity'][data] for line in found):.2f}")
            ratios = [line["perplexity"][data] / bases[line["seed"]][data] for line in found if line["seed"] in bases]
            cells.append(f"{statistics.median(ratios):.3f}" if ratios else "")
        rows.append([*cells, f"{statistics.median(line['training_seconds'] for line in found):.0f}"])
    columns = [column for data in sets for column in (f"perplexity, {data}", "ratio")]
    return table(["change", "seeds", *columns, "training s"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--only",
        action="append",
        choices=[*CHANGES, *HALVES],
        help="one of the changes; may be repeated",
        metavar="CHANGE",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--score-rows", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options, common = parser.parse_known_args()
    lines: list[dict[str, Any]] = []
    # Where the runs find `ablation_terms`.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    for seed in options.seeds:
        for name in options.only or [*CHANGES, *HALVES]:
            run_it = run_halves if name in HALVES else run
            lines.append(run_it(name, seed, options.score_rows, common, options.work))
            print("\n" + show(lines, next(iter(CHANGES))), flush=True)
    save(options.json, {"machine": title(), "settings": common, "runs": lines})


if __name__ == "__main__":
    sys.exit(main())
