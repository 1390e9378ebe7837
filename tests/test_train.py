"""The loop: the same weights for every split, non-finite steps kept out, ends, signals, and what it logs."""

import copy
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from distributed import run_ranks
from naive import definition
from tiny import VOCAB, Fit, assert_close, make_model, make_rows, only, plain_sgd, weights_of

from distill import config as conf
from distill.config import Backend, Objective, Precision, Schedule, Soft, Term, Train
from distill.errors import Diverged, Interrupted
from distill.evaluation.evaluate import EvaluationSet, Evaluator
from distill.objective.objective import Objective as Terms
from distill.optim import factor
from distill.train import ENDLESS, plan

SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]
MASKED = Objective(soft=Soft(5.0, conf.Rows.masked), masking=conf.Masking(share=0.3))


def start() -> Any:
    return make_model("distilbert", 1, seed=5).train()


@pytest.fixture(scope="module", params=[Objective(), MASKED, only(mlm=1.0)], ids=["default", "masked", "mlm"])
def by_definition(request: Any, tokenizer: Any, teacher: Any, rows: np.ndarray) -> Iterator[Any]:
    """Three steps of SGD in float64 on whole windows of 8, 8 and 4 rows, the loss as the field defines it."""
    fit = Fit(Path(), tokenizer, rows, objective=request.param, settings=Train(8, 1, epochs=1))
    student, losses = start().double(), []
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
    settings = Train(batch_size, accumulate, epochs=1)
    fit = Fit(tmp_path, tokenizer, rows, teacher, start(), objective, settings, **plain_sgd())
    targets = {batch.num_targets for step in range(3) for batch in fit.batches.window(step)}
    assert len(targets) > 1 and fit.batches.steps_per_epoch == 3
    assert fit.run() == "epochs"
    assert [line["loss/total"] for line in fit.logs] == pytest.approx(losses, rel=2e-5)
    ours = weights_of(fit.student)
    moved = max(float((ours[n] - w).abs().max()) for n, w in weights_of(start()).items())
    assert moved > 0.05, "the comparison needs weights that move"
    assert_close(ours, weights, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_same_weights_for_every_number_of_ranks(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray, size: int
) -> None:
    """Each rank adds the gradient of its own micro-batches, divided by the counts of all; 24 // 8 rows at a time."""
    single = Fit(tmp_path, tokenizer, rows, teacher, start(), settings=Train(24, 1, epochs=3), **plain_sgd())
    single.run()
    student = start()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    objective = Terms(Objective(), Precision(), VOCAB)
    ranks = [copy.copy(Fit(tmp_path, tokenizer, rows, settings=Train(1, 24 // size)).batches) for _ in range(size)]
    for rank, batches in enumerate(ranks):
        object.__setattr__(batches, "rank", rank)
        object.__setattr__(batches, "size", size)
    for step in range(3):
        optimizer.zero_grad()
        windows = [batches.window(step) for batches in ranks]
        counts = torch.stack([objective.counts(window) for window in windows]).sum(0)
        for window in windows:
            for batch in window:
                objective(student, teacher, batch, counts)[0].backward()
        optimizer.step()
    assert_close(weights_of(student), weights_of(single.student), rtol=1e-4, atol=2e-6)


def rank_trains(folder: Path) -> dict[str, Any]:
    """One rank of two: three steps and the scores after them; then by the clock, which is faster on rank 1."""
    import time

    import distill.train
    from distill.backends import build

    torch.set_num_threads(1)
    tokenizer, rows = tiny.make_tokenizer(), make_rows(20, shortest=5)
    teacher = make_model("bert", 4).requires_grad_(False)
    backend = build(Backend(name="ddp", device="cpu"))
    fit = Fit(
        folder / "steps",
        tokenizer,
        rows,
        teacher,
        start(),
        settings=Train(2, 2, epochs=1),
        backend=backend,
        **plain_sgd(),
    )
    before = backend.num_collectives
    fit.run()
    collectives = backend.num_collectives - before
    scores = score(fit, batch_size=4)
    pace = (40.0, 160.0)[backend.rank]
    distill.train.time = SimpleNamespace(monotonic=lambda: pace * time.monotonic())  # type: ignore[attr-defined]
    settings = Train(2, 2, epochs=None, minutes=1.0)
    timed = Fit(folder / "minutes", tokenizer, rows, teacher, start(), settings=settings, backend=backend)
    timed.schedule = Schedule(warmup=0.0)
    ended_by = timed.run()
    backend.close()
    return {
        "weights": weights_of(fit.student),
        "losses": [line["loss/total"] for line in fit.logs],
        "collectives": collectives,
        "scores": scores,
        "timed": weights_of(timed.student),
        "rates": [line["lr"] for line in timed.logs],
        "ended_by": ended_by,
    }


def score(fit: Fit, batch_size: int) -> dict[str, dict[str, float]]:
    settings = conf.Evaluate(batch_size=batch_size, pseudo_perplexity=conf.PseudoPerplexity(0.5))
    masker = tiny.make_masker(fit.tokenizer, fit.rows)
    evaluator = Evaluator(settings, masker, tiny.PAD, VOCAB, "fp32", fit.backend)
    return evaluator.score(fit.student, "student", [EvaluationSet("set", "a set", fit.rows, 1)])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(2, folder / "out", rank_trains, folder)


def test_two_processes_train_and_score_as_one(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray, two_ranks: list[Any]
) -> None:
    single = Fit(tmp_path, tokenizer, rows, teacher, start(), settings=Train(8, 1, epochs=1), **plain_sgd())
    single.run()
    scores = score(single, batch_size=32)
    for rank in two_ranks:
        assert rank["losses"] == pytest.approx([line["loss/total"] for line in single.logs], rel=1e-5)
        assert_close(rank["weights"], weights_of(single.student), rtol=1e-4, atol=2e-6)
        for measure in ("perplexity", "pseudo_perplexity"):
            assert rank["scores"][measure]["set"] == pytest.approx(scores[measure]["set"], rel=1e-4)
    assert_close(two_ranks[0]["weights"], two_ranks[1]["weights"], rtol=0, atol=0)


def test_one_collective_call_a_step(two_ranks: list[Any]) -> None:
    """Gradients, losses, the next counts together; before the first step its counts, after the last a wish to stop."""
    for rank in two_ranks:
        assert rank["collectives"] == len(rank["losses"]) + 2


def test_ranks_whose_clocks_differ_stay_together(two_ranks: list[Any]) -> None:
    """With `train.minutes` the rate and the end hang on the clock: on one clock, or the ranks part and hang."""
    first, second = two_ranks
    assert first["ended_by"] == second["ended_by"] == "minutes"
    assert first["rates"] == second["rates"] and len(first["rates"]) > 1
    assert_close(first["timed"], second["timed"], rtol=0, atol=0)


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
    train = Train(**{"batch_size": 4, "accumulate": 2, "epochs": 3, "max_nonfinite": 3, **settings})
    fit = Fit(tmp_path, tokenizer, rows, teacher, start(), settings=train)
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
        [mean_of(fit, (1, 2)), mean_of(fit, (5, 6)), mean_of(fit, (8, 9))], rel=1e-6
    )
    assert min(good) > 0.1
    for line in fit.logs:
        if line["step"] in (3, 4, 7):
            assert not math.isfinite(line["loss/total"]) and not math.isfinite(line["grad_norm"])


def mean_of(fit: Fit, steps: tuple[int, ...]) -> float:
    """The mean of the masked-word loss over the targets of several steps."""
    counts = [sum(batch.num_targets for batch in fit.batches.window(step - 1)) for step in steps]
    values = [line["loss/mlm"] for line in fit.logs if line["step"] in steps]
    return float(np.average(values, weights=counts))


def test_a_gradient_that_is_not_finite_never_enters_the_weights(
    tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray
) -> None:
    fit = Fit(tmp_path, tokenizer, rows, teacher, start(), settings=Train(4, 2, epochs=2))
    bias = fit.student.vocab_projector.bias
    bias.register_hook(lambda grad: grad * math.inf if fit.state.step == 2 else grad)
    fit.on_log = lambda fit, metrics: None
    seen = history_of_weights(fit)
    fit.run()
    assert fit.state.skipped == 1 and torch.equal(seen[2], seen[1]) and not torch.equal(seen[3], seen[2])
    assert seen[-1].isfinite().all() and not math.isfinite(fit.logs[2]["grad_norm"])


@pytest.mark.parametrize(("first", "save_every"), [(3, 1), (3, 100), (1, 100)])
def test_diverged_leaves_a_checkpoint_to_go_on_from(
    tmp_path: Path, tokenizer: Any, first: int, save_every: int
) -> None:
    rows = make_rows(80)  # ten steps: no epoch ends, which would save too
    fit = poisoned(tmp_path, tokenizer, rows, tuple(range(first, 50)), save_every=save_every, epochs=9)
    before = weights_of(fit.student)
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
    assert "\n" not in text and "train.max_nonfinite=3" in text and "optimizer.lr" in text
    newest = fit.checkpoints.newest()
    assert newest is not None and str(newest) in text
    word.copy_(good)
    again = Fit(tmp_path, tokenizer, rows, fit.teacher, start(), settings=Train(4, 2, steps=newest_step(newest) + 2))
    again.resume()
    loaded = torch.cat([w.flatten() for w in weights_of(again.student).values()])
    expected = seen[first - 2] if first > 1 else torch.cat([w.flatten() for w in before.values()])
    assert torch.equal(loaded, expected)
    again.run()
    assert again.state.step == newest_step(newest) + 2 and again.state.skipped_in_a_row == 0


def newest_step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


# --- the end -------------------------------------------------------------------------------------------------------


def test_plan() -> None:
    assert plan(Train(epochs=3, steps=None), 7) == 21
    assert plan(Train(epochs=3, steps=20), 7) == 20
    assert plan(Train(epochs=None, steps=50), 7) == 50
    assert plan(Train(epochs=None, steps=None, minutes=1.0), 7) == ENDLESS


@pytest.mark.parametrize(
    ("settings", "ended_by", "steps", "evaluated"),
    [
        (Train(4, 2, epochs=2), "epochs", 6, [3, 6]),
        (Train(4, 2, epochs=2, steps=4), "steps", 4, [3, 4]),
        (Train(4, 2, epochs=None, steps=7), "steps", 7, [3, 6, 7]),
        (Train(4, 2, epochs=2, steps=6), "epochs", 6, [3, 6]),
        (Train(16, 50, epochs=2), "epochs", 2, [1, 2]),  # fewer rows than one step takes
    ],
)
def test_ends(
    tmp_path: Path, tokenizer: Any, rows: np.ndarray, settings: Train, ended_by: str, steps: int, evaluated: list[int]
) -> None:
    fit = Fit(tmp_path, tokenizer, rows, objective=only(mlm=1.0), settings=settings)
    before = weights_of(fit.student)
    assert fit.run() == ended_by
    assert fit.state.step == len(fit.logs) == steps and fit.state.syncs == steps
    assert [step for step, _, _ in fit.epochs] == evaluated
    assert [epochs for _, epochs, _ in fit.epochs] == [step / fit.batches.steps_per_epoch for step in evaluated]
    assert newest_step(fit.checkpoints.newest() or Path("none")) == steps
    assert all(not torch.equal(w, before[n]) for n, w in weights_of(fit.student).items() if "position" not in n)
    # The schedule reaches its end: the last step has half a step's share of the way left.
    assert fit.logs[-1]["lr"] == pytest.approx(1e-2 * factor(Schedule(), 1 - 0.5 / steps))


def test_every_position_is_counted_once_an_epoch(tmp_path: Path, tokenizer: Any, rows: np.ndarray) -> None:
    fit = Fit(tmp_path, tokenizer, rows, objective=only(mlm=1.0), settings=Train(3, 2, epochs=2))
    fit.run()
    assert fit.state.tokens == 2 * int((rows != tiny.PAD).sum())
    assert [line["tokens"] for line in fit.logs][-1] == fit.state.tokens
    losses = fit.epochs[0][2]
    assert losses.keys() == {"total", "mlm"} and losses["total"] == pytest.approx(losses["mlm"])


class Clock:
    """Each look at it takes a second, so a step takes a known time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def test_ends_by_the_clock(tmp_path: Path, tokenizer: Any, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.train.time", Clock())
    settings, schedule = Train(4, 2, epochs=None, minutes=0.25), Schedule("linear", warmup=0.0)
    fit = Fit(tmp_path, tokenizer, rows, objective=only(mlm=1.0), settings=settings, schedule=schedule)
    assert fit.run() == "minutes"
    seconds = [line["seconds"] for line in fit.logs]
    assert seconds[-1] == pytest.approx(15, abs=3) and fit.state.step > 3
    rates = [line["lr"] for line in fit.logs]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == len(rates)
    assert rates[0] > 0.7e-2 and rates[-1] < 0.2e-2
    assert fit.epochs[-1][0] == fit.state.step and fit.checkpoints.newest() is not None
    # A second start of the finished run adds no step, but gives what a kill before the last evaluation has cost.
    again = Fit(tmp_path, tokenizer, rows, objective=only(mlm=1.0), settings=settings, schedule=schedule).resume()
    assert again.run() == "minutes" and again.state.step == fit.state.step and not again.logs
    assert again.epochs == fit.epochs[-1:]


# --- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_after_the_step_with_a_checkpoint(
    tmp_path: Path, tokenizer: Any, rows: np.ndarray, number: signal.Signals, status: int
) -> None:
    fit = Fit(tmp_path, tokenizer, rows, objective=only(mlm=1.0), settings=Train(4, 2, epochs=5))
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    fit.student.base_model.register_forward_pre_hook(
        lambda *_: signal.raise_signal(number) if fit.state.step == 3 else None
    )
    with pytest.raises(Interrupted) as error:
        fit.run()
    assert error.value.status == status and fit.state.step == 4 and "step 4" in str(error.value)
    assert newest_step(fit.checkpoints.newest() or Path("none")) == 4
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    again = Fit(tmp_path, tokenizer, rows, objective=only(mlm=1.0), settings=Train(4, 2, epochs=5)).resume()
    assert again.run() == "epochs" and again.state.step == 15 and again.logs[0]["step"] == 5


@pytest.mark.parametrize("when", ["last step", "last evaluation"])
def test_a_signal_at_the_end_is_not_lost(tmp_path: Path, tokenizer: Any, rows: np.ndarray, when: str) -> None:
    """The report that follows may take long; the same command goes on from the checkpoint with it."""
    fit = Fit(tmp_path, tokenizer, rows, objective=only(mlm=1.0), settings=Train(4, 2, epochs=1))
    if when == "last step":
        fit.student.base_model.register_forward_pre_hook(
            lambda *_: signal.raise_signal(signal.SIGTERM) if fit.state.step == 2 else None
        )
    else:
        fit.epochs = SignalOnAppend()
    with pytest.raises(Interrupted):
        fit.run()
    assert newest_step(fit.checkpoints.newest() or Path("none")) == 3
    again = Fit(tmp_path, tokenizer, rows, objective=only(mlm=1.0), settings=Train(4, 2, epochs=1)).resume()
    assert again.run() == "epochs" and not again.logs and [step for step, _, _ in again.epochs] == [3]


class SignalOnAppend(list[Any]):
    def append(self, item: Any) -> None:
        super().append(item)
        signal.raise_signal(signal.SIGTERM)


# --- what it logs --------------------------------------------------------------------------------------------------


def test_log_lines(tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray) -> None:
    """With `log_every` a line is the mean over its steps, weighted by positions; the last step always has one."""
    every = Fit(tmp_path / "1", tokenizer, rows, teacher, start(), settings=Train(4, 2, epochs=2), seed=3)
    third = Fit(tmp_path / "4", tokenizer, rows, teacher, start(), settings=Train(4, 2, epochs=2, log_every=4), seed=3)
    every.run(), third.run()
    assert [line["step"] for line in third.logs] == [4, 6]
    needed = {"step", "tokens", "seconds", "loss/total", "loss/soft", "loss/mlm", "loss/cosine", "lr", "grad_norm"}
    assert needed | {"tokens_per_second"} <= third.logs[0].keys()
    for line, steps in zip(third.logs, [(1, 2, 3, 4), (5, 6)], strict=True):
        assert line["loss/mlm"] == pytest.approx(mean_of(every, steps), rel=1e-6)
        total = 5 * line["loss/soft"] + 2 * line["loss/mlm"] + line["loss/cosine"]
        assert line["loss/total"] == pytest.approx(total, rel=1e-5)
    assert third.logs[-1]["tokens"] == every.logs[-1]["tokens"]
    assert_close(weights_of(third.student), weights_of(every.student), rtol=0, atol=0)


def test_a_term_without_weight_is_not_logged(tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray) -> None:
    objective = Objective(soft=Soft(0.0), mlm=Term(1.0), cosine=Term(1.0))
    fit = Fit(tmp_path, tokenizer, rows, teacher, start(), objective, Train(4, 2, epochs=None, steps=1))
    fit.run()
    assert {name for name in fit.logs[0] if name.startswith("loss/")} == {"loss/total", "loss/mlm", "loss/cosine"}


def test_the_loss_goes_down(tmp_path: Path, tokenizer: Any, teacher: Any, rows: np.ndarray) -> None:
    fit = Fit(tmp_path, tokenizer, rows, teacher, start(), settings=Train(4, 2, epochs=10))
    fit.run()
    assert fit.epochs[-1][2]["total"] < 0.75 * fit.epochs[0][2]["total"]
