"""Where the student is scored along the way: by steps, by epochs, and exactly once across an interruption."""

from pathlib import Path
from typing import Any

import pytest
from job import Shelf, assert_same, metrics, results
from tiny import new_student, only

from distill.config.settings import EvaluateConfig
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


def test_losses_are_means_since_the_evaluation_before(fit: Any) -> None:
    """Seven steps, three an epoch; after a kill behind the checkpoint of step 4 its evaluation comes again."""
    train = {"epochs": None, "steps": 7, "save_every": 1}
    whole, again = (
        fit(train=train, student=new_student(), objective=only(mlm=1.0), evaluations=EvaluateConfig(every_steps=2))
        for _ in range(2)
    )
    whole.run()
    assert [(step, epochs) for step, epochs, _ in whole.epochs] == [(step, step / 3) for step in (2, 4, 6, 7)]
    expected = [whole.mean_mlm(steps) for steps in ((1, 2), (3, 4), (5, 6), (7,))]
    assert [losses["mlm"] for _, _, losses in whole.epochs] == pytest.approx(expected, rel=1e-6)
    again.resume(whole.checkpoints.path_of(6)).run()
    assert again.epochs == whole.epochs[2:] and [line["step"] for line in again.logs] == [7]


def test_a_job_scored_by_steps(shelf: Shelf, done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps in two epochs: scored after 3, 6 and 8; killed while it is scored the second time."""
    folder, more = shelf.root / "by-steps", ("evaluate.every_steps=3", "train.save_every=100")
    score, calls = Evaluator.score_by_sequence, []

    def killing(self: Evaluator, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise Kill
        return score(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr(Evaluator, "score_by_sequence", killing)
        shelf.run(folder, *more)
    assert [line["step"] for line in read_lines(folder / "history.jsonl")] == [3]
    assert shelf.run(folder, *more) == 0
    lines = results(folder)["history"]
    assert [line["step"] for line in lines] == [3, 6, 8] and len(metrics(folder)) == 8
    assert results(folder)["student"]["perplexity"] == lines[-1]["perplexity"]
    assert_same(folder, done)  # when it is scored never changes the student
    assert "Learning curve by step" in (folder / "report.md").read_text()


def test_a_few_sequences_are_scored_during_training_and_all_at_the_end(shelf: Shelf, done: Path) -> None:
    few, whole = shelf.root / "few", results(done)
    assert shelf.run(few, "evaluate.every_steps=4", "evaluate.on_the_way.sequences=2") == 0
    assert_same(few, done)
    found = results(few)
    assert found["training"]["scored_sequences"] == 2 and "scored_sequences" not in whole["training"]
    assert [line["step"] for line in found["history"]] == [4, 8]
    score = whole["student"]["perplexity"]["heldout"]
    assert found["student"]["perplexity"]["heldout"] == pytest.approx(score, rel=1e-6)
    assert found["history"][-1]["perplexity"]["heldout"] != pytest.approx(score, rel=1e-3)
    assert found["agreement"] == whole["agreement"] and "first 2 sequences" in (few / "report.md").read_text()
