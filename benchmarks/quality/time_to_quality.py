"""How long a training takes until its student is so good: the public example's recipe against Distill's.

    DISTILL_DATA=DATA python benchmarks/quality/time_to_quality.py --work DIR --seeds 3 --json time_to_quality.json
    python benchmarks/quality/time_to_quality.py --work DIR --turns 0            # trainings alone, on a busy machine
    python benchmarks/quality/time_to_quality.py --work DIR --teacher distill/teacher/bundled_deep --student-layers 3
    python benchmarks/quality/time_to_quality.py --work DIR --pair causal --teacher runs/gpt2_pretrain

Three kinds of recipe train students of the same teacher on the same books, and are scored on the same unseen ones:
the example's as it stands (1,000 updates), the example's with an equal budget of tuning (layers, rows of an update,
learning rate; the best of four is named), and Distill's defaults. Every training is a real run by `python -m distill`,
in Distill's step, which gives the example's gradients to 1e-10 (`tests/objective`); what is counted is its rows. The
time of a row is measured apart, on a quiet machine and in turns (`--turns`): of the example its own step, in the
re-implementation of `step/plain.py` (full logits of both models, fp32), of Distill a run. So the example's time is
rows times seconds a row, and nobody waits for it.

Targets are the example's final perplexity and the teacher's times 1.25, 1.1, 1.05 and 1.03; between two scores of a
run the logarithm of perplexity is taken for a straight line. Finished runs are not run again.

Expected before it was run, for the small bundled pair: the example ends near 1.5 times the teacher after 6.4 million
tokens, since its student starts from layers 0 and 2; tuned, it is at 1.2 after 5,000 rows; Distill reaches the first
of these after a few hundred rows at most, and 1.06 after 5,000. The plain step takes 3 to 4 times as long for a row.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import digest_of, execute, save, table, title
from benchmarks.quality.trainings import (
    RECIPES,
    Contestant,
    Course,
    contestants,
    course,
    operations_of_row,
    rows_per_step,
    shape_of,
)
from benchmarks.step.models import Shape, Variant, batches, make_student, make_teacher
from benchmarks.step.step import answer, start
from distill.config.settings import PrecisionConfig
from distill.models.teacher import bundled_folder

TARGETS = (1.25, 1.1, 1.05, 1.03)
QUICK = ["corpus.sequence_length=32", "evaluate.max_sequences=16"]


def serve(calls: Any, shape: Shape, options: argparse.Namespace) -> None:
    """The plain step in a process of its own."""
    from benchmarks.step.plain import train_plainly

    device = torch.device("cpu")
    variant = Variant("plain", "targets" if shape.documents else "all", PrecisionConfig(), plain=True)

    def train_for(steps: int, after_step: Any) -> None:
        pair = make_teacher(shape, device), make_student(shape, device)
        train_plainly(batches(shape, options.accumulate, steps), pair, variant, steps, after_step)

    answer(calls, options, train_for)


def plain_seconds(shape: Shape, updates: int) -> float:
    """Seconds a row of the example's step."""
    options = argparse.Namespace(device="cpu", threads=None, rounds=updates, accumulate=50 // shape.rows)
    (call,), (process,) = start(serve, [(shape, options)])
    times = []
    for _ in range(updates):
        call.send(True)
        times.append(call.recv())
    call.send(False)
    call.recv()
    process.join()
    return statistics.median(times) / (options.accumulate * shape.rows)


def distill_seconds(kind: str, contestant: Contestant, folder: Path, common: list[str], steps: int) -> float:
    """Seconds a row of a short run of Distill; its first steps, which compile, are left out."""
    length = ["train.epochs=null", f"train.steps={steps}", "train.log_every=1", "evaluate.max_sequences=4"]
    arguments = [
        f"+recipe={RECIPES[kind]}",
        *contestant.settings,
        *common,
        *length,
        "evaluate.pseudo_perplexity.fraction=0",
    ]
    execute(folder, [*arguments, "evaluate.sets=[heldout]"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [after["seconds"] - before["seconds"] for before, after in itertools.pairwise(lines)]
    return statistics.median(seconds[len(seconds) // 3 :]) / rows_per_step(contestant)


def rates(kind: str, shape: Shape, own: Contestant, options: argparse.Namespace, common: list[str]) -> dict[str, Any]:
    """Seconds a row of both steps in turns, and of a whole short command; those of before where `turns` is 0."""
    path = options.work / f"rates-{kind}-{digest_of([str(shape), *own.settings, *common])}.json"
    if options.turns:
        plain, distill, commands = [], [], []
        for turn in range(options.turns):
            plain.append(plain_seconds(shape, 3 if options.quick else 12))
            folder = options.work / "rates" / f"{kind}-{time.time_ns()}"
            steps = 6 if options.quick else 150
            distill.append(distill_seconds(kind, own, folder, common, steps))
            if turn == 0:
                commands.append(whole_command(kind, own, folder.with_name(f"{folder.name}-command"), common))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"plain": plain, "distill": distill, "command": commands, "machine": title()}))
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def whole_command(kind: str, own: Contestant, folder: Path, common: list[str]) -> dict[str, float]:
    """What Distill's run takes from the command to its report, with everything that it does by default."""
    began = time.perf_counter()
    content = execute(folder, [f"+recipe={RECIPES[kind]}", *own.settings, *common])
    return {"seconds": time.perf_counter() - began, "training": content["training"]["seconds"]}


def best_tuned(courses: dict[str, list[Course]]) -> list[str]:
    """The names of the example as it stands, its best tuned relative, and Distill."""
    tuned = [name for name in courses if "tuned" in name]
    best = min(tuned, key=lambda name: statistics.median(each.perplexity[-1] for each in courses[name]), default=None)
    return [name for name in courses if "tuned" not in name or name == best]


def amounts(found: list[Course], target: float) -> list[float]:
    """Rows to a target of those seeds that reach it."""
    return [rows for rows in (each.rows_to(target) for each in found) if rows is not None]


def show(kind: str, courses: dict[str, list[Course]], shape: Shape, seconds: dict[str, Any]) -> str:
    """All contestants at the end of their runs, then the rows, seconds and operations to each target."""
    ends = [
        [
            name,
            f"{found[0].rows[-1]:,}",
            f"{statistics.median(each.perplexity[-1] for each in found):.2f}",
            f"{min(each.perplexity[-1] for each in found):.2f} to {max(each.perplexity[-1] for each in found):.2f}",
            f"{statistics.median(each.perplexity[-1] / each.teacher for each in found):.3f}",
            str(len(found)),
        ]
        for name, found in courses.items()
    ]
    parts = [f"{kind}: {shape}", table(["recipe", "rows", "perplexity", "range", "of the teacher's", "seeds"], ends)]
    kept = best_tuned(courses)
    ends_of = {
        name: statistics.median(each.perplexity[-1] for each in courses[name]) for name in kept if name != "distill"
    }
    teacher = next(iter(courses.values()))[0].teacher
    targets = {f"the end of {name}, {value:.2f}": value for name, value in ends_of.items()}
    targets |= {f"{factor} x the teacher, {factor * teacher:.2f}": factor * teacher for factor in TARGETS}
    per_row = {name: statistics.median(values) for name, values in seconds.items() if name in ("plain", "distill")}
    lines = []
    for target, value in targets.items():
        for name in kept:
            rows = amounts(courses[name], value)
            if len(rows) < len(courses[name]):
                lines.append([target, name, "not reached", "", ""])
                continue
            middle = statistics.median(rows)
            of = "distill" if name == "distill" else "plain"
            cost = operations_of_row(shape, 0.3 if name == "distill" else 0.15, name != "distill")
            time_taken = f"{middle * per_row[of]:,.0f}" if of in per_row else ""
            lines.append([target, name, f"{middle:,.0f}", time_taken, f"{middle * cost / 1e12:.2f}"])
    parts.append(table(["until", "recipe", "rows", "seconds of training", "matrix operations, 10^12"], lines))
    if per_row:
        rate = f"{1000 * per_row['plain']:.1f} ms a row of the plain step, {1000 * per_row['distill']:.1f} of Distill's"
        command = seconds["command"][0]
        parts.append(
            f"{rate} ({seconds['machine']}); Distill's whole command took {command['seconds']:.0f} s, "
            f"of it {command['training']:.0f} s training."
        )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--pair", choices=("masked", "causal"), default="masked")
    parser.add_argument("--teacher", help="folder of a teacher; by default the small bundled one (masked pairs alone)")
    parser.add_argument("--student-layers", type=int, help="by default half of the teacher's")
    parser.add_argument("--only", nargs="+", help="of the recipes, by names in which * stands for anything")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=5000, help="of a short training, for the tuned example and Distill")
    parser.add_argument("--score-rows", type=int, default=300)
    parser.add_argument("--turns", type=int, default=3, help="of measuring the time of a row; 0: take those of before")
    parser.add_argument("--quick", action="store_true", help="everything once, at a size that says nothing")
    parser.add_argument("--json", type=Path)
    options, common = parser.parse_known_args()
    if options.pair == "causal" and options.teacher is None:
        parser.error("--pair causal needs --teacher")
    kind, seeds = options.pair, 1 if options.quick else options.seeds
    common += [f"teacher.path={options.teacher}" if options.teacher else "teacher=bundled_small"]
    common += [f"student.num_layers={options.student_layers}"] if options.student_layers else []
    every = contestants(kind, 64 if options.quick else options.rows)
    if options.quick:
        common += QUICK
        every = [each for each in every if "tuned" not in each.name]
        every[0] = Contestant(every[0].name, (*every[0].settings, "train.steps=2", "corpus.max_sequences=100"), True)
    chosen = [each for each in every if not options.only or any(fnmatch(each.name, name) for name in options.only)]
    score_rows = 4 if options.quick else options.score_rows
    courses: dict[str, list[Course]] = {}
    folder = Path(options.teacher or bundled_folder("bundled_small"))
    config = next(path for path in (folder / "student/config.json", folder / "config.json") if path.is_file())
    teacher = json.loads(config.read_text())
    layers = options.student_layers or (teacher.get("num_hidden_layers") or teacher["n_layer"]) // 2
    shape = shape_of(teacher, layers, 5, 32 if options.quick else 128)
    seconds = rates(kind, shape, every[-1], options, common)
    for seed in range(seeds):
        for each in chosen:
            courses.setdefault(each.name, []).append(course(kind, each, seed, options.work, common, score_rows))
        print("\n" + show(kind, courses, shape, seconds), flush=True)
    runs = {name: [asdict(each) for each in found] for name, found in courses.items()}
    save(options.json, {"shape": str(shape), "rates": seconds, "runs": runs, "settings": common})


if __name__ == "__main__":
    sys.exit(main())
