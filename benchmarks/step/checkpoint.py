"""What checkpoints cost: seconds to save one, to read it again, and their share of a run's time at the defaults.

    python benchmarks/step/checkpoint.py --shapes base,small
    python benchmarks/step/checkpoint.py --folder /mnt/disk     # the file system on which runs lie

The loop of `distill.train` saves after every step, and each save is timed; what is read again is checked against its
digests first, as a run does that resumes. The share is that of one save after as many steps as `train.save_every` says
of a step by default, each as long as those of this run for the same number of rows.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import save, table, title
from benchmarks.step.models import SHAPES, Shape, batches, make_student, make_teacher
from benchmarks.step.step import NoHistory, settings
from distill.config.settings import BackendConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from distill.distributed import gradient_sync
from distill.distributed.single import Single
from distill.objective.build import bind_terms, build_objective, make_terms
from distill.optim import updates as optim
from distill.optim.schedules.constant import Constant
from distill.runs.checkpoint import Checkpoints, State
from distill.runs.setup import setup_student, setup_teacher
from distill.runtime.host import limit_spinning
from distill.teacher.live import LiveTeacher
from distill.train import Learner, Training, train

DEFAULTS = TrainConfig()


class TimedCheckpoints(Checkpoints):
    """Checkpoints whose saves are timed, and the step before each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, DEFAULTS.keep, {})
        self.saves: list[float] = []
        self.steps: list[float] = []
        self._before = 0.0

    def save(self, state: State, *others: Any, **options: Any) -> None:
        self.steps.append(state.seconds - self._before)
        self._before = state.seconds
        began = time.perf_counter()
        super().save(state, *others, **options)
        self.saves.append(time.perf_counter() - began)


def measure(shape: Shape, folder: Path, rounds: int) -> dict[str, Any]:
    """Train `rounds` steps and one that warms up, of a micro-batch each; then read the newest checkpoint."""
    ranks, precision, optimizer = Single(BackendConfig()), PrecisionConfig(), OptimizerConfig()
    teacher, student = make_teacher(shape, ranks.device), make_student(shape, ranks.device)
    source = batches(shape, 1, rounds + 1)
    config = settings("masked")
    terms = bind_terms(make_terms(config), student, teacher)
    objective = build_objective(terms, config, precision, shape.vocabulary, 0, ranks.device)
    trainable = setup_student(student, objective, precision, ranks)
    sync = gradient_sync(ranks, trainable)
    checkpoints, made = TimedCheckpoints(folder), optim.build(trainable, optimizer)
    length, live = TrainConfig(epochs=None, steps=rounds + 1, save_every=1), setup_teacher(teacher, precision, ranks)
    learner = Learner(trainable, sync, made, Constant(), optimizer)
    run = Training(learner, LiveTeacher(live), source, ranks, length, State(), checkpoints)
    train(run, objective, (), NoHistory())
    newest = checkpoints.newest()
    assert newest is not None
    began = time.perf_counter()
    checkpoints.check(newest)
    checkpoints.load(newest, trainable, made)
    loading = time.perf_counter() - began
    saving, micro_batch = statistics.median(checkpoints.saves[1:]), statistics.median(checkpoints.steps[1:])
    between = micro_batch * DEFAULTS.sequences(1) / shape.rows * DEFAULTS.save_every
    return {
        "shape": str(shape),
        "bytes": sum(path.stat().st_size for path in newest.iterdir()),
        "saving": saving,
        "loading": loading,
        "between": between,
        "share": saving / (between + saving),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", default="base,small", help=f"of {','.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: that of temporary files")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args()
    limit_spinning()
    results = []
    for name in options.shapes.split(","):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results.append(measure(SHAPES[name], Path(folder), options.rounds))
    print(title())
    head = ["student of the shape", "MB", "s to save", "s to check and load", "s between two", "share"]
    rows = [
        [
            each["shape"], f"{each['bytes'] / 1e6:,.0f}", f"{each['saving']:.2f}", f"{each['loading']:.2f}",
            f"{each['between']:,.0f}", f"{each['share']:.3%}",
        ]
        for each in results
    ]  # fmt: skip
    print(table(head, rows))
    save(options.json, results)


if __name__ == "__main__":
    main()
