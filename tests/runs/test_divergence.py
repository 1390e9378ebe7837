"""Destroyed students: which losses are sane, which checkpoints stay, whose rows are named, what is not published."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import Shelf
from safetensors.torch import load_file
from tiny import Fit, loop, make_rows, new_student, only

from distill.config.settings import OptimizerConfig, TrainConfig
from distill.evaluation.evaluator import Evaluator
from distill.objective.objective import Objective
from distill.optim.schedules.constant import Constant
from distill.runs.divergence import diverged_scores
from distill.runs.state import State
from distill.runtime.errors import Diverged

# --- the running mean of the loss ----------------------------------------------------------------------------------


def follow(
    state: State,
    sums: dict[str, float],
    counts: dict[str, float],
    weights: dict[str, float],
    limit: float | None = 3.0,
) -> str | None:
    state.step += 1
    return state.take(sums, counts, weights, limit)


def levels(losses: list[float], limit: float | None = 3.0, weight: Any = lambda step: 1.0) -> tuple[State, list[str]]:
    state = State()
    said = [
        follow(state, {"mlm": 4 * loss}, {"mlm": 4.0}, {"mlm": weight(step)}, limit)
        for step, loss in enumerate(losses, 1)
    ]
    return state, [each for each in said if each]


def test_the_loss_of_late_is_the_mean_of_multiples_of_the_first_step() -> None:
    state, said = levels([8.0, 6.0, 4.0])
    assert state.running_mean == pytest.approx(0.9 * (0.9 * 1 + 0.1 * 6 / 8) + 0.1 * 4 / 8)
    assert not said and state.last_good_step == 3


def test_a_spike_that_comes_back_is_said_twice_and_forgotten() -> None:
    state, said = levels([2.0] * 5 + [80.0] * 3 + [2.0] * 60)
    assert len(said) == 2 and "train.max_loss_ratio=3" in said[0] and "come back" in said[1]
    assert state.spike_steps == 0 and state.last_good_step == 68


def test_one_unlucky_batch_is_no_spike() -> None:
    assert levels([2.0] * 5 + [40.0] + [2.0] * 5)[1] == []
    assert levels([2.0] * 5 + [40.0])[0].last_good_step == 5, "but it does not speak for the weights"


def test_a_destroyed_student_is_seen_in_the_first_step_after() -> None:
    state, said = levels([8.0, 1e4])
    assert len(said) == 1 and state.spike_steps == 1 and state.last_good_step == 1


def test_a_start_without_loss_sets_no_level_that_nothing_reaches() -> None:
    assert levels([0.0, 0.001, 0.5, 1.5, 2.0])[1] == []


def test_a_weight_that_rises_is_no_loss_that_does() -> None:
    assert levels([8.0] * 50, weight=lambda step: 1.0 + step)[1] == []


def test_without_a_limit_any_loss_is_sane() -> None:
    state, said = levels([8.0, 1e9], limit=None)
    assert not said and state.last_good_step == 2


def test_terms_that_come_later_have_a_first_step_of_their_own() -> None:
    state = State()
    follow(state, {"mlm": 8.0, "order": 0.0}, {"mlm": 1.0, "order": 0.0}, {"mlm": 1.0, "order": 1.0})
    follow(state, {"mlm": 8.0, "order": 6.0}, {"mlm": 1.0, "order": 1.0}, {"mlm": 1.0, "order": 1.0})
    assert state.first_losses == {"mlm": 8.0, "order": 6.0} and state.running_mean == pytest.approx(1.0)


# --- a training ----------------------------------------------------------------------------------------------------


def destroyed(tmp_path: Path, tokenizer: Any, at: int, until: int = 99, **settings: Any) -> Fit:
    """A training without a teacher whose student has its output scaled up after step `at`, and back after `until`."""
    train = TrainConfig(**{"batch_size": 4, "accumulate": 2, "epochs": None, "steps": 12, "save_every": 1, **settings})
    fit = Fit(
        tmp_path, tokenizer, make_rows(80), None, new_student(), only(mlm=1.0), train, schedule=Constant(warmup=0.0),
        optimizer_settings=OptimizerConfig(lr=1e-9),
    )  # fmt: skip

    def on_log(fit: Fit, metrics: dict[str, float]) -> None:
        with torch.no_grad():
            if int(metrics["step"]) in (at, until):
                fit.student.vocab_layer_norm.weight.mul_(1e4 if int(metrics["step"]) == at else 1e-4)

    fit.on_log = on_log
    return fit


def steps_of(fit: Fit) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in fit.checkpoints.saved()]


def test_the_good_checkpoint_stays_while_the_loss_is_high(tmp_path: Path, tokenizer: Any) -> None:
    fit = destroyed(tmp_path, tokenizer, at=3, until=8, keep=2)
    seen: list[list[int]] = []
    inner = fit.on_log

    def on_log(fit: Fit, metrics: dict[str, float]) -> None:
        seen.append(steps_of(fit))
        inner(fit, metrics)

    fit.on_log = on_log
    with pytest.raises(Diverged):  # the mean has not come down again in four steps
        fit.run()
    # That of step 3 holds the destroyed weights already, though the loss of step 3 was as usual.
    assert seen[3:8] == [[2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6], [2, 6, 7]]
    assert steps_of(fit) == [2]


@pytest.mark.parametrize("settings", [{"steps": 6}, {"max_spike": 2}])
def test_a_destroyed_student_ends_with_status_3(tmp_path: Path, tokenizer: Any, settings: dict[str, Any]) -> None:
    fit = destroyed(tmp_path, tokenizer, at=3, **settings)
    with pytest.raises(Diverged, match=r"train\.max_loss_ratio.*The last good checkpoint is .*step-00000002"):
        fit.run()
    assert fit.epochs == [], "it is not scored"
    assert steps_of(fit) == [2]
    assert len(list(fit.checkpoints.folder.glob("diverged-step-*"))) == 2, "they are kept"


def test_the_checkpoint_of_the_step_that_destroys_is_not_the_last_good_one(tmp_path: Path, tokenizer: Any) -> None:
    """Its own loss was as usual; it would be resumed from again and again."""
    fit = destroyed(tmp_path, tokenizer, at=6, steps=9, save_every=2, keep=1)
    with pytest.raises(Diverged, match=r"The last good checkpoint is .*step-00000004"):
        fit.run()
    assert steps_of(fit) == [4]


def test_a_checkpoint_that_falls_on_a_skipped_step_comes_after_the_next_one(tmp_path: Path, tokenizer: Any) -> None:
    fit = destroyed(tmp_path, tokenizer, at=99, steps=5, save_every=3)
    bias = fit.student.vocab_projector.bias
    bias.register_hook(lambda grad: grad * math.inf if fit.state.step == 2 else grad)
    fit.run()
    assert fit.state.skipped == 1 and steps_of(fit) == [4, 5]


def test_a_diverged_end_is_also_found_after_an_interruption(tmp_path: Path, tokenizer: Any) -> None:
    """Killed between the last checkpoint, which is not good, and what comes after it."""
    fit = destroyed(tmp_path, tokenizer, at=3, steps=12, keep=3)
    inner = fit.on_log

    def on_log(fit: Fit, metrics: dict[str, float]) -> None:
        inner(fit, metrics)
        if metrics["step"] == 7:
            raise KeyboardInterrupt

    fit.on_log = on_log
    with pytest.raises(KeyboardInterrupt):
        fit.run()
    assert steps_of(fit) == [2, 4, 5, 6]
    again = destroyed(tmp_path, tokenizer, at=99, steps=6, keep=3).resume()
    with pytest.raises(Diverged):
        again.run()
    assert steps_of(again) == [2]


def test_a_spike_changes_nothing_in_what_is_trained(tmp_path: Path, tokenizer: Any) -> None:
    watched, unwatched = (
        destroyed(tmp_path / str(limit), tokenizer, at=2, until=3, steps=60, save_every=100, max_loss_ratio=limit)
        for limit in (3.0, None)
    )
    assert watched.run() == unwatched.run() == "steps"
    assert all(
        torch.equal(a, b) for a, b in zip(watched.student.parameters(), unwatched.student.parameters(), strict=True)
    )


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, tokenizer: Any) -> None:
    fit = destroyed(tmp_path, tokenizer, at=99)
    fit.checkpoints.save(fit.state, fit.model, fit.made)
    assert steps_of(fit) == [0]
    fit.state.step = 1
    with torch.no_grad():
        next(fit.student.parameters()).view(-1)[5] = math.inf
    fit.checkpoints.save(fit.state, fit.model, fit.made)
    assert steps_of(fit) == [0]


# --- whose rows ----------------------------------------------------------------------------------------------------


def test_the_rows_of_the_micro_batch_are_named(
    tmp_path: Path, tokenizer: Any, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fit = Fit(
        tmp_path, tokenizer, rows, None, new_student(), only(mlm=1.0), TrainConfig(batch_size=4, accumulate=2, epochs=1)
    )
    bad = fit.batches.window(1)[1].row_ids
    inner = Objective.__call__

    def break_it(self: Objective, model: Any, output: Any, batch: Any, scales: Any) -> Any:
        loss, parts = inner(self, model, output, batch, scales)
        broken = np.array_equal(batch.row_ids, bad)
        return (loss * math.nan, parts * math.nan) if broken else (loss, parts)

    monkeypatch.setattr(Objective, "__call__", break_it)
    with caplog.at_level(logging.WARNING):
        fit.run()
    (line,) = [record.message for record in caplog.records if "not finite" in record.message]
    assert line == f"step 2 is skipped: its loss is not finite, in sequences {', '.join(map(str, bad))}"


# --- scores --------------------------------------------------------------------------------------------------------


def test_scores_of_a_diverged_student_are_named() -> None:
    scores = {"perplexity": {"a": 3.0, "b": math.inf}, "accuracy": {"a": math.nan, "b": None, "c": 1e300}}
    expected = ["perplexity on b = inf", "accuracy on a = nan", "accuracy on b = no number"]
    assert diverged_scores(scores, 100, None) == diverged_scores(scores, 100, 3.0) == expected


@pytest.mark.parametrize(("limit", "diverged"), [(3.0, True), (4.0, False), (None, False)])
def test_a_perplexity_far_beyond_guessing_is_that_of_a_diverged_student(limit: float | None, diverged: bool) -> None:
    """Guessing among 100 words has a perplexity of 100."""
    assert bool(diverged_scores({"pseudo_perplexity": {"a": 2e6}}, 100, limit)) == diverged


# --- whole runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        ["optimizer.lr=1e5"],
        pytest.param(["optimizer.lr=1e5", "train.save_every=1", "train.keep=1"], marks=pytest.mark.slow),
    ],
)
def test_a_destroyed_student_is_not_published(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture, settings: list[str]
) -> None:
    """However often the command is started."""
    folder = tmp_path / "run"
    for _ in range(2):
        assert shelf.run(folder, "schedule.warmup=0", *settings) == 3
        assert "Traceback" not in capfd.readouterr().err
        assert not (folder / "student").exists() and not (folder / "results.json").exists()
        for path in (folder / "checkpoints").glob("step-*"):
            assert all(tensor.abs().max() < 100 for tensor in load_file(path / "model.safetensors").values())


def test_a_student_without_finite_scores_is_not_published(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "run"
    score = Evaluator.score

    def broken(self: Evaluator, *arguments: Any) -> Any:
        found = score(self, *arguments)
        return {name: dict.fromkeys(values, math.inf) for name, values in found.items()}

    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "score", broken)
        assert shelf.run(folder) == 3
    assert "the student has diverged (perplexity on heldout = no number" in capfd.readouterr().err
    assert not (folder / "student").exists() and not (folder / "results.json").exists()


def test_weights_that_are_not_finite_are_not_published(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Destroyed in the last step, where no later loss and, without evaluation sets, no score shows it."""
    folder = tmp_path / "run"
    evaluate = loop.evaluate

    def destroy(run: loop.Training, *others: Any) -> None:
        evaluate(run, *others)
        if run.state.step == 8:
            with torch.no_grad():
                next(run.learner.model.parameters()).fill_(math.nan)

    monkeypatch.setattr(loop, "evaluate", destroy)
    assert shelf.run(folder, "evaluate.sets=[]") == 3
    assert "the student has diverged (weights that are not finite)" in capfd.readouterr().err
    assert not (folder / "student").exists() and not (folder / "results.json").exists()
