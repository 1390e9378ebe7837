"""The main job with divided models: the same student, scores and files as one process, the common case included."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from job import STARTS, Shelf, assert_alike, command, metrics, results, wait_for
from safetensors.torch import load_file

RANKS = ["backend=fsdp", "backend.processes=2", "train.accumulate=1"]
SNAPSHOT = "train.snapshots=[3]"


def run(shelf: Shelf, folder: Path, *more: str, start: Callable[..., Any] = command) -> str:
    process = start(*shelf.arguments(folder, SNAPSHOT, *more))
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    return errors


@pytest.fixture(scope="module")
def alone(shelf: Shelf) -> Path:
    assert shelf.run(shelf.root / "undivided", SNAPSHOT) == 0
    return shelf.root / "undivided"


@pytest.fixture(scope="module")
def divided(shelf: Shelf) -> Path:
    run(shelf, shelf.root / "divided", *RANKS)
    return shelf.root / "divided"


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_as_one_process_does(shelf: Shelf, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = command(*shelf.arguments(folder, SNAPSHOT, *RANKS))
    wait_for(lambda: (folder / "metrics.jsonl").exists() and metrics(folder), process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 143, errors
    run(shelf, folder, *RANKS)
    assert_alike(folder, alone)


def test_it_ends_as_one_process_does(divided: Path, alone: Path) -> None:
    assert_alike(divided, alone)
    two, one = results(divided), results(alone)
    assert two["backend"]["name"] == "fsdp" and two["backend"]["ranks"] == 2
    assert two["training"]["steps"] == one["training"]["steps"]
    for model in ("teacher", "student"):
        assert two[model]["parameters"] == one[model]["parameters"]
        for measure in ("perplexity", "pseudo_perplexity"):
            near = pytest.approx(one[model][measure]["heldout"], rel=1e-3)
            assert two[model][measure]["heldout"] == near
    assert two["agreement"]["heldout"]["kl"] == pytest.approx(one["agreement"]["heldout"]["kl"], rel=1e-2)
    assert two["evaluation"] == one["evaluation"]
    assert [line["step"] for line in metrics(divided)] == [line["step"] for line in metrics(alone)]


@pytest.mark.parametrize("folder", ["student", "snapshots/step-3"])
def test_the_export_is_the_same_plain_folder(folder: str, divided: Path, alone: Path) -> None:
    two, one = divided / folder, alone / folder
    assert sorted(path.name for path in two.iterdir()) == sorted(path.name for path in one.iterdir())
    for path in one.iterdir():
        if path.name in ("config.json", "generation_config.json", "tokenizer.json"):
            assert (two / path.name).read_bytes() == path.read_bytes(), path.name
    found, expected = (load_file(each / "model.safetensors") for each in (two, one))
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in expected.items()
    }
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-4)


def test_one_process_goes_on_from_their_checkpoint(shelf: Shelf, divided: Path, alone: Path) -> None:
    folder = shelf.root / "taken-over"
    shutil.copytree(divided, folder)
    (folder / "results.json").unlink()
    for path in sorted((folder / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(path)
    (first,) = (folder / "checkpoints").glob("step-*")
    assert len(list(first.glob("model-*-of-00002.safetensors"))) == 2
    assert shelf.run(folder, SNAPSHOT) == 0
    assert_alike(folder, alone)


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_a_divided_teacher_beside_a_whole_student(
    start: Callable[..., Any], shelf: Shelf, alone: Path, tmp_path: Path
) -> None:
    """The common case; the student's checkpoints are those of any backend."""
    folder = tmp_path / "run"
    run(shelf, folder, *RANKS, "backend.shard_student=false", start=start)
    assert_alike(folder, alone)
    assert all((path / "model.safetensors").is_file() for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_damaged_part_is_named_and_the_checkpoint_before_is_taken(shelf: Shelf, divided: Path, alone: Path) -> None:
    folder = shelf.root / "damaged"
    shutil.copytree(divided, folder)
    (folder / "results.json").unlink()
    part = sorted((folder / "checkpoints").glob("step-*"))[-1] / "optimizer-00002-of-00002.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    errors = run(shelf, folder, *RANKS)
    assert "step-00000008 is damaged" in errors and "taking step-00000006" in errors
    assert_alike(folder, alone)


@pytest.mark.slow
def test_losses_that_are_scores_are_those_of_one_process(shelf: Shelf, tmp_path: Path) -> None:
    """Of a run that trains no head: ranks with fewer batches of a set join in the forwards of the sharded teacher."""
    only = ["objective.soft.weight=0", "objective.mlm.weight=0", "objective.cosine.weight=0"]
    only += ["objective.pooled.weight=1", "evaluate.batch_size=1", "evaluate.max_sequences=7"]
    only += ["train.epochs=null", "train.steps=3"]
    assert shelf.run(tmp_path / "alone", *only) == 0
    process = command(*shelf.arguments(tmp_path / "ranks", *RANKS, *only))
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    one, two = results(tmp_path / "alone"), results(tmp_path / "ranks")
    value = one["student"]["pooled_loss"]["heldout"]
    assert value > 0 and two["student"]["pooled_loss"]["heldout"] == pytest.approx(value, rel=1e-3)
    assert_alike(tmp_path / "ranks", tmp_path / "alone")
