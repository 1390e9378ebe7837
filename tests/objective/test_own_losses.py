"""Losses on logits of the user's own: tried once they are bound to the pair, on its vocabulary."""

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from job import Shelf
from tiny import VOCAB, named_terms
from torch import Tensor

from distill.objective.build import check_losses, make_terms
from distill.objective.terms import VocabularyTerm
from distill.runtime.errors import SettingError

CPU = torch.device("cpu")


class Weighted(VocabularyTerm):
    """A weight for each token, of a vocabulary whose size it knows when it is made."""

    def __init__(self, size: int) -> None:
        self.weights = torch.linspace(1.0, 2.0, size)

    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return ((student - teacher).square() * self.weights).mean(-1)


class Built(Weighted):
    """The same as `build` makes it for the student."""

    def __init__(self) -> None:
        pass

    def build(self, student: Any, teacher: Any | None) -> None:
        super().__init__(student.config.vocab_size)


class Mean(Weighted):
    """One value in place of one per position."""

    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return (student - teacher).square().mean()


class Detached(Weighted):
    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return super().losses(student.detach(), teacher, targets)


class Misspelt(Weighted):
    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return student.sum(-1) - self.wheights  # type: ignore[attr-defined, no-any-return]


def settings_of(term: type, **settings: Any) -> Any:
    return named_terms(mine={"_target_": f"{__name__}.{term.__name__}", **settings})


@pytest.mark.parametrize(("term", "settings"), [(Weighted, {"size": VOCAB}), (Built, {})])
def test_a_weight_for_each_token_is_no_fault(term: type, settings: dict[str, Any]) -> None:
    student, teacher = (tiny.make_model("bert", 1, seed=seed) for seed in (0, 1))
    config = settings_of(term, **settings)
    objective = tiny.make_objective(config, student, teacher)
    assert objective.terms["mine"].weights.shape == (objective.vocab,)
    check_losses(objective, config, CPU)


class Centred(Weighted):
    """Keeps a mean of what it has seen, in a module and beside it."""

    def build(self, student: Any, teacher: Any) -> None:
        super().build(student, teacher)
        self.module, self.seen = torch.nn.BatchNorm1d(1), 0

    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        self.seen += 1
        assert self.module is not None
        return self.module(super().losses(student, teacher, targets)[:, None])[:, 0]  # type: ignore[no-any-return]


def test_a_trial_leaves_a_loss_as_it_was() -> None:
    student, config = tiny.make_model("bert", 1), settings_of(Centred, size=VOCAB)
    objective = tiny.make_objective(config, student, student)
    check_losses(objective, config, CPU)
    term: Any = objective.terms["mine"]
    assert term.seen == 0 and int(term.module.num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("term", "words"),
    [
        (Mean, r"losses\(\) gives \[\] for 3 positions; give one value per position"),
        (Misspelt, r"losses\(\) fails on logits of 3 positions: AttributeError: .*test_own_losses\.py, line"),
    ],
)
def test_faults_on_any_vocabulary_are_refused_at_once(term: type, words: str) -> None:
    with pytest.raises(SettingError, match=rf"^objective\.mine\._target_={__name__}\.{term.__name__}: {words}"):
        make_terms(settings_of(term, size=VOCAB))


def test_other_faults_are_refused_once_the_vocabulary_is_there(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    term = f"+objective.mine={{_target_: {__name__}.Weighted, size: 5}}"
    assert shelf.run(tmp_path / "run", term) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert re.search(r"objective\.mine\._target_=.*Weighted: losses\(\) fails .*RuntimeError: The size", line), line


class Gathered(Weighted):
    """Takes every position for one with a target."""

    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return student.gather(1, targets[:, None])[:, 0]


def test_positions_without_a_target_are_tried_where_there_are_any() -> None:
    student, config = tiny.make_model("bert", 1), settings_of(Gathered, size=VOCAB)
    objective = tiny.make_objective(config, student, student)
    with pytest.raises(SettingError, match=r"losses\(\) fails on logits of 3 positions"):
        check_losses(objective, config, CPU)
    objective.terms["mine"].positions = "targets"  # type: ignore[attr-defined]
    check_losses(objective, config, CPU)


def test_a_loss_that_does_not_depend_on_the_student_is_refused() -> None:
    student = tiny.make_model("bert", 1)
    config = settings_of(Detached, size=VOCAB)
    objective = tiny.make_objective(config, student, student)
    with pytest.raises(SettingError, match="does not depend on the student's logits"):
        check_losses(objective, config, CPU)


class Counting(Weighted):
    """Keeps how many rows it has seen, under the name that `positions` had once."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rows = 0


def test_an_attribute_of_ones_own_may_be_called_rows() -> None:
    term: Any = make_terms(settings_of(Counting, size=VOCAB))["mine"]
    assert term.rows == 0 and term.positions == "all"
