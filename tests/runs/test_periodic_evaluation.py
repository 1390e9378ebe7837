"""Where the student is scored along the way: by steps, by epochs, and exactly once across an interruption."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import Shelf, assert_same, metrics, results
from tiny import Fit, new_student, only, weights_of

from distill.config.settings import EvaluateConfig, TrainConfig
from distill.evaluation.evaluator import Evaluator
from distill.runs.periodic_evaluation import is_due
from distill.runs.run import scores_on_the_way
from distill.runtime.jsonl import read_lines


class Kill(BaseException):
    """Stands for a process that ends between two instructions."""


@pytest.mark.parametrize(
    ("every_steps", "every_epoch", "expected", "scored"),
    [
        (None, None, [3, 6, 9], True),
        (None, True, [3, 6, 9], True),
        (None, False, [3, 6, 9], False),
        (2, None, [2, 4, 6, 8, 10], True),
        (2, False, [2, 4, 6, 8, 10], True),
        (2, True, [2, 3, 4, 6, 8, 9, 10], True),
        (50, None, [], True),
    ],
)
def test_steps_of_settings(
    every_steps: int | None, every_epoch: bool | None, expected: list[int], scored: bool
) -> None:
    settings = EvaluateConfig(every_steps=every_steps, every_epoch=every_epoch)
    assert [step for step in range(1, 11) if is_due(settings, step, 3)] == expected
    assert scores_on_the_way(settings) == scored


def make_fit(folder: Path, tokenizer: Any, rows: np.ndarray, every_steps: int = 2) -> Fit:
    """Seven steps, three an epoch."""
    settings = TrainConfig(batch_size=4, accumulate=2, epochs=None, steps=7, save_every=100)
    evaluations = EvaluateConfig(every_steps=every_steps)
    return Fit(folder, tokenizer, rows, None, new_student(), only(mlm=1.0), settings, evaluations=evaluations)


def test_losses_are_means_since_the_point_before(tmp_path: Path, tokenizer: Any, rows: np.ndarray) -> None:
    fit = make_fit(tmp_path, tokenizer, rows)
    fit.run()
    assert [step for step, _, _ in fit.epochs] == [2, 4, 6, 7]
    assert [epochs for _, epochs, _ in fit.epochs] == [step / 3 for step in (2, 4, 6, 7)]
    expected = [fit.mean_mlm(steps) for steps in ((1, 2), (3, 4), (5, 6), (7,))]
    assert [losses["mlm"] for _, _, losses in fit.epochs] == pytest.approx(expected, rel=1e-6)


def test_a_kill_in_an_evaluation_repeats_it_and_nothing_else(tmp_path: Path, tokenizer: Any, rows: np.ndarray) -> None:
    whole = make_fit(tmp_path / "whole", tokenizer, rows)
    whole.run()
    first, second = (make_fit(tmp_path / "parts", tokenizer, rows) for _ in range(2))

    class Killing(list[Any]):
        def append(self, item: Any) -> None:
            if item[0] == 4:
                raise Kill
            super().append(item)

    first.epochs = Killing()
    with pytest.raises(Kill):
        first.run()
    assert second.resume().state.step == 4
    second.run()
    assert [*first.epochs, *second.epochs] == whole.epochs
    assert [line["step"] for line in second.logs] == [5, 6, 7]
    for name, weight in weights_of(second.student).items():
        assert (weight == weights_of(whole.student)[name]).all(), name


def test_a_job_scored_by_steps(shelf: Shelf, done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps in two epochs: scored after 3, 6 and 8; killed while it is scored the second time."""
    folder, more = shelf.root / "by-steps", ("evaluate.every_steps=3", "train.save_every=100")
    score, calls = Evaluator.score, []

    def killing(self: Evaluator, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise Kill
        return score(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr(Evaluator, "score", killing)
        shelf.run(folder, *more)
    assert [line["step"] for line in read_lines(folder / "history.jsonl")] == [3]
    assert shelf.run(folder, *more) == 0
    lines = results(folder)["history"]
    assert [line["step"] for line in lines] == [3, 6, 8] and len(metrics(folder)) == 8
    assert all(line["perplexity"]["heldout"] > 1 for line in lines)
    assert results(folder)["student"]["perplexity"] == lines[-1]["perplexity"]
    assert_same(folder, done)  # when it is scored never changes the student
    for report in ("report.md", "report.html"):
        assert "Learning curve by step" in (folder / report).read_text()
    table = re.search(r"\| Step \| Epochs .*?\n\n", (folder / "report.md").read_text(), re.DOTALL)
    assert table is not None
    assert [line.split("|")[1].strip() for line in table[0].strip().splitlines()[2:]] == ["3", "6", "8"]


def test_a_few_sequences_are_scored_during_training_and_all_at_the_end(shelf: Shelf, done: Path) -> None:
    """With `evaluate.on_the_way.sequences` all lines of the history are of the same few, and comparable."""
    few, less = shelf.root / "few", shelf.root / "less"
    assert shelf.run(few, "evaluate.every_steps=4", "evaluate.on_the_way.sequences=2") == 0
    assert shelf.run(less, "evaluate.every_steps=4", "evaluate.max_sequences=2") == 0
    assert_same(few, done)
    lines, of_less = results(few)["history"], results(less)["history"]
    assert results(few)["training"]["scored_sequences"] == 2 and "scored_sequences" not in results(done)["training"]
    rows = [(folder / "report.md").read_text().count("\n| Teacher |") for folder in (few, done)]
    assert rows[0] == 0 < rows[1]  # its score is of all sequences
    assert [line["step"] for line in lines] == [4, 8]
    whole = results(done)["student"]["perplexity"]["heldout"]
    assert results(few)["student"]["perplexity"]["heldout"] == pytest.approx(whole, rel=1e-6)
    assert lines[-1]["perplexity"]["heldout"] != pytest.approx(whole, rel=1e-3)
    assert results(few)["agreement"] == results(done)["agreement"]
    assert len({line["perplexity"]["heldout"] for line in (*lines, *of_less)}) > 1
    assert "first 2 sequences" in (few / "report.md").read_text()
