"""Destroyed students: which losses are sane, which checkpoints stay, who is to blame, what is not published."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import Shelf
from safetensors.torch import load_file
from tiny import VOCAB, Fit, loop, make_model, make_rows, new_student, only

from distill.commands.evaluate import evaluate_models
from distill.config.settings import OptimizerConfig
from distill.evaluation.evaluator import Evaluator
from distill.models.check import check_finite, check_model
from distill.models.loaded import LoadedModel
from distill.objective.objective import Objective
from distill.optim.schedules.constant import Constant
from distill.runs.divergence import diverged_scores
from distill.runs.state import State
from distill.runtime.errors import Diverged, SettingError

# --- the running mean of the loss ----------------------------------------------------------------------------------


def levels(losses: list[float], limit: float | None = 3.0, weight: Any = lambda step: 1.0) -> tuple[State, list[str]]:
    """The state after these mean losses, one a step, and what was logged."""
    state, said = State(), list[str | None]()
    for step, loss in enumerate(losses, 1):
        state.step += 1
        said.append(state.take({"mlm": 4 * loss}, {"mlm": 4.0}, {"mlm": weight(step)}, limit))
    return state, [each for each in said if each]


@pytest.mark.parametrize(
    ("losses", "settings", "warnings", "spike_steps", "last_good"),
    [
        ([2.0] * 5 + [80.0] * 3 + [2.0] * 60, {}, 2, 0, 68),  # a spike that comes back
        ([2.0] * 5 + [40.0] + [2.0] * 5, {}, 0, 0, 11),  # one unlucky batch
        ([2.0] * 5 + [40.0], {}, 0, 0, 5),  # which does not speak for the weights
        ([8.0, 1e4], {}, 1, 1, 1),  # a destroyed student
        ([0.0, 0.001, 0.5, 1.5, 2.0], {}, 0, 0, 5),  # a start without loss
        ([8.0] * 50, {"weight": lambda step: 1.0 + step}, 0, 0, 50),
        ([8.0, 1e9], {"limit": None}, 0, 0, 2),
    ],
)
def test_spikes_of_the_loss(
    losses: list[float], settings: dict[str, Any], warnings: int, spike_steps: int, last_good: int
) -> None:
    state, said = levels(losses, **settings)
    assert (len(said), state.spike_steps, state.last_good_step) == (warnings, spike_steps, last_good)
    assert not said or "train.max_loss_ratio=3" in said[0]


def test_the_loss_of_late_is_the_mean_of_multiples_of_the_first_step_of_each_term() -> None:
    state, _ = levels([8.0, 6.0, 4.0])
    assert state.running_mean == pytest.approx(0.9 * (0.9 * 1 + 0.1 * 6 / 8) + 0.1 * 4 / 8)
    state, weights = State(), {"mlm": 1.0, "order": 1.0}
    state.take({"mlm": 8.0, "order": 0.0}, {"mlm": 1.0, "order": 0.0}, weights, 3.0)
    state.take({"mlm": 8.0, "order": 6.0}, {"mlm": 1.0, "order": 1.0}, weights, 3.0)
    assert state.first_losses == {"mlm": 8.0, "order": 6.0} and state.running_mean == pytest.approx(1.0)


# --- a training ----------------------------------------------------------------------------------------------------


@pytest.fixture
def destroyed(fit: Any) -> Any:
    """Makes trainings whose student has its output scaled up after step `at`, and back after `until`.

    With each the checkpoints before a step is saved.
    """

    def make(at: int, until: int = 99, **train: Any) -> tuple[Fit, list[list[int]]]:
        rate = {"schedule": Constant(warmup=0.0), "optimizer_settings": OptimizerConfig(lr=1e-9)}
        settings, seen = {"epochs": None, "steps": 12, "save_every": 1, **train}, list[list[int]]()
        made = fit("", settings, rows=make_rows(80), student=new_student(), objective=only(mlm=1.0), **rate)

        def on_log(fit: Fit, metrics: dict[str, float]) -> None:
            seen.append(steps_of(fit))
            with torch.no_grad():
                if int(metrics["step"]) in (at, until):
                    fit.student.vocab_layer_norm.weight.mul_(1e4 if int(metrics["step"]) == at else 1e-4)

        made.on_log = on_log
        return made, seen

    return make


def steps_of(fit: Fit) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in fit.checkpoints.saved()]


def test_the_good_checkpoint_stays_while_the_loss_is_high(destroyed: Any) -> None:
    fit, seen = destroyed(at=3, until=8, keep=2)
    with pytest.raises(Diverged):  # the mean has not come down again in four steps
        fit.run()
    # That of step 3 holds the destroyed weights already, though the loss of step 3 was as usual.
    assert seen[3:8] == [[2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6], [2, 6, 7]]
    assert steps_of(fit) == [2]


@pytest.mark.parametrize(
    ("at", "settings", "left", "diverged"),
    [
        (3, {"steps": 6}, [2], 2),
        (3, {"max_spike": 2}, [2], 2),
        # The loss of the step that destroys was as usual; it would be resumed from again and again.
        (6, {"steps": 9, "save_every": 2, "keep": 1}, [4], 1),
    ],
)
def test_a_destroyed_student_ends_with_status_3(
    destroyed: Any, at: int, settings: dict[str, Any], left: list[int], diverged: int
) -> None:
    fit, _ = destroyed(at=at, **settings)
    words = rf"train\.max_loss_ratio.*The last good checkpoint is .*step-0000000{left[0]}"
    with pytest.raises(Diverged, match=words) as error:
        fit.run()
    assert error.value.status == 3 and fit.epochs == [], "it is not scored"
    assert steps_of(fit) == left
    assert len(list(fit.checkpoints.folder.glob("diverged-step-*"))) == diverged, "they are kept"


def test_a_checkpoint_that_falls_on_a_skipped_step_comes_after_the_next_one(destroyed: Any) -> None:
    fit, _ = destroyed(at=99, steps=5, save_every=3)
    fit.student.vocab_projector.bias.register_hook(lambda grad: grad * math.inf if fit.state.step == 2 else grad)
    fit.run()
    assert fit.state.skipped == 1 and steps_of(fit) == [4, 5]


def test_a_diverged_end_is_also_found_after_an_interruption(destroyed: Any) -> None:
    """Killed between the last checkpoint, which is not good, and what comes after it."""
    fit, _ = destroyed(at=3, keep=3)
    inner = fit.on_log

    def on_log(fit: Fit, metrics: dict[str, float]) -> None:
        inner(fit, metrics)
        if metrics["step"] == 7:
            raise KeyboardInterrupt

    fit.on_log = on_log
    with pytest.raises(KeyboardInterrupt):
        fit.run()
    assert steps_of(fit) == [2, 4, 5, 6]
    again, _ = destroyed(at=99, steps=6)
    with pytest.raises(Diverged, match="step-00000002"):
        again.resume().run()


def test_weights_that_are_not_finite_are_not_saved(destroyed: Any) -> None:
    fit, _ = destroyed(at=99)
    assert fit.checkpoints.save(fit.state, fit.model, fit.made) and steps_of(fit) == [0]
    fit.state.step = 1
    with torch.no_grad():
        next(fit.student.parameters()).view(-1)[5] = math.inf
    assert not fit.checkpoints.save(fit.state, fit.model, fit.made) and steps_of(fit) == [0]


# --- who made it ---------------------------------------------------------------------------------------------------


def test_the_rows_of_the_micro_batch_are_named(
    fit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = fit("", {"epochs": 1}, student=new_student(), objective=only(mlm=1.0))
    bad, inner = made.batches.window(1)[1].row_ids, Objective.__call__

    def break_it(self: Objective, model: Any, output: Any, batch: Any, scales: Any) -> Any:
        loss, parts = inner(self, model, output, batch, scales)
        broken = np.array_equal(batch.row_ids, bad)
        return (loss * math.nan, parts * math.nan) if broken else (loss, parts)

    monkeypatch.setattr(Objective, "__call__", break_it)
    with caplog.at_level(logging.WARNING):
        made.run()
    (line,) = [record.message for record in caplog.records if "not finite" in record.message]
    assert line == f"step 2 is skipped: its loss is not finite, in sequences {', '.join(map(str, bad))}"


@pytest.mark.parametrize(("broken", "term"), [("teacher", "soft"), ("teacher", "cosine"), ("student", "soft")])
def test_who_made_a_loss_that_is_not_finite(broken: str, term: str, fit: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As of a model whose weights are finite and whose outputs are not."""
    models = {"teacher": make_model("bert", 2).requires_grad_(False), "student": new_student()}
    with torch.no_grad():
        models[broken].get_input_embeddings().weight[9] = math.nan
    train = {"epochs": None, "steps": 12, "max_nonfinite": 2}
    made = fit("", train, rows=make_rows(80), objective=only(**{term: 1.0}), **models)
    with caplog.at_level(logging.WARNING), pytest.raises(Diverged) as error:
        made.run()
    assert ("the teacher's own" in str(error.value)) == (broken == "teacher")
    words = set(str(error.value).replace("=", " ").split())
    assert not {"optimizer.lr", "precision"} & words, "nothing was updated, in fp32"
    skipped = [record.message for record in caplog.records if "is skipped" in record.message]
    assert len(skipped) == 2 and all(("teacher" in line) == (broken == "teacher") for line in skipped)


WEIGHTS = {
    "bert.encoder.layer.1.output.dense.weight": (0, 0),  # of a layer
    "bert.embeddings.word_embeddings.weight": (VOCAB - 1, 3),  # of one token, and of its row of the tied head
    "cls.predictions.bias": (7,),
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_that_is_not_finite_is_named_at_the_start(name: str, value: float, tokenizer: Any) -> None:
    model = make_model("bert", 2)
    with torch.no_grad():
        model.get_parameter(name)[WEIGHTS[name]] = value
    for read in (lambda: check_model(model, "teacher.path=x"), lambda: LoadedModel.of(model, tokenizer)):
        with pytest.raises(SettingError, match=name) as error:
            read()
        assert error.value.setting in ("teacher.path=x", "model") and "earlier checkpoint" in error.value.cure


def test_a_bias_that_keeps_a_padded_row_from_being_predicted_may_be_infinite() -> None:
    model = make_model("bert", 2)
    with torch.no_grad():
        model.get_output_embeddings().bias[-1] = -math.inf
        check_finite(model, "teacher")
        model.bert.encoder.layer[0].output.dense.bias[0] = -math.inf
    with pytest.raises(SettingError):
        check_finite(model, "teacher")


# --- scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "limit", "named"),
    [
        ({"perplexity": {"a": 3.0, "b": math.inf}}, None, ["perplexity on b = inf"]),
        (
            {"accuracy": {"a": math.nan, "b": None, "c": 1e300}},
            3.0,
            ["accuracy on a = nan", "accuracy on b = no number"],
        ),
        # Guessing among 100 words has a perplexity of 100.
        ({"pseudo_perplexity": {"a": 2e6}}, 3.0, ["pseudo_perplexity on a = 2000000.0"]),
        ({"pseudo_perplexity": {"a": 2e6}}, 4.0, []),
        ({"pseudo_perplexity": {"a": 2e6}}, None, []),
    ],
)
def test_scores_of_a_diverged_student_are_named(scores: Any, limit: float | None, named: list[str]) -> None:
    assert diverged_scores(scores, 100, limit) == named


def test_a_score_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Evaluator.score_by_sequence

    def overflowing(self: Evaluator, *arguments: Any) -> Any:
        scores, losses = inner(self, *arguments)
        return {name: dict.fromkeys(by_set, math.nan) for name, by_set in scores.items()}, losses

    monkeypatch.setattr(Evaluator, "score_by_sequence", overflowing)
    Path("text.txt").write_text("The river followed the old road. " * 20)
    settings = ["evaluate.sets=[mine]", "evaluate.sources.mine={kind: text, path: text.txt}", "data.cache=cache"]
    with pytest.raises(SettingError) as error:
        evaluate_models(["bundled_small"], [*settings, "evaluate.pseudo_perplexity.fraction=0"], tmp_path / "scores")
    assert (error.value.setting, error.value.value) == ("model", "bundled_small")
    assert not (tmp_path / "scores").exists()


# --- whole runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], pytest.param(["train.save_every=1", "train.keep=1"], marks=pytest.mark.slow)])
def test_a_destroyed_student_is_not_published(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture, more: list[str]
) -> None:
    """However often the command is started."""
    folder = tmp_path / "run"
    for _ in range(2):
        assert shelf.run(folder, "schedule.warmup=0", "optimizer.lr=1e5", *more) == 3
        assert "Traceback" not in capfd.readouterr().err
        assert not (folder / "student").exists() and not (folder / "results.json").exists()
        for path in (folder / "checkpoints").glob("step-*"):
            assert all(tensor.abs().max() < 100 for tensor in load_file(path / "model.safetensors").values())


@pytest.mark.parametrize("broken", ["scores", "weights"])
def test_a_student_that_is_not_finite_is_not_published(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, broken: str
) -> None:
    """Also destroyed in the last step, where no later loss and, without evaluation sets, no score shows it."""
    score, evaluate = Evaluator.score_by_sequence, loop.evaluate

    def infinite(self: Evaluator, *arguments: Any) -> Any:
        scores, losses = score(self, *arguments)
        return {name: dict.fromkeys(values, math.inf) for name, values in scores.items()}, losses

    def destroy(training: loop.Training, *others: Any) -> None:
        evaluate(training, *others)
        if training.state.step == 8:
            with torch.no_grad():
                next(training.learner.model.parameters()).fill_(math.nan)

    if broken == "scores":
        monkeypatch.setattr(Evaluator, "score_by_sequence", infinite)
    else:
        monkeypatch.setattr(loop, "evaluate", destroy)
    assert shelf.run(tmp_path / "run", *(["evaluate.sets=[]"] if broken == "weights" else [])) == 3
    words = {"scores": "perplexity on heldout = no number", "weights": "weights that are not finite"}
    assert f"the student has diverged ({words[broken]}" in capfd.readouterr().err
    assert not {"student", "results.json"} & {path.name for path in (tmp_path / "run").iterdir()}
