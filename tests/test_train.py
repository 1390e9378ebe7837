"""The loop: the same weights for every split, non-finite steps kept out, ends, signals, and what it logs."""

import copy
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from distributed import run_ranks
from naive import definition
from tiny import (
    Fit,
    assert_close,
    make_model,
    make_rows,
    new_student,
    objective_config,
    only,
    plain_sgd,
    weights_of,
)

from distill.config import settings as conf
from distill.config.settings import BackendConfig, TrainConfig
from distill.data.batches import StepShape
from distill.evaluation.sets import EvaluationSet
from distill.optim.schedules.linear import Linear
from distill.runs.facts import HistoryPoint

SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]
MASKED = objective_config(rows="masked", masking={"mlm_probability": 0.3})


@pytest.fixture(scope="module", params=[objective_config(), MASKED, only(mlm=1.0)], ids=["default", "masked", "mlm"])
def by_definition(request: Any, tokenizer: Any, teacher: Any, rows: np.ndarray) -> Iterator[Any]:
    """Three steps of SGD in float64 on whole windows of 8, 8 and 4 rows, the loss as the field defines it."""
    fit = Fit(
        Path(), tokenizer, rows, objective=request.param, settings=TrainConfig(batch_size=8, accumulate=1, epochs=1)
    )
    student, losses = new_student().double(), []
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss, _ = definition(request.param, student, copy.deepcopy(teacher).double(), fit.batches.window(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return request.param, weights_of(student), losses


@pytest.mark.parametrize(("batch_size", "accumulate"), SPLITS)
def test_same_weights_after_three_steps_for_every_split(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray, by_definition: Any, batch_size: int, accumulate: int
) -> None:
    """SGD, since Adam hides an error of scale; unequal numbers of targets, padding, and a short last window."""
    objective, weights, losses = by_definition
    settings = TrainConfig(batch_size=batch_size, accumulate=accumulate, epochs=1)
    fit = Fit(tmp_path, tokenizer, rows, teacher, new_student(), objective, settings, **plain_sgd())
    targets = {len(batch.labels["mlm"].positions) for step in range(3) for batch in fit.batches.window(step)}
    assert len(targets) > 1 and fit.batches.steps_per_epoch == 3
    assert fit.run() == "epochs"
    assert [line["loss/total"] for line in fit.logs] == pytest.approx(losses, rel=2e-5)
    trained = weights_of(fit.student)
    moved = max(float((trained[n] - w).abs().max()) for n, w in weights_of(new_student()).items())
    assert moved > 0.05, "the comparison needs weights that move"
    assert_close(trained, weights, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_same_weights_for_every_number_of_ranks(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray, size: int
) -> None:
    """Each rank adds the gradient of its own micro-batches, divided by the counts of all; 24 // 8 rows at a time."""
    settings = TrainConfig(batch_size=24, accumulate=1, epochs=3)
    single = Fit(tmp_path, tokenizer, rows, teacher, new_student(), settings=settings, **plain_sgd())
    single.run()
    student = new_student()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    objective = tiny.make_objective(objective_config(), student, teacher)
    batches = Fit(tmp_path, tokenizer, rows, settings=TrainConfig(batch_size=1, accumulate=24)).batches
    ranks = [replace(batches, step_shape=StepShape(1, 24, rank, size)) for rank in range(size)]
    for step in range(3):
        optimizer.zero_grad()
        windows = [batches.window(step) for batches in ranks]
        counts = torch.stack([objective.count(window) for window in windows]).sum(0)
        for window in windows:
            for batch in window:
                tiny.loss_of(objective, student, teacher, [batch], counts)[0].backward()
        optimizer.step()
    assert_close(weights_of(student), weights_of(single.student), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("family", ["distilbert", "bert", "albert", "roberta", "modernbert"])
def test_dropout_does_not_depend_on_the_split(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray, family: str
) -> None:
    """With the paper's dropout, keyed by row: the same weights for every micro-batch size, accumulation and padding."""

    def trained(batch_size: int, accumulate: int, keyed: bool = True) -> dict[str, torch.Tensor]:
        student = make_model(family, 1, seed=5, dropout=0.2).train()
        settings = TrainConfig(batch_size=batch_size, accumulate=accumulate, epochs=2)
        folder = tmp_path / f"{batch_size}-{accumulate}-{keyed}"
        fit = Fit(folder, tokenizer, rows, teacher, student, settings=settings, keyed_dropout=keyed, **plain_sgd())
        fit.run()
        return weights_of(fit.student)

    whole = trained(8, 1)
    for split in SPLITS[1:]:
        assert_close(trained(*split), whole, rtol=1e-4, atol=5e-6)
    with pytest.raises(AssertionError):  # torch's own stream knows nothing of rows
        assert_close(trained(2, 4, keyed=False), trained(8, 1, keyed=False), rtol=1e-4, atol=5e-6)


def rank_trains(folder: Path) -> dict[str, Any]:
    """One rank of two: three steps and the scores after them; then by the clock, which is faster on rank 1."""

    from distill.distributed import join_ranks

    torch.set_num_threads(1)
    tokenizer, rows = tiny.make_tokenizer(), make_rows(20, shortest=5)
    teacher = make_model("bert", 4).requires_grad_(False)
    ranks = join_ranks(BackendConfig(name="ddp", device="cpu"))
    settings = TrainConfig(batch_size=2, accumulate=2, epochs=1)
    fit = Fit(folder / "steps", tokenizer, rows, teacher, new_student(), settings=settings, ranks=ranks, **plain_sgd())
    before, times = ranks.traffic.num_collectives, save_slowly(fit)
    fit.run()
    collectives = ranks.traffic.num_collectives - before
    scores = score(fit, batch_size=4)
    student = make_model("distilbert", 1, seed=5, dropout=0.2).train()
    settings = TrainConfig(batch_size=2, accumulate=2, epochs=1)
    dropping = Fit(
        folder / "dropout", tokenizer, rows, teacher, student, settings=settings, ranks=ranks, keyed_dropout=True,
        **plain_sgd(),
    )  # fmt: skip
    dropping.run()
    looks = itertools.count(step=(1.0, 4.0)[ranks.rank])  # each look at the clock of a rank takes so many seconds
    tiny.loop.time = SimpleNamespace(monotonic=lambda: next(looks))  # type: ignore[attr-defined]
    settings = TrainConfig(batch_size=2, accumulate=2, epochs=None, minutes=1.0)
    timed = Fit(
        folder / "minutes", tokenizer, rows, teacher, new_student(), settings=settings, ranks=ranks,
        objective=tiny.objective_config(soft={"start": 5.0, "end": 1.0}),
    )  # fmt: skip
    timed.schedule = Linear(warmup=0.0)
    ended_by = timed.run()
    ranks.close()
    return {
        "weights": weights_of(fit.student),
        "dropout": weights_of(dropping.student),
        "losses": [line["loss/total"] for line in fit.logs],
        "collectives": collectives,
        "times": times,
        "scores": scores,
        "timed": weights_of(timed.student),
        "rates": [(line["lr"], line["weight/soft"]) for line in timed.logs],
        "ended_by": ended_by,
    }


def save_slowly(fit: Fit) -> dict[str, float]:
    """Let each save take half a second; gives the times at which the last was done and at which the end was reached."""
    times: dict[str, float] = {}
    save = fit.checkpoints.save

    def slow(*arguments: Any) -> bool:
        time.sleep(0.5)
        saved = save(*arguments)
        times["saved"] = time.monotonic()
        return saved

    fit.checkpoints.save = slow  # type: ignore[method-assign]
    fit.evaluate = lambda *_: times.update(point=time.monotonic()) or HistoryPoint()  # type: ignore[method-assign]
    return times


def score(fit: Fit, batch_size: int) -> dict[str, dict[str, float]]:
    settings = conf.EvaluateConfig(batch_size=batch_size, pseudo_perplexity=conf.PseudoPerplexityConfig(fraction=0.5))
    masks = tiny.make_masks(fit.tokenizer, fit.rows)
    evaluator = tiny.make_evaluator(settings, masks, conf.PrecisionConfig(), fit.ranks)
    return evaluator.score(fit.student, "student", [EvaluationSet("set", "a set", fit.rows, 1)])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(2, folder / "out", rank_trains, folder)


def test_two_processes_train_and_score_as_one(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray, two_ranks: list[Any]
) -> None:
    settings = TrainConfig(batch_size=8, accumulate=1, epochs=1)
    single = Fit(tmp_path, tokenizer, rows, teacher, new_student(), settings=settings, **plain_sgd())
    single.run()
    scores = score(single, batch_size=32)
    for rank in two_ranks:
        assert rank["losses"] == pytest.approx([line["loss/total"] for line in single.logs], rel=1e-5)
        assert_close(rank["weights"], weights_of(single.student), rtol=1e-4, atol=2e-6)
        for measure in ("perplexity", "pseudo_perplexity"):
            assert rank["scores"][measure]["set"] == pytest.approx(scores[measure]["set"], rel=1e-4)
    assert_close(two_ranks[0]["weights"], two_ranks[1]["weights"], rtol=0, atol=0)


def test_two_processes_drop_as_one(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray, two_ranks: list[Any]
) -> None:
    """The sister of the test above, with dropout."""
    student = make_model("distilbert", 1, seed=5, dropout=0.2).train()
    settings = TrainConfig(batch_size=8, accumulate=1, epochs=1)
    single = Fit(tmp_path, tokenizer, rows, teacher, student, settings=settings, keyed_dropout=True, **plain_sgd())
    single.run()
    for rank in two_ranks:
        assert_close(rank["dropout"], weights_of(single.student), rtol=1e-4, atol=2e-6)


def test_one_collective_call_a_step(two_ranks: list[Any]) -> None:
    """Gradients, losses, the next counts and wishes to stop together; the first counts, and a barrier at the end.

    At the one checkpoint, which is at the end, rank 0 says whether it was written: the length of that, and it.
    """
    for rank in two_ranks:
        assert rank["collectives"] == len(rank["losses"]) + 2 + 2


def test_no_rank_goes_on_to_score_while_the_first_still_saves(two_ranks: list[Any]) -> None:
    """There a signal ends a rank at once, and then the others."""
    first, second = (rank["times"] for rank in two_ranks)
    assert "saved" not in second and second["point"] >= first["saved"]


def test_ranks_whose_clocks_differ_stay_together(two_ranks: list[Any]) -> None:
    """With `train.minutes` the rate and the end hang on the clock: on one clock, or the ranks part and hang."""
    first, second = two_ranks
    assert first["ended_by"] == second["ended_by"] == "minutes"
    assert first["rates"] == second["rates"] and len(first["rates"]) > 1
    assert_close(first["timed"], second["timed"], rtol=0, atol=0)


# --- what it logs --------------------------------------------------------------------------------------------------


def test_log_lines(tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray) -> None:
    """With `log_every` a line is the mean over its steps, weighted by positions; the last step always has one."""
    settings = TrainConfig(batch_size=4, accumulate=2, epochs=2)
    every = Fit(tmp_path / "1", tokenizer, rows, teacher, new_student(), settings=settings, seed=3)
    settings = TrainConfig(batch_size=4, accumulate=2, epochs=2, log_every=4)
    third = Fit(tmp_path / "4", tokenizer, rows, teacher, new_student(), settings=settings, seed=3)
    every.run(), third.run()
    assert [line["step"] for line in third.logs] == [4, 6]
    needed = {"step", "tokens", "seconds", "loss/total", "loss/soft", "loss/mlm", "loss/cosine", "lr", "grad_norm"}
    assert needed | {"tokens_per_second"} <= third.logs[0].keys()
    for line, steps in zip(third.logs, [(1, 2, 3, 4), (5, 6)], strict=True):
        assert line["loss/mlm"] == pytest.approx(every.mean_mlm(steps), rel=1e-6)
        total = 5 * line["loss/soft"] + 2 * line["loss/mlm"] + line["loss/cosine"]
        assert line["loss/total"] == pytest.approx(total, rel=1e-5)
    assert third.logs[-1]["tokens"] == every.logs[-1]["tokens"]
    assert_close(weights_of(third.student), weights_of(every.student), rtol=0, atol=0)
