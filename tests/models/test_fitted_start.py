"""The closed-form start of a student's last layer: against least squares by another library, and in a run."""

from typing import Any

import numpy as np
import pytest
import torch
from families import make_family
from job import Shelf, metrics
from pairs import window
from tiny import make_model

from distill.config.settings import StudentConfig
from distill.models import fitted_start
from distill.models.fitted_start import fit_last_layer
from distill.models.kind import MASKED
from distill.models.student import from_layers
from distill.runtime.errors import SettingError


def pair(architecture: str) -> tuple[Any, Any]:
    teacher = make_model("roberta" if architecture == "roberta" else "bert", 4)
    settings = StudentConfig(kind="layers", architecture=architecture)
    return from_layers(settings, teacher, [0, 1], MASKED, share=False).train(), teacher


def before_norm(model: Any, ids: torch.Tensor, attention: torch.Tensor | None) -> list[np.ndarray]:
    """Input of the last product, its outcome, and the state before the last normalisation, by names of modules."""
    found: dict[str, torch.Tensor] = {}
    names = ("output.dense", "output.LayerNorm") if hasattr(model, "bert") or hasattr(model, "roberta") else (
        "ffn.lin2", "output_layer_norm"
    )  # fmt: skip
    for name, module in model.base_model.named_modules():
        for wanted in names:
            if name.endswith(wanted) and "attention" not in name:
                module.register_forward_hook(
                    lambda _, arguments, output, key=wanted: found.update({key: arguments[0], f"{key} out": output})
                )
    model.base_model(input_ids=ids, attention_mask=attention)
    keep = slice(None) if attention is None else attention.flatten().bool()
    kept = [found[names[0]], found[f"{names[0]} out"], found[names[1]]]
    return [each.flatten(0, -2)[keep].double().numpy() for each in kept]


@pytest.mark.parametrize("architecture", ["bert", "distilbert", "roberta"])
@pytest.mark.parametrize("shortest", [4, None], ids=["padded", "full"])
@torch.no_grad()
def test_it_is_the_least_squares_solution(
    architecture: str, shortest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitted_start, "RIDGE", 1e-12)
    student, teacher = pair(architecture)
    batches = window(16, shortest=shortest)
    untouched = {name: each.clone() for name, each in student.named_parameters()}
    states: list[list[np.ndarray]] = []
    student.eval()
    for batch in batches:
        attention = None if batch.documents is None else (batch.documents >= 0).long()
        g, y, x = before_norm(student, batch.ids, attention)
        states.append([g, before_norm(teacher, batch.ids, attention)[2] - (x - y)])
    student.train()
    g, wanted = (np.concatenate(each) for each in zip(*states, strict=True))
    g = np.concatenate([g, np.ones((len(g), 1))], 1)
    best, *_ = np.linalg.lstsq(g, wanted, rcond=None)
    fit = fit_last_layer(student, teacher, batches)
    assert fit.positions == len(g) and student.training and not teacher.training
    least = np.square(g @ best - wanted).sum() / len(g)
    assert fit.after == pytest.approx(least, rel=1e-3, abs=1e-9) and fit.after < fit.before
    last = fitted_start.last_of(student)
    own = np.concatenate([last.product.weight.numpy(), last.product.bias.numpy()[:, None]], 1).T
    assert np.square(g @ own - wanted).sum() / len(g) == pytest.approx(least, rel=1e-3, abs=1e-6)
    changed = {name for name, each in student.named_parameters() if not torch.equal(each, untouched[name])}
    assert all(
        ".1." in name and ("norm" in name.lower() or "output.dense" in name or "lin2" in name) for name in changed
    )


@torch.no_grad()
def test_few_positions_leave_the_weights_near_their_start() -> None:
    student, teacher = pair("distilbert")
    start = fitted_start.last_of(student).product.weight.clone()
    fit = fit_last_layer(student, teacher, window(1, shortest=None)[:1])
    weight = fitted_start.last_of(student).product.weight
    assert fit.after < fit.before and torch.isfinite(weight).all()
    assert float((weight - start).norm() / start.norm()) < 10


def test_a_family_that_is_not_known_is_refused_in_one_line() -> None:
    with pytest.raises(SettingError, match=r"student\.start=fitted is for BERT"):
        fitted_start.last_of(make_family("gpt2"))


def test_a_run_begins_with_it(shelf: Shelf, lines: list[str]) -> None:
    losses = []
    for start in ("random", "fitted"):
        folder = shelf.root / f"start-{start}"
        short = ["train.epochs=null", "train.steps=1", "train.batch_size=60", "train.accumulate=1"]
        assert shelf.run(folder, *short, f"student.start={start}", "student.layers=[0,1]") == 0
        losses.append(metrics(folder)[0]["loss/soft"])
    assert losses[1] < losses[0]
    assert sum(line.startswith("student.start=fitted: the last state") for line in lines) == 1
