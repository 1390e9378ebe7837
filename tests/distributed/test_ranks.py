"""The main job with several ranks: started by itself, one run folder, the same student and steps as one process."""

import importlib.util
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from job import STARTS, Shelf, assert_alike, command, composed, metrics, results, wait_for
from test_recipes import NAMES
from tiny import Fit, make_model, make_rows, make_tokenizer, plain_sgd
from torch.testing import assert_close

from distill.config.settings import BackendConfig, TrainConfig
from distill.distributed import join_ranks

NO_HOROVOD = importlib.util.find_spec("horovod") is None
HOROVOD = pytest.param("horovod", marks=pytest.mark.skipif(NO_HOROVOD, reason="Horovod is not set up"))
TWO = ["backend=ddp", "backend.processes=2"]
SAME_STEPS = [*TWO, "train.accumulate=1"]  # half the accumulation on twice the ranks


def ended(status: int, *arguments: str, start: Callable[..., Any] = command) -> str:
    """What a process wrote to stderr that has ended with this status."""
    process = start(*arguments)
    _, errors = process.communicate(timeout=500)
    assert process.returncode == status, errors
    return errors


@pytest.fixture(scope="module")
def alone(shelf: Shelf) -> Path:
    assert shelf.run(shelf.root / "alone") == 0
    return shelf.root / "alone"


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("backend", [pytest.param("ddp", marks=pytest.mark.slow), HOROVOD])
def test_two_ranks_end_as_one_process_does(
    backend: str, start: Callable[..., Any], shelf: Shelf, alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    errors = ended(0, *shelf.arguments(folder, *SAME_STEPS, f"backend={backend}"), start=start)
    assert errors.count("distill 0.") == 1, "only rank 0 speaks"
    assert_alike(folder, alone)
    two, one = results(folder), results(alone)
    assert two["backend"]["name"] == backend and two["backend"]["ranks"] == 2
    assert two["training"]["steps"] == one["training"]["steps"] and two["evaluation"] == one["evaluation"]
    for measure in ("perplexity", "pseudo_perplexity"):
        scores = [content["teacher"][measure]["heldout"] for content in (two, one)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert [line["step"] for line in metrics(folder)] == [line["step"] for line in metrics(alone)]
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank0.log", "rank1.log"]


@pytest.mark.slow
def test_a_stopped_run_of_two_ranks_goes_on_in_one_process(shelf: Shelf, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = command(*shelf.arguments(folder, *SAME_STEPS))
    wait_for(lambda: (folder / "metrics.jsonl").exists() and metrics(folder), process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 143, errors
    assert shelf.run(folder) == 0
    assert_alike(folder, alone)


@pytest.mark.slow
def test_two_ranks_take_the_checkpoint_before_a_damaged_one(shelf: Shelf, alone: Path, tmp_path: Path) -> None:
    arguments = shelf.arguments(tmp_path / "run", *TWO, "train.batch_size=4")
    ended(0, *arguments)
    (tmp_path / "run" / "results.json").unlink()
    weights = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    errors = ended(0, *arguments)
    assert "step-00000008 is damaged" in errors and "taking step-00000006" in errors
    assert_alike(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "status"),
    [(["student.layers=[0,9]"], 2), (["train.batch_size=4", "optimizer.lr=1e5", "schedule.warmup=0"], 3)],
)
def test_two_ranks_end_alike_with_one_line(settings: list[str], status: int, shelf: Shelf, tmp_path: Path) -> None:
    errors = ended(status, *shelf.arguments(tmp_path / "run", *TWO, *settings))
    # Where rank 1 ends first, the launcher names its log besides.
    lines = [line for line in errors.splitlines() if line.startswith("distill: ")]
    assert len([line for line in lines if not line.startswith("distill: rank 1 ended")]) == 1, errors
    assert "Traceback" not in errors
    assert not (tmp_path / "run" / "student").exists()


@pytest.mark.parametrize("backend", ["single", "ddp", HOROVOD])
def test_hosts_that_are_not_there_train_nothing(backend: str, shelf: Shelf, tmp_path: Path) -> None:
    hosts = [f"backend={backend}", "backend.hosts='nowhere.invalid:1'"]
    errors = ended(2, *shelf.arguments(tmp_path / "run", *hosts))
    (line,) = [line for line in errors.splitlines() if line.startswith("distill: ")]
    assert "backend.hosts" in line and not (tmp_path / "run" / "metrics.jsonl").exists()


# --- train.sequences_per_step: the same steps for any number of ranks, also where that changes within a run

ROWS = 7  # of a step: neither two ranks nor three divide them
STEPS = 5  # of 20 rows: two epochs of three steps, whose last has six rows, but one step


def fit(folder: Path, steps: int, **more: Any) -> Fit:
    settings = TrainConfig(batch_size=2, sequences_per_step=ROWS, epochs=None, steps=steps, save_every=1, keep=9)
    student = make_model("distilbert", 1, seed=5, dropout=0.2).train()
    models = (make_model("bert", 4).requires_grad_(False), student)
    rows = make_rows(20, shortest=5)
    made = Fit(folder, make_tokenizer(), rows, *models, settings=settings, keyed_dropout=True, **plain_sgd(), **more)
    return made.resume() if made.checkpoints.newest() else made


def rank_trains(folder: Path, steps: int) -> tuple[list[float], list[int]]:
    """One rank, from the newest checkpoint to so many steps: its losses, and its share of a step."""
    torch.set_num_threads(1)
    with join_ranks(BackendConfig(name="ddp", device="cpu")) as ranks:
        made = fit(folder, steps, ranks=ranks)
        made.run()
    return [line["loss/total"] for line in made.logs], [len(batch.row_ids) for batch in made.batches.window(0)]


def test_ranks_come_and_go_and_the_steps_stay_the_same(tmp_path: Path) -> None:
    """Two steps on three ranks, two on two, and the last on one, against one process that takes whole steps."""
    parts = [
        run_ranks(size, tmp_path / f"out{size}", rank_trains, tmp_path / "run", steps)
        for size, steps in ((3, 2), (2, 4))
    ]
    assert [[window for _, window in part] for part in parts] == [[[2, 1], [2], [2]], [[2, 2], [2, 1]]]
    last, whole = fit(tmp_path / "run", STEPS), fit(tmp_path / "whole", STEPS)
    whole.batches = replace(whole.batches, step_shape=replace(whole.batches.step_shape, batch_size=ROWS))
    for each in (last, whole):
        each.run()
    losses = [loss for part in parts for loss in part[0][0]] + [line["loss/total"] for line in last.logs]
    assert losses == pytest.approx([line["loss/total"] for line in whole.logs], rel=1e-5)
    assert_close(dict(last.student.state_dict()), dict(whole.student.state_dict()), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_says_how_many_sequences_a_step_has(name: str) -> None:
    train = composed(f"+recipe={name}").train
    assert train.accumulate is None and train.sequences_per_step is not None
    assert {train.sequences(ranks) for ranks in (1, 2, 3)} == {train.sequences_per_step}
    assert composed(f"+recipe={name}", "train.accumulate=3").train.sequences(2) == 6 * train.batch_size
    assert train.changed(sequences_per_step=None).sequences(3) == train.batch_size, "a step is a micro-batch"
