"""Steps that are not finite, and all the ways in which a training ends."""

import math
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import Fit, make_model, make_rows, new_student, only, weights_of

from distill.config.settings import OnUsr1, TrainConfig
from distill.data import remote
from distill.data.remote import retried
from distill.optim.schedule import ENDLESS, total_steps
from distill.optim.schedules.linear import Linear
from distill.runtime.errors import Diverged, Interrupted
from distill.runtime.signals import handled


def words_alone(
    folder: Path, tokenizer: Any, rows: np.ndarray, more: dict[str, Any] | None = None, **train: Any
) -> Fit:
    """Masked words alone, eight sequences a step unless `train` names others; `more`: of the fit."""
    settings = TrainConfig(**{"batch_size": 4, "accumulate": 2, **train})
    return Fit(folder, tokenizer, rows, objective=only(mlm=1.0), settings=settings, **(more or {}))


def at_step(fit: Fit, step: int, number: int) -> None:
    """Send this process a signal in the forward of the step after so many."""
    fit.student.base_model.register_forward_pre_hook(
        lambda *_: signal.raise_signal(number) if fit.state.step == step else None
    )


# --- steps that are not finite -------------------------------------------------------------------------------------


def poison(weights: torch.Tensor, steps: tuple[int, ...]) -> Any:
    """An `on_log` that breaks the teacher during these steps (the log of step n comes before step n + 1)."""
    good = weights.detach().clone()

    def on_log(fit: Fit, metrics: dict[str, float]) -> None:
        with torch.no_grad():
            weights.copy_(good * math.nan if int(metrics["step"]) + 1 in steps else good)

    return on_log


def history_of_weights(fit: Fit) -> list[torch.Tensor]:
    """Fills itself with all weights after each step that is logged."""
    seen: list[torch.Tensor] = []
    before = fit.on_log

    def on_log(fit: Fit, metrics: dict[str, float]) -> None:
        seen.append(torch.cat([w.flatten() for w in weights_of(fit.student).values()]))
        before(fit, metrics)

    fit.on_log = on_log
    return seen


def poisoned(tmp_path: Path, tokenizer: Any, rows: np.ndarray, steps: tuple[int, ...], **settings: Any) -> Fit:
    teacher = make_model("bert", 2).requires_grad_(False)
    train = TrainConfig(**{"batch_size": 4, "accumulate": 2, "epochs": 3, "max_nonfinite": 3, **settings})
    fit = Fit(tmp_path, tokenizer, rows, teacher, new_student(), settings=train)
    fit.on_log = poison(teacher.bert.embeddings.word_embeddings.weight, steps)
    return fit


def test_a_loss_that_is_not_finite_never_enters_the_weights(tmp_path: Path, tokenizer: Any, rows: np.ndarray) -> None:
    fit = poisoned(tmp_path, tokenizer, rows, (3, 4, 7))
    seen = history_of_weights(fit)
    assert fit.run() == "epochs"
    assert (fit.state.step, fit.state.skipped, fit.state.skipped_in_a_row) == (9, 3, 0)
    same = [torch.equal(seen[step - 1], seen[step - 2]) for step in range(2, 10)]
    assert same == [step in (3, 4, 7) for step in range(2, 10)]
    assert all(weights.isfinite().all() for weights in seen)
    assert all(v.isfinite().all() for state in fit.made.state.values() for v in state.values())
    steps_taken = {int(state["step"]) for state in fit.made.state.values()}
    assert steps_taken == {6}, "nor do Adam's own counts take part"
    assert [line["skipped"] for line in fit.logs] == [0, 0, 1, 2, 2, 2, 3, 3, 3]
    # Epoch means leave them out, and no line claims a loss of 0 for a step that has none.
    good = [line["loss/mlm"] for line in fit.logs if line["step"] not in (3, 4, 7)]
    assert [losses["mlm"] for _, _, losses in fit.epochs] == pytest.approx(
        [fit.mean_mlm((1, 2)), fit.mean_mlm((5, 6)), fit.mean_mlm((8, 9))], rel=1e-6
    )
    assert min(good) > 0.1
    for line in fit.logs:
        if line["step"] in (3, 4, 7):
            assert not math.isfinite(line["loss/total"]) and not math.isfinite(line["grad_norm"])


def test_a_gradient_that_is_not_finite_never_enters_the_weights(
    tmp_path: Path, tokenizer: Any, rows: np.ndarray
) -> None:
    fit = words_alone(tmp_path, tokenizer, rows, epochs=2)
    bias = fit.student.vocab_projector.bias
    bias.register_hook(lambda grad: grad * math.inf if fit.state.step == 2 else grad)
    fit.on_log = lambda fit, metrics: None
    seen = history_of_weights(fit)
    fit.run()
    assert fit.state.skipped == 1 and torch.equal(seen[2], seen[1]) and not torch.equal(seen[3], seen[2])
    assert seen[-1].isfinite().all() and not math.isfinite(fit.logs[2]["grad_norm"])


@pytest.mark.parametrize(("first", "save_every", "kept"), [(3, 1, [1]), (4, 2, [2]), (3, 100, []), (1, 1, [])])
def test_a_run_that_diverges_saves_nothing_more_and_goes_on_from_the_good_checkpoint(
    tmp_path: Path, tokenizer: Any, first: int, save_every: int, kept: list[int]
) -> None:
    rows = make_rows(80)  # ten steps: no epoch ends, which would save too
    fit = poisoned(tmp_path, tokenizer, rows, tuple(range(first, 50)), save_every=save_every, epochs=9)
    assert fit.teacher is not None
    word = fit.teacher.bert.embeddings.word_embeddings.weight
    good = word.clone()
    if first == 1:
        word.fill_(math.nan)
    seen = history_of_weights(fit)
    with pytest.raises(Diverged) as error:
        fit.run()
    text = str(error.value)
    assert error.value.status == 3 and fit.state.step == first + 2
    assert "\n" not in text and "train.max_nonfinite=3" in text
    assert "the teacher's own" in text and "optimizer.lr" not in text
    assert saved_steps(fit) == kept
    if not kept:
        assert "There is no good checkpoint" in text
        return
    assert f"The last good checkpoint is {fit.checkpoints.newest()}" in text
    word.copy_(good)
    settings = TrainConfig(batch_size=4, accumulate=2, steps=kept[-1] + 2)
    again = Fit(tmp_path, tokenizer, rows, fit.teacher, new_student(), settings=settings).resume()
    assert torch.equal(torch.cat([w.flatten() for w in weights_of(again.student).values()]), seen[kept[-1] - 1])
    again.run()
    assert again.state.step == kept[-1] + 2 and again.state.skipped_in_a_row == 0


def saved_steps(fit: Fit) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in fit.checkpoints.saved()]


# --- the end -------------------------------------------------------------------------------------------------------


def test_the_first_limit_ends_the_run() -> None:
    assert total_steps(TrainConfig(epochs=3, steps=None), 7) == 21
    assert total_steps(TrainConfig(epochs=3, steps=20), 7) == 20
    assert total_steps(TrainConfig(epochs=None, steps=50), 7) == 50
    assert total_steps(TrainConfig(epochs=None, steps=None, minutes=1.0), 7) == ENDLESS


@pytest.mark.parametrize(
    ("settings", "ended_by", "steps", "evaluated"),
    [
        ({"epochs": 2}, "epochs", 6, [3, 6]),
        ({"epochs": 2, "steps": 4}, "steps", 4, [3, 4]),
        ({"epochs": None, "steps": 7}, "steps", 7, [3, 6, 7]),
        ({"epochs": 2, "steps": 6}, "epochs", 6, [3, 6]),
        ({"batch_size": 16, "accumulate": 50, "epochs": 2}, "epochs", 2, [1, 2]),  # fewer rows than one step takes
    ],
)
def test_ends(
    tmp_path: Path,
    tokenizer: Any,
    rows: np.ndarray,
    settings: dict[str, Any],
    ended_by: str,
    steps: int,
    evaluated: list[int],
) -> None:
    fit = words_alone(tmp_path, tokenizer, rows, **settings)
    before = weights_of(fit.student)
    assert fit.run() == ended_by
    assert fit.state.step == len(fit.logs) == steps
    if steps == 6 and settings.get("batch_size") is None:  # every position counts once an epoch
        assert fit.state.tokens == fit.logs[-1]["tokens"] == 2 * int((rows != tiny.PAD).sum())
    assert [step for step, _, _ in fit.epochs] == evaluated
    assert [epochs for _, epochs, _ in fit.epochs] == [step / fit.batches.steps_per_epoch for step in evaluated]
    assert saved_steps(fit)[-1] == steps
    assert all(not torch.equal(w, before[n]) for n, w in weights_of(fit.student).items() if "position" not in n)
    # The schedule reaches its end: the last step has half a step's share of the way left.
    assert fit.logs[-1]["lr"] == pytest.approx(1e-2 * Linear()(1 - 0.5 / steps))


class Clock:
    """Each look at it takes a second, so a step takes a known time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def test_ends_by_the_clock(tmp_path: Path, tokenizer: Any, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.loop, "time", Clock())
    make = partial(words_alone, tmp_path, tokenizer, rows, {"schedule": Linear(warmup=0.0)}, epochs=None, minutes=0.25)
    fit = make()
    assert fit.run() == "minutes"
    seconds = [line["seconds"] for line in fit.logs]
    assert seconds[-1] == pytest.approx(15, abs=3) and fit.state.step > 3
    rates = [line["lr"] for line in fit.logs]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == len(rates)
    assert rates[0] > 0.7e-2 and rates[-1] < 0.2e-2
    assert fit.epochs[-1][0] == fit.state.step and fit.checkpoints.newest() is not None
    # A second start of the finished run adds no step, but gives what a kill before the last evaluation has cost.
    again = make().resume()
    assert again.run() == "minutes" and again.state.step == fit.state.step and not again.logs
    assert again.epochs == fit.epochs[-1:]


# --- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)]
)
def test_a_signal_stops_after_the_step_with_a_checkpoint(
    tmp_path: Path, tokenizer: Any, rows: np.ndarray, number: signal.Signals, status: int
) -> None:
    fit = words_alone(tmp_path, tokenizer, rows, epochs=5)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    at_step(fit, 3, number)
    with pytest.raises(Interrupted) as error:
        fit.run()
    assert error.value.status == status and fit.state.step == 4 and "step 4" in str(error.value)
    assert saved_steps(fit)[-1] == 4
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    again = words_alone(tmp_path, tokenizer, rows, epochs=5).resume()
    assert again.run() == "epochs" and again.state.step == 15 and again.logs[0]["step"] == 5


class OutOfOrder:
    """Rows of which only some can be read."""

    def __init__(self, rows: np.ndarray, readable: np.ndarray) -> None:
        self.rows, self.readable, self.dtype, self.shape = rows, readable, rows.dtype, rows.shape

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        return retried(lambda: self.rows[numbers] if np.isin(numbers, self.readable).all() else self.fail(), "s3://a/b")

    def fail(self) -> Any:
        raise OSError("503")


@pytest.mark.parametrize("threads", [0, 2])
def test_a_signal_while_storage_is_out_of_order_keeps_all_steps(
    tmp_path: Path, tokenizer: Any, rows: np.ndarray, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote.random, "uniform", lambda low, high: 30.0)
    fit = words_alone(tmp_path, tokenizer, rows, epochs=1, save_every=100)
    readable = fit.batches.order.numbers(0, np.arange(2 * fit.batches.sequences_per_step))
    fit.batches = replace(fit.batches, sequences=OutOfOrder(rows, readable), threads=threads)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    in_the_last_step = lambda *_: timer.start() if fit.state.step == 1 and not timer.ident else None  # noqa: E731
    fit.student.base_model.register_forward_pre_hook(in_the_last_step)
    begun = time.monotonic()
    # In force before the first thread reads ahead, as in every command.
    with pytest.raises(Interrupted) as error, handled():
        fit.run()
    assert time.monotonic() - begun < 25 and error.value.status == 143, "it waited for the pause of 30 s"
    assert "stopped by SIGTERM at step 2, its checkpoint is written" in str(error.value)
    assert saved_steps(fit)[-1] == 2


@pytest.mark.parametrize("answer", list(OnUsr1))
def test_usr1_writes_a_checkpoint_and_goes_on_or_stops(
    tmp_path: Path, tokenizer: Any, rows: np.ndarray, answer: OnUsr1
) -> None:
    fit = words_alone(tmp_path, tokenizer, rows, epochs=None, steps=3, save_every=100, on_usr1=answer)
    at_step(fit, 0, signal.SIGUSR1)
    if answer is OnUsr1.save:
        assert fit.run() == "steps" and saved_steps(fit) == [1, 3]
    else:
        with pytest.raises(Interrupted) as error:
            fit.run()
        assert error.value.status == 138 and saved_steps(fit) == [1]


@pytest.mark.parametrize("when", ["last step", "last evaluation"])
def test_a_signal_at_the_end_is_not_lost(tmp_path: Path, tokenizer: Any, rows: np.ndarray, when: str) -> None:
    """The report that follows may take long; the same command goes on from the checkpoint with it."""
    fit = words_alone(tmp_path, tokenizer, rows, epochs=1)
    if when == "last step":
        at_step(fit, 2, signal.SIGTERM)
    else:
        fit.epochs = SignalOnAppend()
    with pytest.raises(Interrupted):
        fit.run()
    again = words_alone(tmp_path, tokenizer, rows, epochs=1).resume()
    assert again.run() == "epochs" and not again.logs and [step for step, _, _ in again.epochs] == [3]


class SignalOnAppend(list[Any]):
    def append(self, item: Any) -> None:
        super().append(item)
        signal.raise_signal(signal.SIGTERM)
