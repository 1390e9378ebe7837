"""What a teacher cache costs and saves: bytes a token, time, and the student's perplexity against the live teacher's.

    python benchmarks/teacher_cache.py --steps 450 --epochs 3 --json teacher_cache.json [objective.temperature=1 ...]

Real runs of the recipe `distilbert_gutenberg` at the embedded scale, without the cosine term, one after the other: the
live teacher with new masks in every epoch, the live teacher with static masks, then caches of several sizes. They see
the same rows in the same order, and everything is read from their results.json. Further arguments go to every run; the
corpus is that of the recipe ($DISTILL_DATA, or the docstrings of the installed packages). What remains of an earlier
cache is read again, with the seconds that it took then.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import save, table

ROWS_PER_STEP = 32
HEAD = (
    "teacher",
    "bytes a token",
    "kept mass",
    "pass of the teacher, s",
    "training, s",
    "tokens/s",
    "perplexity",
    "KL",
)


@dataclass
class Line:
    """One run; what belongs to a cache is None for the live teacher."""

    teacher: str
    bytes_per_token: float | None
    kept_mass: float | None
    build_seconds: float | None
    training_seconds: float
    tokens_per_second: float
    perplexity: dict[str, float]
    agreement: dict[str, dict[str, float]]


def run(name: str, settings: list[str], folder: Path) -> Line:
    """Train as the settings say, and give what the run says of itself."""
    path = folder / name.replace(" ", "-").replace(",", "")
    command = [sys.executable, "-m", "distill", "+recipe=distilbert_gutenberg", *settings, f"hydra.run.dir={path}"]
    subprocess.run(command, check=True)
    results: dict[str, Any] = json.loads((path / "results.json").read_text(encoding="utf-8"))
    cache = results["teacher"].get("cache", {})
    return Line(
        name,
        cache.get("bytes_per_token"),
        cache.get("kept_mass"),
        cache.get("seconds"),
        results["training"]["seconds"],
        results["training"]["tokens_per_second"],
        results["student"]["perplexity"],
        results["agreement"],
    )


def cells(line: Line) -> list[str]:
    """Perplexity and agreement on the first evaluation set."""
    data = next(iter(line.perplexity))
    return [
        line.teacher,
        "" if line.bytes_per_token is None else f"{line.bytes_per_token:.1f}",
        "" if line.kept_mass is None else f"{line.kept_mass:.1%}",
        "" if line.build_seconds is None else f"{line.build_seconds:.0f}",
        f"{line.training_seconds:.0f}",
        f"{line.tokens_per_second:,.0f}",
        f"{line.perplexity[data]:.2f}",
        f"{line.agreement[data]['kl']:.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--epochs", type=int, default=3, help="how often each row is seen")
    parser.add_argument("--top-k", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--json", type=Path)
    options, arguments = parser.parse_known_args()
    common = [
        "objective.cosine.weight=0",
        f"corpus.rows={options.steps * ROWS_PER_STEP // options.epochs}",
        f"train={{batch_size:16,accumulate:{ROWS_PER_STEP // 16},epochs:null,steps:{options.steps}}}",
        "evaluate={sets:[heldout],every_epoch:false,pseudo_perplexity:{share:0}}",
        *arguments,
    ]
    static = [*common, "objective.masking.static=true"]
    cases = {"live, new masks": common, "live, static masks": static}
    cases |= {f"top {k}": [*static, f"teacher.cache.top_k={k}"] for k in options.top_k}
    with tempfile.TemporaryDirectory() as folder:
        lines = [run(name, settings, Path(folder)) for name, settings in cases.items()]
    print("\n" + table(HEAD, [cells(line) for line in lines]))
    save(options.json, {"settings": common, "runs": [asdict(line) for line in lines]})


if __name__ == "__main__":
    main()
