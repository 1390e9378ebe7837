"""The step, a run and its scores on a GPU, against the same on the CPU: `python -m pytest -m gpu`.

`DISTILL_TEST_DEVICE=cpu` runs them without a GPU, to try the tests themselves.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from job import Shelf, assert_alike, results
from tiny import loop, make_batches, make_masks, make_model, make_rows, new_student, objective_config

from distill.config import settings as conf
from distill.distributed import GradientSync
from distill.distributed.single import Single
from distill.objective.build import bind_terms, build_objective, make_terms
from distill.runs.setup import setup_student, setup_teacher
from distill.teacher.live import LiveTeacher

DEVICE = os.environ.get("DISTILL_TEST_DEVICE", "cuda")
pytestmark = [pytest.mark.gpu]


def gradients(
    tokenizer: Any, device: str, rows: str, kernel: str, precision: conf.PrecisionConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the terms and all gradients of one window, on the CPU."""
    settings = objective_config(rows=rows, kernel=kernel)
    student, teacher = new_student(), make_model("bert", 2)
    ranks = Single(conf.BackendConfig(device=device))
    terms = bind_terms(make_terms(settings), student, teacher)
    objective = build_objective(terms, settings, precision, student.config.vocab_size, 1, ranks.device)
    frozen = setup_teacher(teacher, precision, ranks)
    model = setup_student(student, objective, precision, ranks)
    sync = GradientSync(ranks, model)
    data = make_rows(8, shortest=5)
    source = make_batches(data, make_masks(tokenizer, data), batch_size=4, accumulate=2, seed=0)
    scales = objective.scales(objective.count(source.window(0)), ranks.device)
    window = next(source.stream(0, 1, ranks.device))
    sums = loop.accumulate_gradients(model, LiveTeacher(frozen), objective, window, scales, sync)
    return sums.cpu(), sync.gradients.cpu().clone()


@pytest.mark.parametrize(
    ("kernel", "rows", "formats", "near"),
    [
        *((kernel, rows, "fp32", 1e-4) for kernel in ("fused", "auto") for rows in ("all", "masked")),
        *((kernel, "all", "bf16", 0.05) for kernel in ("fused", "auto")),
    ],
)
def test_gradients_are_those_of_the_cpu(tokenizer: Any, kernel: str, rows: str, formats: str, near: float) -> None:
    there = conf.PrecisionConfig(student=formats, teacher=formats)
    sums, gradient = gradients(tokenizer, DEVICE, rows, kernel, there)
    expected_sums, expected = gradients(tokenizer, "cpu", rows, "fused", conf.PrecisionConfig(kernels="plain"))
    torch.testing.assert_close(sums, expected_sums, rtol=near, atol=near)
    assert (gradient - expected).norm() < near * expected.norm()


def test_a_run_and_its_scores(shelf: Shelf, done: Path, tmp_path: Path) -> None:
    assert shelf.run(tmp_path / "run", f"backend.device={DEVICE}") == 0
    assert_alike(tmp_path / "run", done, atol=2e-3)
    for measure in ("perplexity", "pseudo_perplexity"):
        for model in ("teacher", "student"):
            scores, expected = (results(folder)[model][measure] for folder in (tmp_path / "run", done))
            assert scores == pytest.approx(expected, rel=0.02)


def test_a_run_from_a_cached_teacher(shelf: Shelf, tmp_path: Path) -> None:
    cached = ["objective.masking.static=true", "objective.cosine.weight=0", "teacher.cache.top_k=16"]
    for device in (DEVICE, "cpu"):
        settings = [f"backend.device={device}", *cached, f"data.cache={tmp_path}/{device}-cache"]
        assert shelf.run(tmp_path / device, *settings) == 0
    assert_alike(tmp_path / DEVICE, tmp_path / "cpu", atol=2e-3)


def test_a_student_that_is_narrowed_and_refitted(shelf: Shelf, tmp_path: Path) -> None:
    fits = ["student.architecture=same", "student.intermediate_size=24", "student.refit=true", "train.epochs=1"]
    for device in (DEVICE, "cpu"):
        assert shelf.run(tmp_path / device / "run", f"backend.device={device}", *fits) == 0
    scores = [results(tmp_path / device / "run")["student"]["perplexity"]["heldout"] for device in (DEVICE, "cpu")]
    assert scores[0] == pytest.approx(scores[1], rel=0.02)


def test_a_stopped_run_goes_on(shelf: Shelf, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = [f"backend.device={DEVICE}", "schedule=constant", "schedule.warmup=0"]
    assert shelf.run(whole, *settings) == 0
    assert shelf.run(parts, *settings, "train.epochs=1") == 0
    assert shelf.run(parts, *settings) == 0
    assert_alike(parts, whole)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("rings", ["1", "4"])
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_two_gpus_end_as_one_does(shelf: Shelf, tmp_path: Path, backend: str, rings: str) -> None:
    pytest.importorskip("horovod" if backend == "horovod" else "torch")
    assert shelf.run(tmp_path / "one", "backend.device=cuda") == 0
    two = [f"backend={backend}", "backend.processes=2", f"backend.rings={rings}", "train.accumulate=1"]
    assert shelf.run(tmp_path / "two", "backend.device=cuda", *two) == 0
    assert_alike(tmp_path / "two", tmp_path / "one", atol=2e-3)
