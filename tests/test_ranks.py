"""The main job with two ranks: started by itself, one run folder, the same student and scores as one process."""

import importlib.util
import signal
from pathlib import Path

import pytest
import torch
from job import command
from test_main_job import Shelf, metrics, results, shelf, wait_for, weights  # noqa: F401 - the fixture

BACKENDS = [
    "ddp",
    pytest.param(
        "horovod",
        marks=pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not set up"),
    ),
]


def run(shelf: Shelf, folder: Path, *more: str) -> str:  # noqa: F811
    process = command(*shelf.arguments(folder, *more))
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return errors


@pytest.fixture(scope="module")
def alone(shelf: Shelf) -> Path:  # noqa: F811
    assert shelf.run(shelf.root / "alone") == 0
    return shelf.root / "alone"


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_end_as_one_process_does(backend: str, shelf: Shelf, alone: Path) -> None:  # noqa: F811
    """The same rows in every step: half the accumulation on twice the ranks."""
    folder = shelf.root / f"two-{backend}"
    ranks = [f"backend={backend}", "backend.processes=2", "train.accumulate=1"]
    errors = run(shelf, folder, *ranks)
    assert errors.count("distill 0.") == 1, "only rank 0 speaks"
    ours, theirs = weights(folder), weights(alone)
    assert all(torch.allclose(ours[name], theirs[name], atol=2e-4) for name in ours)
    two, one = results(folder), results(alone)
    assert two["backend"]["name"] == backend and two["backend"]["ranks"] == 2
    assert two["backend"]["syncs"] == one["training"]["steps"]
    assert two["teacher"]["perplexity"]["heldout"] == pytest.approx(one["teacher"]["perplexity"]["heldout"], rel=1e-5)
    pseudo = [content["teacher"]["pseudo_perplexity"]["heldout"] for content in (two, one)]
    assert pseudo[0] == pytest.approx(pseudo[1], rel=1e-5)
    assert two["evaluation"] == one["evaluation"]
    assert [line["step"] for line in metrics(folder)] == [line["step"] for line in metrics(alone)]
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank0.log", "rank1.log"]


def test_a_stopped_run_of_two_ranks_goes_on_in_one_process(shelf: Shelf, alone: Path) -> None:  # noqa: F811
    folder = shelf.root / "handed-over"
    process = command(*shelf.arguments(folder, "backend=ddp", "backend.processes=2", "train.accumulate=1"))
    wait_for(lambda: (folder / "metrics.jsonl").exists() and metrics(folder), process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert shelf.run(folder) == 0
    ours, theirs = weights(folder), weights(alone)
    assert all(torch.allclose(ours[name], theirs[name], atol=2e-4) for name in ours)


def test_bad_settings_end_all_ranks_with_one_line(shelf: Shelf, tmp_path: Path) -> None:  # noqa: F811
    more = ["backend=ddp", "backend.processes=2", "student.layers=[0,9]"]
    process = command(*shelf.arguments(tmp_path / "run", *more))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert sum(line.startswith("distill: ") for line in errors.splitlines()) == 1, errors
