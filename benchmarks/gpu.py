"""Everything that wants a GPU, in one go: the tests on it, then the tables of the other scripts, in at most 20 minutes.

    python benchmarks/gpu.py --folder runs/gpu

The parts run one after the other, the most important ones first; what each prints is kept in a file of the folder. When
the time is over the rest is left out, and said to be. With two GPUs or more the exchange of gradients is measured
too. `--device cpu` tries the script itself, in small.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import table, title

ROOT = Path(__file__).resolve().parent.parent


class Part(NamedTuple):
    """One command; `minutes` is what it may take at most."""

    name: str
    minutes: float
    command: list[str]


def script(name: str, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options]


def tests(marker: str) -> list[str]:
    return [sys.executable, "-m", "pytest", str(ROOT / "tests"), "-m", marker]


def run(folder: Path, *overrides: str) -> list[str]:
    fixed = ["+recipe=distilbert_gutenberg", f"hydra.run.dir={folder}"]
    return [sys.executable, "-m", "distill", *fixed, *overrides]


def parts(folder: Path, device: str) -> list[Part]:
    """What runs, in this order."""
    if device == "cpu":
        small = run(
            folder / "run", "corpus.max_sequences=64", "train.steps=2", "evaluate.max_sequences=8", "backend.device=cpu"
        )
        step = script("step/step", "--shapes", "tiny", "--rows", "masked", "--only", "fp32", "--device", "cpu")
        return [Part("a run", 3, small), Part("the step", 3, step)]
    found = [
        Part("tests on the GPU", 4, tests("gpu")),
        Part("tests on fake CUDA tensors", 2, tests("cuda_build")),
        Part("the main job", 3, run(folder / "run", "backend.device=cuda")),
        Part("the step, 16 x 512", 4, script("step/step", "--shapes", "base-512", "--json", str(folder / "step.json"))),
        Part("the step, 8 x 128, models compiled too", 3, script("step/step", "--shapes", "base", "--compile")),
        Part("the objective alone", 2, script("step/objective")),
        Part("pseudo-perplexity", 4, script("step/pppl")),
    ]
    if torch.cuda.device_count() > 1:
        ranks = ["backend=ddp", f"backend.processes={torch.cuda.device_count()}", "evaluate.every_epoch=false"]
        found.insert(4, Part("the main job on all GPUs", 3, run(folder / "ranks", *ranks)))
    return found


def execute(part: Part, log: Path, seconds: float) -> str:
    """Run one part, show and keep what it prints; how it ended, in a word or two."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        try:
            done = subprocess.run(
                part.command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=seconds
            )
            ended = "done" if done.returncode == 0 else f"failed ({done.returncode})"
        except subprocess.TimeoutExpired:
            ended = "took too long"
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--minutes", type=float, default=20.0, help="after which nothing more is begun")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here, or torch is a CPU build: --device cpu tries the script itself.", file=sys.stderr)
        return 2
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        print(f"{folder} is not empty: give another --folder", file=sys.stderr)
        return 2
    print(title(), flush=True)
    began, lines = time.monotonic(), []
    for number, part in enumerate(parts(folder, options.device)):
        left = 60 * options.minutes - (time.monotonic() - began)
        if left < 10:
            lines.append([part.name, "left out", "0", "-"])
            continue
        log = folder / f"{number}.txt"
        print(f"\n## {part.name}\n", flush=True)
        start = time.monotonic()
        ended = execute(part, log, min(60 * part.minutes, left))
        lines.append([part.name, ended, f"{time.monotonic() - start:.0f}", str(log)])
        print(log.read_text(errors="replace"), flush=True)
    print(f"\n{table(['part', 'ended', 'seconds', 'output'], lines)}")
    return int(any(ended != "done" for _, ended, _, _ in lines))


if __name__ == "__main__":
    sys.exit(main())
