"""The loop: the same weights for every split, non-finite steps kept out, all ways to end, and what it logs."""

import copy
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
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
from tiny import Fit, assert_close, make_model, make_rows, new_student, objective_config, only, plain_sgd, weights_of

from distill.config import settings as conf
from distill.config.settings import BackendConfig, OnUsr1, TrainConfig
from distill.data import remote
from distill.data.batches import StepShape
from distill.data.remote import retried
from distill.evaluation.sets import EvaluationSet
from distill.optim.schedule import ENDLESS, total_steps
from distill.optim.schedules.linear import Linear
from distill.runs.facts import HistoryPoint
from distill.runtime.errors import Diverged, Interrupted
from distill.runtime.signals import handled

Make = Callable[..., Fit]
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
    fit: Make, teacher: Any, by_definition: Any, batch_size: int, accumulate: int
) -> None:
    """SGD, since Adam hides an error of scale; unequal numbers of targets, padding, and a short last window."""
    objective, weights, losses = by_definition
    train = {"batch_size": batch_size, "accumulate": accumulate, "epochs": 1}
    made = fit("", train, teacher=teacher, student=new_student(), objective=objective, **plain_sgd())
    targets = {len(batch.labels["mlm"].positions) for step in range(3) for batch in made.batches.window(step)}
    assert len(targets) > 1 and made.batches.steps_per_epoch == 3
    assert made.run() == "epochs"
    assert [line["loss/total"] for line in made.logs] == pytest.approx(losses, rel=2e-5)
    trained = weights_of(made.student)
    moved = max(float((trained[n] - w).abs().max()) for n, w in weights_of(new_student()).items())
    assert moved > 0.05, "the comparison needs weights that move"
    assert_close(trained, weights, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_same_weights_for_every_number_of_ranks(fit: Make, teacher: Any, size: int) -> None:
    """Each rank adds the gradient of its own micro-batches, divided by the counts of all; 24 // 8 rows at a time."""
    train = {"batch_size": 24, "accumulate": 1, "epochs": 3}
    single = fit("", train, teacher=teacher, student=new_student(), **plain_sgd())
    single.run()
    student = new_student()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    objective = tiny.make_objective(objective_config(), student, teacher)
    batches = fit(train={"batch_size": 1, "accumulate": 24}).batches
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
def test_dropout_does_not_depend_on_the_split(fit: Make, teacher: Any, family: str) -> None:
    """With the paper's dropout, keyed by row: the same weights for every micro-batch size, accumulation and padding."""

    def trained(batch_size: int, accumulate: int, keyed: bool = True) -> dict[str, torch.Tensor]:
        models = {"teacher": teacher, "student": make_model(family, 1, seed=5, dropout=0.2).train()}
        train = {"batch_size": batch_size, "accumulate": accumulate, "epochs": 2}
        made = fit(f"{batch_size}-{accumulate}-{keyed}", train, keyed_dropout=keyed, **models, **plain_sgd())
        made.run()
        return weights_of(made.student)

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
    ranks = join_ranks(BackendConfig(name="ddp", device="cpu"))

    def fit(name: str, dropout: float = 0.0, minutes: float | None = None, **more: Any) -> Fit:
        saves = {"save_every": 1, "async_checkpoints": True} if dropout else {}
        settings = TrainConfig(batch_size=2, accumulate=2, epochs=None if minutes else 1, minutes=minutes, **saves)
        teacher = make_model("bert", 4).requires_grad_(False)
        student = make_model("distilbert", 1, seed=5, dropout=dropout).train()
        return Fit(folder / name, tokenizer, rows, teacher, student, settings=settings, ranks=ranks, **more)

    plain, dropping = fit("steps", **plain_sgd()), fit("dropout", 0.2, keyed_dropout=True, **plain_sgd())
    before, times = ranks.traffic.num_collectives, save_slowly(plain)
    plain.run()
    collectives = ranks.traffic.num_collectives - before
    scores = score(plain, batch_size=4)
    dropping.run()
    looks = itertools.count(step=(1.0, 4.0)[ranks.rank])  # each look at the clock of a rank takes so many seconds
    tiny.loop.time = SimpleNamespace(monotonic=lambda: next(looks))  # type: ignore[attr-defined]
    changing = objective_config(soft={"start": 5.0, "end": 1.0})
    timed = fit("minutes", minutes=1.0, objective=changing, schedule=Linear(warmup=0.0))
    ended_by = timed.run()
    ranks.close()
    return {
        "weights": weights_of(plain.student),
        "dropout": weights_of(dropping.student),
        "losses": [line["loss/total"] for line in plain.logs],
        "collectives": collectives,
        "saved": saved_steps(dropping),
        "times": times,
        "scores": scores,
        "timed": weights_of(timed.student),
        "rates": [(line["lr"], line["weight/soft"]) for line in timed.logs],
        "ended_by": ended_by,
        "seconds": timed.state.seconds,
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


def rank_is_late(folder: Path, timeout: float) -> tuple[list[float], float]:
    """A training, before which rank 1 reads its first window, and then its first forward compiles, for too long."""
    from distill.distributed import join_ranks

    ranks = join_ranks(BackendConfig(name="ddp", device="cpu", threads=1, timeout=timeout))
    teacher, student, rows = make_model("bert", 1).requires_grad_(False), new_student(), make_rows(8)
    settings = TrainConfig(batch_size=2, epochs=1)
    made = Fit(folder, tiny.make_tokenizer(), rows, teacher, student, settings=settings, ranks=ranks)
    if ranks.rank == 1:
        waits = iter([1.5 * timeout])
        student.register_forward_pre_hook(lambda *_: time.sleep(next(waits, 0.0)))
        window = made.batches.window
        slow = lambda step: time.sleep(1.5 * timeout * (step == 0)) or window(step)  # noqa: E731
        object.__setattr__(made.batches, "window", slow)
    made.run()
    ranks.close()
    return [line["loss/total"] for line in made.logs], ranks.traffic.exchange_seconds


def test_a_rank_may_read_and_compile_for_longer_than_an_exchange_waits(tmp_path: Path) -> None:
    (losses, seconds), (others, _) = run_ranks(2, tmp_path / "out", rank_is_late, tmp_path, 2.0)
    assert losses == others and len(losses) > 1
    assert seconds < 2.0, "the wait before the first exchange is none of it"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(2, folder / "out", rank_trains, folder)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_two_processes_train_and_score_as_one(fit: Make, teacher: Any, two_ranks: list[Any], dropout: float) -> None:
    models = {"teacher": teacher, "student": make_model("distilbert", 1, seed=5, dropout=dropout).train()}
    whole = {"batch_size": 8, "accumulate": 1, "epochs": 1}
    single = fit("", whole, keyed_dropout=dropout > 0, **models, **plain_sgd())
    single.run()
    for rank in two_ranks:
        found = rank["dropout" if dropout else "weights"]
        assert_close(found, weights_of(single.student), rtol=1e-4, atol=2e-6)
        assert_close(found, two_ranks[0]["dropout" if dropout else "weights"], rtol=0, atol=0)
        assert rank["saved"] == [2, 3]
        if not dropout:
            scores = score(single, batch_size=32)
            assert rank["losses"] == pytest.approx([line["loss/total"] for line in single.logs], rel=1e-5)
            for measure in ("perplexity", "pseudo_perplexity"):
                assert rank["scores"][measure]["set"] == pytest.approx(scores[measure]["set"], rel=1e-4)


def test_one_collective_call_a_step(two_ranks: list[Any]) -> None:
    """Gradients, losses, the next counts and wishes to stop together; the first counts, and a barrier at the end.

    Two more come before the first counts and the first exchange, for which a rank may take its time. At the one
    checkpoint, which is at the end, rank 0 says whether it was written: the length of that, and it.
    """
    for rank in two_ranks:
        assert rank["collectives"] == len(rank["losses"]) + 2 + 2 + 2


def test_no_rank_goes_on_to_score_while_the_first_still_saves(two_ranks: list[Any]) -> None:
    """There a signal ends a rank at once, and then the others."""
    first, second = (rank["times"] for rank in two_ranks)
    assert "saved" not in second and second["point"] >= first["saved"]


def test_ranks_whose_clocks_differ_stay_together(two_ranks: list[Any]) -> None:
    """With `train.minutes` the rate and the end hang on the clock: on one clock, or the ranks part and hang."""
    first, second = two_ranks
    assert first["ended_by"] == second["ended_by"] == "minutes"
    assert 60 <= first["seconds"] < 80, "the clock is rank 0's alone"
    assert first["rates"] == second["rates"] and len(first["rates"]) > 1
    assert_close(first["timed"], second["timed"], rtol=0, atol=0)


# --- what it logs --------------------------------------------------------------------------------------------------


def test_log_lines(fit: Make, teacher: Any) -> None:
    """With `log_every` a line is the mean over its steps, weighted by positions; the last step always has one."""
    every, fourth = (
        fit(str(n), {"epochs": 2, "log_every": n}, teacher=teacher, student=new_student(), seed=3) for n in (1, 4)
    )
    every.run(), fourth.run()
    assert [line["step"] for line in fourth.logs] == [4, 6]
    assert {"step", "tokens", "seconds", "lr", "grad_norm", "tokens_per_second"} <= fourth.logs[0].keys()
    for line, steps in zip(fourth.logs, [(1, 2, 3, 4), (5, 6)], strict=True):
        assert line["loss/mlm"] == pytest.approx(every.mean_mlm(steps), rel=1e-6)
        total = 5 * line["loss/soft"] + 2 * line["loss/mlm"] + line["loss/cosine"]
        assert line["loss/total"] == pytest.approx(total, rel=1e-5)
    assert fourth.logs[-1]["tokens"] == every.logs[-1]["tokens"]
    assert_close(weights_of(fourth.student), weights_of(every.student), rtol=0, atol=0)


@pytest.fixture
def words_alone(fit: Make) -> Make:
    """Makes fits of masked words alone with these settings of their steps."""
    return lambda more=None, **train: fit(train=train, objective=only(mlm=1.0), **(more or {}))


def at_step(fit: Fit, step: int, number: int) -> None:
    """Send this process a signal in the forward of the step after so many."""
    fit.student.base_model.register_forward_pre_hook(
        lambda *_: signal.raise_signal(number) if fit.state.step == step else None
    )


def saved_steps(fit: Fit) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in fit.checkpoints.saved()]


def flat_weights(fit: Fit) -> torch.Tensor:
    return torch.cat([weight.flatten() for weight in weights_of(fit.student).values()])


# --- steps that are not finite -------------------------------------------------------------------------------------


def poisoned(made: Fit, steps: Any) -> list[torch.Tensor]:
    """Break the teacher of a training in these steps; gives all weights after each step that is logged."""
    words, seen = made.teacher.bert.embeddings.word_embeddings.weight, list[torch.Tensor]()  # type: ignore[union-attr]
    good = words.detach().clone()

    def on_log(fit: Fit, metrics: dict[str, float]) -> None:  # of step n, which comes before step n + 1
        seen.append(flat_weights(fit))
        words.copy_(good * math.nan if int(metrics["step"]) + 1 in steps else good)

    if 1 in steps:
        words.fill_(math.nan)
    made.on_log = on_log
    return seen


def with_teacher(fit: Make, **train: Any) -> Fit:
    """One that may be broken."""
    teacher, rows = make_model("bert", 2).requires_grad_(False), train.pop("rows", make_rows(20, shortest=5))
    return fit(train={"max_nonfinite": 3, **train}, teacher=teacher, student=new_student(), rows=rows)


def test_a_loss_that_is_not_finite_never_enters_the_weights(fit: Make) -> None:
    made = with_teacher(fit, epochs=3)
    seen = poisoned(made, (3, 4, 7))
    assert made.run() == "epochs"
    assert (made.state.step, made.state.skipped, made.state.skipped_in_a_row) == (9, 3, 0)
    same = [torch.equal(seen[step - 1], seen[step - 2]) for step in range(2, 10)]
    assert same == [step in (3, 4, 7) for step in range(2, 10)] and all(each.isfinite().all() for each in seen)
    assert all(value.isfinite().all() for state in made.made.state.values() for value in state.values())
    assert {int(state["step"]) for state in made.made.state.values()} == {6}, "nor do Adam's own counts take part"
    assert [line["skipped"] for line in made.logs] == [0, 0, 1, 2, 2, 2, 3, 3, 3]
    # Epoch means leave them out, and no line claims a loss of 0 for a step that has none.
    means = [made.mean_mlm((1, 2)), made.mean_mlm((5, 6)), made.mean_mlm((8, 9))]
    assert [losses["mlm"] for _, _, losses in made.epochs] == pytest.approx(means, rel=1e-6)
    for line in made.logs:
        skipped = line["step"] in (3, 4, 7)
        assert math.isfinite(line["loss/total"]) != skipped and math.isfinite(line["grad_norm"]) != skipped
        assert skipped or line["loss/mlm"] > 0.1


def test_a_gradient_that_is_not_finite_never_enters_the_weights(words_alone: Make) -> None:
    made, seen = words_alone(epochs=2), list[torch.Tensor]()
    made.student.vocab_projector.bias.register_hook(lambda grad: grad * math.inf if made.state.step == 2 else grad)
    made.on_log = lambda fit, metrics: seen.append(flat_weights(fit))
    made.run()
    assert made.state.skipped == 1 and torch.equal(seen[2], seen[1]) and not torch.equal(seen[3], seen[2])
    assert seen[-1].isfinite().all() and not math.isfinite(made.logs[2]["grad_norm"])


@pytest.mark.parametrize(("first", "save_every", "kept"), [(3, 1, [1]), (4, 2, [2]), (3, 100, []), (1, 1, [])])
def test_a_run_that_diverges_saves_nothing_more_and_goes_on_from_the_good_checkpoint(
    fit: Make, first: int, save_every: int, kept: list[int]
) -> None:
    rows = make_rows(80)  # ten steps: no epoch ends, which would save too
    made = with_teacher(fit, save_every=save_every, epochs=9, rows=rows)
    seen = poisoned(made, range(first, 50))
    with pytest.raises(Diverged, match=r"train\.max_nonfinite=3") as error:
        made.run()
    assert error.value.status == 3 and made.state.step == first + 2 and saved_steps(made) == kept
    assert "the teacher's own" in str(error.value) and "optimizer.lr" not in str(error.value)
    last = f"The last good checkpoint is {made.checkpoints.newest()}" if kept else "There is no good checkpoint"
    assert last in str(error.value)
    if kept:
        again = with_teacher(fit, steps=kept[-1] + 2, rows=rows).resume()
        assert torch.equal(flat_weights(again), seen[kept[-1] - 1])
        again.run()
        assert again.state.step == kept[-1] + 2 and again.state.skipped_in_a_row == 0


# --- the end -------------------------------------------------------------------------------------------------------


def test_the_first_limit_ends_the_run() -> None:
    limits = [(3, None, None), (3, 20, None), (None, 50, None), (None, None, 1.0)]
    ends = [total_steps(TrainConfig(epochs=epochs, steps=steps, minutes=mins), 7) for epochs, steps, mins in limits]
    assert ends == [21, 20, 50, ENDLESS]


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
def test_ends(words_alone: Make, settings: dict[str, Any], ended_by: str, steps: int, evaluated: list[int]) -> None:
    made = words_alone(**settings)
    before = weights_of(made.student)
    assert made.run() == ended_by
    assert made.state.step == len(made.logs) == steps and saved_steps(made)[-1] == steps
    if settings == {"epochs": 2}:  # every position counts once an epoch
        assert made.state.tokens == made.logs[-1]["tokens"] == 2 * int((made.rows != tiny.PAD).sum())
    places = [(step, step / made.batches.steps_per_epoch) for step in evaluated]
    assert [(step, epochs) for step, epochs, _ in made.epochs] == places
    assert all(not torch.equal(w, before[n]) for n, w in weights_of(made.student).items() if "position" not in n)
    # The schedule reaches its end: the last step has half a step's share of the way left.
    assert made.logs[-1]["lr"] == pytest.approx(1e-2 * Linear()(1 - 0.5 / steps))


class Clock:
    """Each look at it takes a second, so a step takes a known time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def test_ends_by_the_clock(words_alone: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.loop, "time", Clock())
    made, again = (words_alone({"schedule": Linear(warmup=0.0)}, epochs=None, minutes=0.25) for _ in range(2))
    assert made.run() == "minutes"
    rates = [line["lr"] for line in made.logs]
    assert made.logs[-1]["seconds"] == pytest.approx(15, abs=3) and made.state.step > 3
    assert rates == sorted(set(rates), reverse=True) and rates[0] > 0.7e-2 and rates[-1] < 0.2e-2
    assert made.epochs[-1][0] == made.state.step and made.checkpoints.newest() is not None
    # A second start of the finished run adds no step, but gives what a kill before the last evaluation has cost.
    assert again.resume().run() == "minutes" and again.state.step == made.state.step and not again.logs
    assert again.epochs == made.epochs[-1:]


# --- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)]
)
def test_a_signal_stops_after_the_step_with_a_checkpoint(words_alone: Make, number: int, status: int) -> None:
    made, handlers = words_alone(epochs=5), [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    at_step(made, 3, number)
    with pytest.raises(Interrupted, match="step 4") as error:
        made.run()
    assert error.value.status == status and made.state.step == 4 and saved_steps(made)[-1] == 4
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    again = words_alone(epochs=5).resume()
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
    words_alone: Make, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote.random, "uniform", lambda low, high: 30.0)
    made = words_alone(epochs=1, save_every=100)
    readable = made.batches.order.numbers(0, np.arange(2 * made.batches.sequences_per_step))
    made.batches = replace(made.batches, sequences=OutOfOrder(made.rows, readable), threads=threads)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    in_the_last_step = lambda *_: timer.start() if made.state.step == 1 and not timer.ident else None  # noqa: E731
    made.student.base_model.register_forward_pre_hook(in_the_last_step)
    begun = time.monotonic()
    # In force before the first thread reads ahead, as in every command.
    with pytest.raises(Interrupted, match="stopped by SIGTERM at step 2, its checkpoint is written"), handled():
        made.run()
    assert time.monotonic() - begun < 25, "it waited for the pause of 30 s"
    assert saved_steps(made)[-1] == 2


@pytest.mark.parametrize("answer", list(OnUsr1))
def test_usr1_writes_a_checkpoint_and_goes_on_or_stops(words_alone: Make, answer: OnUsr1) -> None:
    made = words_alone(epochs=None, steps=3, save_every=100, on_usr1=answer)
    at_step(made, 0, signal.SIGUSR1)
    if answer is OnUsr1.save:
        assert made.run() == "steps" and saved_steps(made) == [1, 3]
        return
    with pytest.raises(Interrupted) as error:
        made.run()
    assert error.value.status == 138 and saved_steps(made) == [1]


@pytest.mark.parametrize("when", ["last step", "last evaluation"])
def test_a_signal_at_the_end_is_not_lost(words_alone: Make, when: str) -> None:
    """The report that follows may take long; the same command goes on from the checkpoint with it."""

    class SignalOnAppend(list[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("went on")

    made = words_alone(epochs=1)
    if when == "last step":
        at_step(made, 2, signal.SIGTERM)
    else:
        made.epochs = SignalOnAppend()
    with pytest.raises(Interrupted):
        made.run()
    again = words_alone(epochs=1).resume()
    assert again.run() == "epochs" and not again.logs and [step for step, _, _ in again.epochs] == [3]
