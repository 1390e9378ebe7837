"""fp16 with a loss scale: gradients that do not vanish, steps left out on all ranks alike, bitwise resume."""

import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from distributed import run_ranks
from job import Shelf, metrics, results
from tiny import Fit, assert_close, loop, make_model, make_rows, new_student, objective_config, weights_of

from distill.config.settings import BackendConfig, TrainConfig
from distill.distributed import GradientSync, join_ranks
from distill.distributed.single import Single
from distill.models.language_model import LanguageModel
from distill.objective.trainable import Trainable
from distill.optim import loss_scale
from distill.optim.loss_scale import LossScale
from distill.runtime.errors import Diverged
from distill.teacher.live import LiveTeacher

MASKED = objective_config(rows="masked", jsd={"weight": 1.0}, hidden_mse={"weight": 1.0})
OTHERS = objective_config(cosine=0.0, reverse_kl={"weight": 1.0})


def test_the_scale_falls_at_once_and_rises_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    scale = LossScale()
    scale.begin(True)
    assert scale.factor == 2**16
    assert scale.update(True, False) and scale.factor == 2**15
    assert [scale.update(True, True) for _ in range(3)] == [False] * 3 and scale.factor == 2**16
    assert not scale.update(False, False) and scale.factor == 2**16, "a loss that is not finite is not the scale's"
    scale.update(True, True), scale.update(True, False), scale.update(True, True), scale.update(True, True)
    scale.begin(True)
    assert (scale.value, scale.good_steps) == (2**15, 2), "an overflow begins the count anew, and a resume does not"
    assert [scale.update(True, False) for _ in range(15)] == [True] * 15 and scale.factor == 1
    assert not scale.update(True, False) and scale.factor == 1, "at the smallest it is the training that diverges"
    for _ in range(3 * 30):
        scale.update(True, True)
    assert scale.factor == 2**24
    scale.begin(False)
    assert scale == LossScale() and scale.factor == 1 and not scale.update(True, False)


def gradient(settings: Any, teacher: Any, precision: str, scale: float, fraction: float = 1.0) -> Any:
    """That of one window, divided by the scale; `fraction`: of the real loss, as if the step had more sequences."""
    torch.manual_seed(0)
    student = make_model("distilbert", 2, seed=5).train()
    objective, ranks = tiny.make_objective(settings, student, teacher), Single(BackendConfig(device="cpu"))
    model = Trainable(LanguageModel(student, precision), objective.modules())
    sync, train = GradientSync(ranks, model), TrainConfig(batch_size=4, accumulate=2)
    window = Fit(Path(), tiny.make_tokenizer(), make_rows(8, shortest=5), settings=train).batches.window(0)
    live, counts = LiveTeacher(LanguageModel(teacher, precision)), objective.count(window) / fraction
    loop.accumulate_gradients(model, live, objective, window, objective.scales(counts, ranks.device) * scale, sync)
    return sync.gradients / scale


@pytest.mark.parametrize("settings", [objective_config(), MASKED, OTHERS], ids=["default", "masked", "others"])
def test_gradients_are_those_of_fp32_within_rounding(settings: Any, teacher: Any) -> None:
    exact = gradient(settings, teacher, "fp32", 1.0)
    assert (gradient(settings, teacher, "fp32", 2.0**10) - exact).norm() < 1e-6 * exact.norm()
    for precision, scale in (("fp16", 2.0**10), ("fp16", 2.0**4), ("bf16", 1.0)):
        tolerance = 0.01 if precision == "fp16" else 0.06
        assert 1e-6 < (gradient(settings, teacher, precision, scale) - exact).norm() / exact.norm() < tolerance


# --- training


def make_fit(folder: Path, tokenizer: Any, rows: np.ndarray, teacher: Any, steps: int = 8, **more: Any) -> Fit:
    settings = TrainConfig(batch_size=4, accumulate=2, epochs=None, steps=steps, save_every=1, keep=99, max_nonfinite=3)
    return Fit(folder, tokenizer, rows, teacher, new_student(), settings=settings, precision="fp16", **more)


def overflow_in(fit: Fit, *steps: int) -> None:
    """Let a gradient overflow in these steps, counted from 0."""
    bias = fit.student.vocab_projector.bias
    bias.register_hook(lambda grad: grad * math.inf if fit.state.step in steps else grad)


def test_it_trains_and_goes_on_bitwise(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scale begins too high, falls, and rises after two good steps, before and after the interruption."""
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 2)
    monkeypatch.setattr(loss_scale, "START", 2.0**18)
    whole, parts = (make_fit(tmp_path / name, tokenizer, rows, teacher) for name in ("whole", "parts"))
    for fit in (whole, parts):
        overflow_in(fit, 6)
    whole.run()
    scales = [line["loss_scale"] for line in whole.logs]
    assert scales[0] == 2**18 and whole.state.overflows == whole.logs[-1]["overflows"] > 1 and whole.state.skipped == 0
    assert any(after == 2 * before for before, after in pairwise(scales)) and scales[7] == scales[6] / 2
    for step in (2, 5, 6, 7):
        parts.resume(tmp_path / "whole" / f"step-{step:08d}")
        parts.logs.clear()
        parts.run()
        assert_close(weights_of(parts.student), weights_of(whole.student), rtol=0, atol=0)
        assert str(parts.losses()) == str(whole.losses()[step:]), "as text: nan is not itself"
        assert parts.state.loss_scale == whole.state.loss_scale


def test_it_trains_as_fp32_does_and_clips_and_logs_the_norm_without_the_scale(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray
) -> None:
    fits = [make_fit(tmp_path / name, tokenizer, rows, teacher, 6, **tiny.plain_sgd(0.5)) for name in ("16", "32")]
    fits[1].model.student.precision = "fp32"
    for fit in fits:
        fit.state.loss_scale.value = 2.0**8
        fit.optimizer_settings = fit.optimizer_settings.changed(clip=0.1)
        fit.run()
    for name in ("grad_norm", "loss/total"):
        half, whole = ([line[name] for line in fit.logs] for fit in fits)
        assert half == pytest.approx(whole, rel=0.02) and min(half) > 0.2
    assert_close(weights_of(fits[0].student), weights_of(fits[1].student), rtol=0, atol=3e-3)
    assert fits[0].state.overflows == 0 and "loss_scale" not in fits[1].logs[0]


def test_a_falling_scale_does_not_end_the_run_but_divergence_does(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray
) -> None:
    """Sixteen halvings down to 1, then `max_nonfinite` steps that no scale would save."""
    fit = make_fit(tmp_path, tokenizer, rows, teacher, 50)
    before = weights_of(fit.student)
    overflow_in(fit, *range(50))
    with pytest.raises(Diverged):
        fit.run()
    assert (fit.state.step, fit.state.overflows, fit.state.skipped, fit.state.loss_scale.factor) == (19, 16, 3, 1)
    assert_close(weights_of(fit.student), before, rtol=0, atol=0)


def rank_overflows(folder: Path, compression: str, sync: str) -> dict[str, Any]:
    """One rank of two; in the second and fourth step a gradient of rank 1 overflows."""
    torch.set_num_threads(1)
    teacher = make_model("bert", 2).requires_grad_(False)
    ranks = join_ranks(BackendConfig(name="ddp", device="cpu", compression=compression, sync=sync))
    rows = make_rows(20, shortest=5)
    fit = make_fit(folder / str(ranks.rank), tiny.make_tokenizer(), rows, teacher, 5, ranks=ranks)
    fit.state.loss_scale.value = 2.0**8
    if ranks.rank == 1:
        overflow_in(fit, 1, 3)
    seen: list[torch.Tensor] = []
    fit.on_log = lambda fit, _: seen.append(torch.cat([w.flatten() for w in weights_of(fit.student).values()]))
    fit.run()
    ranks.close()
    return {"weights": seen, "scales": [line["loss_scale"] for line in fit.logs], "overflows": fit.state.overflows}


@pytest.mark.parametrize(("compression", "sync"), [("bf16", "window"), ("none", "every")])
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(tmp_path: Path, compression: str, sync: str) -> None:
    first, second = run_ranks(2, tmp_path / "out", rank_overflows, tmp_path, compression, sync)
    assert first["scales"] == second["scales"] == [2.0**8, 2.0**8, 2.0**7, 2.0**7, 2.0**6]
    assert first["overflows"] == second["overflows"] == 2
    for one, other in zip(first["weights"], second["weights"], strict=True):
        assert one.isfinite().all() and torch.equal(one, other)
    moved = [not torch.equal(a, b) for a, b in pairwise(first["weights"])]
    assert moved == [False, True, False, True]


def test_a_job_whose_models_are_all_in_fp16(shelf: Shelf, done: Path) -> None:
    folder, more = shelf.root / "fp16", ("precision=fp16", "precision.evaluate=fp16", "train.steps=4")
    assert shelf.run(folder, *more, "evaluate.every_steps=3") == 0
    student = (folder / "student" / "model.safetensors").read_bytes()
    (folder / "results.json").unlink()  # as if it had been killed after the checkpoint of step 3
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    assert shelf.run(folder, *more, "evaluate.every_steps=3") == 0
    assert (folder / "student" / "model.safetensors").read_bytes() == student
    lines, content, exact = metrics(folder), results(folder), results(done)
    assert all(line["loss_scale"] >= 1 for line in lines) and content["precision"]["teacher"] == "fp16"
    assert lines[0]["loss/total"] == pytest.approx(metrics(done)[0]["loss/total"], rel=0.01)
    assert content["training"]["overflow_steps"] == lines[-1]["overflows"]
    for measure in ("perplexity", "pseudo_perplexity"):
        assert content["teacher"][measure]["heldout"] == pytest.approx(exact["teacher"][measure]["heldout"], rel=0.02)
    assert "loss scale, by step" in (folder / "report.md").read_text()
