"""Losses of the user's own: tried before training and on the pair's vocabulary, trained, checkpointed, not exported."""

import shutil
import sys
from pathlib import Path
from typing import Any

import own_parts
import pytest
import torch
from job import Shelf, assert_same, metrics, results, weights
from pairs import window
from safetensors.torch import load_file
from tiny import VOCAB, loss_of, make_model, make_objective, named_terms, objective_config
from torch import Tensor
from torch.nn.functional import kl_div

from distill import OutputSpec, Term, VocabularyTerm
from distill.models.language_model import Head
from distill.objective.build import check_losses, make_terms
from distill.runtime.errors import SettingError

CPU = torch.device("cpu")


class Weighted(VocabularyTerm):
    """A weight for each token, of a vocabulary whose size it knows when it is made."""

    def __init__(self, size: int) -> None:
        self.weights, self.rows = torch.linspace(1.0, 2.0, size), 0  # `positions` was once called so

    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return ((student - teacher).square() * self.weights).mean(-1)


class Centred(Weighted):
    """Makes its weights for the student, and keeps a mean of what it has seen, in a module and beside it."""

    def __init__(self) -> None:
        self.rows = 0

    def build(self, student: Any, teacher: Any) -> None:
        super().__init__(student.config.vocab_size)
        self.module = torch.nn.BatchNorm1d(1)

    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        self.rows += len(student)
        return self.module(super().losses(student, teacher, targets)[:, None])[:, 0]


class Mean(Weighted):
    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return (student - teacher).square().mean()


class Misspelt(Weighted):
    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return student.sum(-1) - self.wheights


class Detached(Weighted):
    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return super().losses(student.detach(), teacher, targets)


class Gathered(Weighted):
    """Takes every position for one with a target."""

    def losses(self, student: Tensor, teacher: Any, targets: Tensor) -> Tensor:
        return student.gather(1, targets[:, None])[:, 0]


class GatheredTargets(Gathered):
    positions = "targets"


def own(term: type, **settings: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{term.__name__}", **settings}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_own_losses", sys.modules[__name__])


def tried(settings: dict[str, Any]) -> Any:
    """The loss, bound to a pair and tried as before a training."""
    config, student = named_terms(mine=settings), make_model("bert", 1)
    objective = make_objective(config, student, make_model("bert", 1, seed=1))
    check_losses(objective, config, CPU)
    return objective.terms["mine"]


def test_a_weight_for_each_token_is_no_fault_and_a_trial_leaves_a_loss_as_it_was() -> None:
    assert tried(own(Weighted, size=VOCAB)).positions == "all" and tried(own(GatheredTargets, size=VOCAB))
    term = tried(own(Centred))
    assert term.rows == 0 and int(term.module.num_batches_tracked) == 0 and term.weights.shape == (VOCAB,)


@pytest.mark.parametrize(
    ("term", "words"),
    [
        (Mean, r"losses\(\) gives \[\] for 3 positions; give one value per position"),
        (Misspelt, r"losses\(\) fails on logits of 3 positions: AttributeError: .*test_own_losses\.py, line"),
    ],
)
def test_faults_on_any_vocabulary_are_refused_at_once(term: type, words: str) -> None:
    with pytest.raises(SettingError, match=rf"^objective\.mine\._target_={__name__}\.{term.__name__}: {words}"):
        make_terms(named_terms(mine=own(term, size=VOCAB)))


@pytest.mark.parametrize(
    ("term", "words"), [(Gathered, "fails on logits"), (Detached, "does not depend on the student")]
)
def test_other_faults_are_refused_before_the_training(term: type, words: str) -> None:
    """Where positions without a target are among those that it gets, they are tried, too."""
    with pytest.raises(SettingError, match=words):
        tried(own(term, size=VOCAB))


def test_a_run_with_a_loss_of_another_vocabulary_is_refused(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert shelf.run(tmp_path / "run", f"+objective.mine={{_target_: {__name__}.Weighted, size: 5}}") == 2
    assert "Weighted: losses() fails on logits of 3 positions: RuntimeError: The size" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("method", "error"), [("build", "AttributeError"), ("count", "AttributeError"), ("loss_sum", "RuntimeError")]
)
def test_a_fault_in_any_method_names_the_loss_and_the_line(method: str, error: str, teacher: Any) -> None:
    student, settings = make_model("bert", 2), objective_config(mine={"_target_": "own_parts.Faulty", "method": method})
    words = rf"^objective\.mine: {method}\(\) of Faulty fails: {error}.*\(own_parts\.py, line"
    with pytest.raises(SettingError, match=words):
        loss_of(make_objective(settings, student, teacher), student, teacher, window(2))


# --- one that reads the heads of both models


class AllLogits(Term):
    """The forward divergence at every position, from all logits at once."""

    student_reads = teacher_reads = OutputSpec(head=True)

    def count(self, batch: Any) -> int:
        return batch.num_valid

    def loss_sum(self, student: Any, teacher: Any, batch: Any) -> Tensor:
        q, p = (each.logits().log_softmax(-1) for each in (student.head, teacher.distribution))
        return kl_div(q, p, reduction="sum", log_target=True)


@pytest.mark.parametrize("rows", ["all", "masked"])
def test_it_reads_every_position_and_leaves_the_other_losses_as_they_are(teacher: Any, rows: str) -> None:
    """Its value and gradient are those of `soft`, and rows that only it reads carry no other term."""
    batches, student, found = window(2), make_model("distilbert", 1, seed=2), []
    second = {"kind": "soft", "temperature": 1.0, "weight": 0.7}
    for more in ({"mine": own(AllLogits, weight=0.7)}, {"mine": second}, {}):
        objective = make_objective(objective_config(3.0, 2.0, 0.0, rows=rows, **more), student, teacher)
        loss, sums = loss_of(objective, student, teacher, batches)
        gradients = torch.autograd.grad(loss, list(student.parameters()), materialize_grads=True)
        found.append((loss.detach(), torch.cat([each.flatten() for each in gradients]), sums))
    (loss, mine, sums), (want, reference, want_sums), (_, _, others) = found
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, reference, rtol=0, atol=1e-5 * float(reference.abs().max()))
    assert sums == pytest.approx(want_sums, rel=1e-5)
    assert [sums[name] for name in ("soft", "mlm")] == pytest.approx([others[name] for name in ("soft", "mlm")])


def test_its_logits_are_capped_as_the_model_caps_them() -> None:
    rows, weight = torch.randn(3, 4), torch.randn(7, 4)
    torch.testing.assert_close(Head(rows, weight, softcap=2.0).logits(), 2 * (rows @ weight.T / 2).tanh())


# --- one with a projection in whole runs

TERM = "+objective.hidden_1={_target_: own_parts.ProjectedHidden, weight: 3.0, student_layer: 1, teacher_layer: 2}"


def checkpoint(folder: Path, step: int) -> dict[str, Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def test_it_is_logged_trained_checkpointed_and_resumed_but_not_exported(shelf: Shelf, done: Path) -> None:
    folder, resumed = shelf.root / "own-term", shelf.root / "own-term-resumed"
    assert shelf.run(folder, TERM) == 0
    lines, content = metrics(folder), results(folder)
    for line in lines:
        parts = 5 * line["loss/soft"] + 2 * line["loss/mlm"] + line["loss/cosine"] + 3 * line["loss/hidden_1"]
        assert line["loss/total"] == pytest.approx(parts, rel=1e-5)
    assert lines[-1]["loss/hidden_1"] < lines[0]["loss/hidden_1"]
    assert content["objective"]["terms"]["hidden_1"] == {"title": "Projected hidden state", "weight": 3.0}
    assert "Projected hidden state" in (folder / "report.html").read_text()
    before, after = (checkpoint(folder, step)["terms.hidden_1.weight"] for step in (6, 8))
    assert not torch.equal(before, after) and weights(folder).keys() == weights(done).keys()
    shutil.copytree(folder, resumed)
    (resumed / "results.json").unlink()
    shutil.rmtree(resumed / "checkpoints" / "step-00000008")
    assert shelf.run(resumed, TERM) == 0
    assert_same(resumed, folder)
    assert torch.equal(checkpoint(resumed, 8)["terms.hidden_1.weight"], after)


def test_a_new_loss_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: Any) -> None:
    """A file in the folder of the terms is found by its name: no list of terms has to be edited."""
    import distill.objective.terms as package

    text = Path(own_parts.__file__).read_text().replace("ProjectedHidden", "HiddenProjection")
    (tmp_path / "hidden_projection.py").write_text(text)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    layers = {"student_layer": 1, "teacher_layer": 2}
    settings = named_terms(hidden_projection=layers, second={"kind": "hidden_projection", **layers})
    assert make_objective(settings, make_model("bert", 1), teacher).modules().keys() == {"hidden_projection", "second"}
