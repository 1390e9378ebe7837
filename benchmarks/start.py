"""How fast a small BERT starts to learn from context: random weights against heads that look at neighbouring words.

    python benchmarks/start.py --steps 600 --json start.json [corpus.path=BOOKS ...]

Trains the recipe `bert_pretrain` twice, with `student.init=random` and `student.init=neighbours`, alike in everything
else, and prints the mean MLM loss of both after every tenth of the steps. Further arguments go to both runs; without
corpus.path the corpus is the docstrings of the installed packages.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TENTHS = 10


def losses(start: str, steps: int, folder: Path, arguments: list[str]) -> list[dict[str, float]]:
    """Step, tokens and mean loss since the point before, ten times over the run."""
    settings = [
        f"student.init={start}",
        "train={batch_size:16,accumulate:1,epochs:null}",
        f"train.steps={steps}",
        f"train.log_every={steps // TENTHS}",
        f"train.save_every={steps}",
        "schedule=constant",
        "evaluate={sets:[heldout],max_sequences:32}",
        f"hydra.run.dir={folder / start}",
    ]
    corpus = arguments if any(a.startswith("corpus.path") for a in arguments) else ["corpus=prose", *arguments]
    subprocess.run([sys.executable, "-m", "distill", "+recipe=bert_pretrain", *settings, *corpus], check=True)
    lines = (folder / start / "metrics.jsonl").read_text().splitlines()
    return [{key: json.loads(line)[key] for key in ("step", "tokens", "loss/mlm")} for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path)
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        curves = {s: losses(s, options.steps, Path(folder), arguments) for s in ("random", "neighbours")}
    print("\n| tokens | loss, random start | loss, neighbours |\n| ---: | ---: | ---: |")
    for random, neighbours in zip(*curves.values(), strict=True):
        print(f"| {random['tokens']:,} | {random['loss/mlm']:.2f} | {neighbours['loss/mlm']:.2f} |")
    if options.json:
        options.json.write_text(json.dumps(curves, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
