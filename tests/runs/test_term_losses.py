"""The losses as measures, of a run that trains no head: against single rows, whatever the batches and ranks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import (
    loss_of,
    make_batches,
    make_masks,
    make_model,
    make_objective,
    make_rows,
    make_tokenizer,
    new_student,
    only,
)

from distill.config.settings import BackendConfig, Config, EvaluateConfig, StudentConfig
from distill.distributed.single import Single
from distill.evaluation.measures import Scoring
from distill.evaluation.readers import Readers
from distill.evaluation.sets import EvaluationSet
from distill.models.kind import MASKED, ORDERED
from distill.models.language_model import LanguageModel, OutputSpec
from distill.objective.build import make_terms
from distill.runs.pair import has_trained_head
from distill.runs.term_losses import LossPass, loss_evaluator
from distill.tasks import find_task

TOKENIZER, ROWS = make_tokenizer(), make_rows(7, shortest=4)
DATA = EvaluationSet("heldout", "made up", ROWS, 7)
TEACHER = make_model("bert", 4).requires_grad_(False)
TERMS: dict[str, Any] = {
    "pooled": {"weight": 3.0},
    "angle": {"kind": "pooled", "weight": 1.0, "pooling": "cls", "distance": "cosine"},
    "hidden_mse": {"weight": 0.5},
}


class Rank(Single):
    """One of several ranks, whose sums are added up outside."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(BackendConfig(device="cpu"))
        self.rank, self.size, self.sums = rank, size, list[np.ndarray]()

    def barrier(self) -> None:
        pass

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.sums.append(values.numpy())
        return values


def scoring_of(batch_size: int, ranks: Any) -> Scoring:
    masks = make_masks(TOKENIZER, ROWS, mlm_probability=0.3)
    return Scoring(masks, TOKENIZER, EvaluateConfig(batch_size=batch_size), ranks)


def loss_pass(student: Any, batch_size: int, ranks: Any) -> LossPass:
    objective = make_objective(only(**TERMS), student, TEACHER)
    member = SimpleNamespace(model=TEACHER, context=())
    pair: Any = SimpleNamespace(teachers=[member], tokenizer=TOKENIZER, tokenizers=None)
    return LossPass(scoring_of(batch_size, ranks), objective, pair, Readers(Config().precision, ranks))


def by_row(student: Any, scoring: Scoring) -> dict[str, Any]:
    """The losses by the objective itself, one row at a time."""
    objective, rows = make_objective(only(**TERMS), student, TEACHER), list(scoring.batches(DATA, lambda _: None))
    _, sums = loss_of(objective, student, TEACHER, rows)
    counts = objective.by_name(objective.count(rows).tolist())
    return {f"{name}_loss": pytest.approx(sums[name] / counts[name], rel=1e-4) for name in TERMS}


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_they_are_those_of_training_row_by_row(batch_size: int) -> None:
    student, alone = make_model("distilbert", 2, seed=5), Rank(0, 1)
    scores = loss_pass(student, batch_size, alone).score(LanguageModel(student), DATA, lambda _: None).values
    assert scores == by_row(student, scoring_of(1, alone)) and all(value > 0 for value in scores.values())


def test_ranks_share_the_work_and_make_as_many_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    student, idle = new_student().eval(), []
    monkeypatch.setattr("distill.runs.term_losses.idle_forward", idle.append)
    ranks = [Rank(rank, 3) for rank in range(3)]  # of 7 rows 3, 2 and 2, one at a time
    for rank in ranks:
        with torch.no_grad():
            loss_pass(student, 1, rank).score(LanguageModel(student), DATA, lambda _: None)
    assert len(idle) == 2
    whole = loss_pass(student, 7, Rank(0, 1)).score(LanguageModel(student), DATA, lambda _: None).values
    totals, counts = np.sum([rank.sums[0] for rank in ranks], axis=0)
    assert list(whole.values()) == pytest.approx((totals / counts).tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("terms", "init", "has_head", "kind", "trained"),
    [
        ("mlm pooled", "random", True, MASKED, True),
        ("pooled", "layers", True, MASKED, False),
        ("relations", "random", True, MASKED, False),
        ("relations", "layers", True, MASKED, True),
        ("relations", "layers", False, MASKED, False),
        ("pooled", "random", True, ORDERED, True),
    ],
)
def test_which_runs_train_no_head(terms: str, init: Any, has_head: bool, kind: Any, trained: bool) -> None:
    teachers: list[Any] = [SimpleNamespace(has_head=has_head)]
    weights: dict[str, Any] = {name: 1.0 if name == "mlm" else {"weight": 1.0} for name in terms.split()}
    config = Config(student=StudentConfig(init=init))
    assert has_trained_head(config, kind, make_terms(only(**weights)), teachers) is trained


def test_a_loss_of_the_users_on_all_logits_trains_the_head() -> None:
    term: Any = SimpleNamespace(student_reads=OutputSpec(head=True), needs_teacher=True, across_tokenizers=False)
    config, teachers = Config(student=StudentConfig(init="random")), [SimpleNamespace(has_head=True)]
    assert has_trained_head(config, MASKED, {"mine": term}, teachers)  # type: ignore[arg-type]
    term.student_reads = OutputSpec(layers=(1,))
    assert not has_trained_head(config, MASKED, {"mine": term}, teachers)  # type: ignore[arg-type]


def test_a_run_scores_its_sets_with_the_masks_of_its_training() -> None:
    """Here half of the tokens, where any other evaluation hides 15 %, whatever a run is trained on."""
    student, masks = make_model("distilbert", 2, seed=5), make_masks(TOKENIZER, ROWS, mlm_probability=0.5)
    objective, alone = make_objective(only(**TERMS), student, TEACHER), Rank(0, 1)
    run: Any = SimpleNamespace(
        config=Config(evaluate=EvaluateConfig(batch_size=3)),
        task=find_task("mlm"),
        pair=SimpleNamespace(
            teachers=[SimpleNamespace(model=TEACHER, context=())], tokenizer=TOKENIZER, tokenizers=None
        ),
        data=SimpleNamespace(sets=[DATA], batches=make_batches(ROWS, masks, 4)),
        objective=objective,
        ranks=alone,
    )
    scores = loss_evaluator(run).score(student, "student", [DATA])
    expected = by_row(student, Scoring(masks, TOKENIZER, EvaluateConfig(batch_size=1), alone))
    assert {name: by_set["heldout"] for name, by_set in scores.items()} == expected
