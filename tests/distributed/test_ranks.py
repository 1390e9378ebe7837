"""The main job with several ranks: started by itself, one run folder, the same student and scores as one process."""

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from distributed import run_ranks
from job import STARTS, Shelf, assert_alike, command, metrics, results, wait_for

from distill.config.settings import BackendConfig, EvaluateConfig, PrecisionConfig, PseudoPerplexityConfig
from distill.data.collate.mlm import masked_lm
from distill.distributed import join_ranks
from distill.evaluation.sets import MASKING, EvaluationSet

BACKENDS = [
    "ddp",
    pytest.param(
        "horovod",
        marks=pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not set up"),
    ),
]


def run(shelf: Shelf, folder: Path, *more: str, start: Callable[..., Any] = command) -> str:
    process = start(*shelf.arguments(folder, *more))
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    return errors


@pytest.fixture(scope="module")
def alone(shelf: Shelf) -> Path:
    assert shelf.run(shelf.root / "alone") == 0
    return shelf.root / "alone"


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("backend", [pytest.param("ddp", marks=pytest.mark.slow), BACKENDS[1]])
def test_two_ranks_end_as_one_process_does(
    backend: str, start: Callable[..., Any], shelf: Shelf, alone: Path, tmp_path: Path
) -> None:
    """The same rows in every step: half the accumulation on twice the ranks."""
    folder = tmp_path / "run"
    ranks = [f"backend={backend}", "backend.processes=2", "train.accumulate=1"]
    errors = run(shelf, folder, *ranks, start=start)
    assert errors.count("distill 0.") == 1, "only rank 0 speaks"
    assert_alike(folder, alone)
    two, one = results(folder), results(alone)
    assert two["backend"]["name"] == backend and two["backend"]["ranks"] == 2
    assert two["training"]["steps"] == one["training"]["steps"]
    assert two["teacher"]["perplexity"]["heldout"] == pytest.approx(one["teacher"]["perplexity"]["heldout"], rel=1e-5)
    pseudo = [content["teacher"]["pseudo_perplexity"]["heldout"] for content in (two, one)]
    assert pseudo[0] == pytest.approx(pseudo[1], rel=1e-5)
    assert two["evaluation"] == one["evaluation"]
    assert [line["step"] for line in metrics(folder)] == [line["step"] for line in metrics(alone)]
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank0.log", "rank1.log"]


@pytest.mark.slow
def test_a_stopped_run_of_two_ranks_goes_on_in_one_process(shelf: Shelf, alone: Path) -> None:
    folder = shelf.root / "handed-over"
    process = command(*shelf.arguments(folder, "backend=ddp", "backend.processes=2", "train.accumulate=1"))
    wait_for(lambda: (folder / "metrics.jsonl").exists() and metrics(folder), process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 143, errors
    assert shelf.run(folder) == 0
    assert_alike(folder, alone)


@pytest.mark.slow
def test_bad_settings_end_all_ranks_with_one_line(shelf: Shelf, tmp_path: Path) -> None:
    more = ["backend=ddp", "backend.processes=2", "student.layers=[0,9]"]
    process = command(*shelf.arguments(tmp_path / "run", *more))
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 2
    assert sum(line.startswith("distill: ") for line in errors.splitlines()) == 1, errors


@pytest.mark.parametrize("backend", ["single", "ddp", *BACKENDS[1:]])
def test_hosts_that_are_not_there_train_nothing(backend: str, shelf: Shelf, tmp_path: Path) -> None:
    process = command(*shelf.arguments(tmp_path / "run", f"backend={backend}", "backend.hosts='nowhere.invalid:1'"))
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 2
    (line,) = [line for line in errors.splitlines() if line.startswith("distill: ")]
    assert "backend.hosts" in line and not (tmp_path / "run" / "metrics.jsonl").exists()


NUM_ROWS = (16, 7, 2, 1)  # of the sets below: 3 divides none of them, the last two have fewer rows than there are ranks


def scores(settings: BackendConfig) -> dict[str, Any]:
    """Every measure on every set, on one rank; a third of the positions for pseudo-perplexity, drawn as in a run."""
    torch.set_num_threads(1)
    ranks = join_ranks(settings)
    student, teacher = tiny.make_model("distilbert", 2), tiny.make_model("distilbert", 2)
    with torch.no_grad():  # alike enough to agree here and there
        teacher.vocab_projector.bias.add_(torch.randn(tiny.VOCAB, generator=torch.Generator().manual_seed(8)))
    rows = [tiny.make_rows(number, shortest=4, seed=number) for number in NUM_ROWS]
    sets = [EvaluationSet(f"{len(each)} rows", "", each, 1) for each in rows]
    measured: dict[str, Any] = {}
    for share in (1.0, 0.3):
        chosen = EvaluateConfig(batch_size=4, pseudo_perplexity=PseudoPerplexityConfig(fraction=share, batch_size=5))
        masks = masked_lm(MASKING, tiny.make_tokenizer(), np.bincount(rows[0].reshape(-1), minlength=tiny.VOCAB))
        evaluator = tiny.make_evaluator(chosen, masks, PrecisionConfig(), ranks)
        values_of, sequence_losses = evaluator.score_by_sequence(student, "student", sets)
        for measure, values in values_of.items():
            measured |= {f"{measure} {share} {name}": value for name, value in values.items()}
        for (measure, name), found in sequence_losses.items():
            measured |= {f"of row {number} {measure} {share} {name}": loss for number, loss in enumerate(found.losses)}
        for name, values in evaluator.agree(student, teacher, sets).items():
            measured |= {f"{measure} {share} {name}": value for measure, value in values.items()}
        measured |= {f"described {share} {data.name}": evaluator.describe(data) for data in sets}
    ranks.close()
    return measured


@pytest.fixture(scope="module")
def scores_alone() -> dict[str, Any]:
    return scores(BackendConfig(device="cpu"))


@pytest.mark.parametrize("size", [2, 3])
def test_scores_do_not_depend_on_the_number_of_ranks(size: int, scores_alone: dict[str, Any], tmp_path: Path) -> None:
    settings = BackendConfig(name="ddp", device="cpu", threads=1, timeout=60.0)
    assert sum(name.startswith("pseudo_perplexity") for name in scores_alone) == 2 * len(NUM_ROWS)
    assert 0 < scores_alone["top1 1.0 16 rows"] < 1
    for of_rank in run_ranks(size, tmp_path, scores, settings):
        assert of_rank.keys() == scores_alone.keys()
        for name, value in scores_alone.items():
            if name.startswith("described"):
                assert of_rank[name] == value, name
            else:
                assert of_rank[name] == pytest.approx(value, rel=1e-5, nan_ok=True), name


@pytest.mark.slow
def test_two_ranks_diverge_alike(shelf: Shelf, tmp_path: Path) -> None:
    settings = ["backend=ddp", "backend.processes=2", "train.batch_size=4", "optimizer.lr=1e5", "schedule.warmup=0"]
    process = command(*shelf.arguments(tmp_path / "run", *settings))
    errors = process.communicate(timeout=500)[1]
    assert process.returncode == 3, errors
    assert "Traceback" not in errors and errors.count("distill: ") == 1
    assert not (tmp_path / "run" / "student").exists()


@pytest.mark.slow
def test_two_ranks_take_the_checkpoint_before_a_damaged_one(shelf: Shelf, alone: Path, tmp_path: Path) -> None:
    folder, ranks = tmp_path / "run", ["backend=ddp", "backend.processes=2", "train.batch_size=4"]
    run(shelf, folder, *ranks)
    (folder / "results.json").unlink()
    weights = sorted((folder / "checkpoints").glob("step-*"))[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    errors = run(shelf, folder, *ranks)
    assert "step-00000008 is damaged" in errors and "taking step-00000006" in errors
    assert_alike(folder, alone)
