"""Losses on hidden states and pooled vectors, against loops over rows, positions and pairs of layers."""

from typing import Any

import pytest
import torch
from families import make
from pairs import assert_agrees, window
from tiny import loss_of, make_model, make_objective, objective_config
from torch import Tensor

from distill.config.settings import ObjectiveConfig
from distill.runtime.errors import SettingError

NARROW = {"hidden_size": 20, "num_attention_heads": 5}


def hidden(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    """The model's own, each [length, H]: the embeddings, then the output of every block."""
    return tuple(states[0] for states in model(input_ids=ids, output_hidden_states=True).hidden_states)


def weight_of(projections: dict[str, Tensor], number: int, width: int) -> Tensor:
    """[teacher's width, student's width]; the identity where there is no projection."""
    return projections.get(f"{number}.weight", torch.eye(width, dtype=torch.float64))


def distance(kind: str, student: Tensor, teacher: Tensor) -> Tensor:
    if kind == "hidden_mse":
        return sum((s - t) ** 2 for s, t in zip(student, teacher, strict=True)) / len(teacher)
    return 1 - student @ teacher / (student.norm() * teacher.norm())


# The setting, and what it stands for with 2 blocks beside 4.
PAIRS = {
    "default": (None, [(0, 0), (1, 2), (2, 4)]),
    "named": ([[1, 3], [-1, -1], [1, 0]], [(1, 3), (2, 4), (1, 0)]),
}


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.parametrize("narrow", [True, False], ids=["projected", "equal widths"])
@pytest.mark.parametrize("kind", ["hidden_mse", "hidden_cosine"])
def test_hidden_layers(kind: str, narrow: bool, case: str) -> None:
    student, teacher = make_model("bert", 2, seed=7, **(NARROW if narrow else {})), make_model("bert", 4)
    given, pairs = PAIRS[case]

    def definition(rows: list[Tensor], projections: dict[str, Tensor]) -> Tensor:
        assert bool(projections) == narrow and not any("bias" in name for name in projections)
        found = []
        for ids in rows:
            own, other = hidden(student, ids), hidden(teacher, ids)
            for position in range(ids.shape[1]):
                values = [
                    distance(kind, weight_of(projections, n, 32) @ own[a][position], other[b][position])
                    for n, (a, b) in enumerate(pairs)
                ]
                found.append(sum(values))
        return sum(found) / len(found)

    assert_agrees(kind, {"pairs": given}, student, teacher, definition)


@pytest.mark.parametrize("case", ["default", "named"])
def test_patient(case: str) -> None:
    student, teacher = make_model("bert", 3, seed=7), make_model("bert", 4)
    given, pairs = {"default": (None, [(1, 1), (2, 3)]), "named": ([[0, 0], [-1, 2]], [(0, 0), (3, 2)])}[case]

    def definition(rows: list[Tensor], _: dict[str, Tensor]) -> Tensor:
        found = []
        for ids in rows:
            own, other = hidden(student, ids), hidden(teacher, ids)
            for a, b in pairs:
                s, t = own[a][0], other[b][0]
                found.append(sum((s / (s @ s).sqrt() - t / (t @ t).sqrt()) ** 2))
        return sum(found) / len(rows)

    assert_agrees("patient", {"pairs": given}, student, teacher, definition)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("narrow", [True, False], ids=["projected", "equal widths"])
def test_pooled(narrow: bool, metric: str, pooling: str) -> None:
    student, teacher = make_model("bert", 2, seed=7, **(NARROW if narrow else {})), make_model("bert", 3)

    def pooled(states: Tensor) -> Tensor:
        return states[0] if pooling == "cls" else sum(states.unbind()) / len(states)

    def definition(rows: list[Tensor], projections: dict[str, Tensor]) -> Tensor:
        found = []
        for ids in rows:
            s = weight_of(projections, 0, 32) @ pooled(hidden(student, ids)[-1])
            t = pooled(hidden(teacher, ids)[-1])
            found.append(sum((s - t) ** 2) if metric == "l2" else distance("cosine", s, t))
        return sum(found) / len(found)

    assert_agrees("pooled", {"pooling": pooling, "distance": metric}, student, teacher, definition)


def settings(name: str, **given: Any) -> ObjectiveConfig:
    return objective_config(0.0, 0.0, 0.0, **{name: {"weight": 1.0, **given}})


def test_they_stand_beside_each_other_and_beside_losses_on_logits() -> None:
    """What several terms want is read once, and each finds its own; two of one kind have names of their own."""
    student, teacher, batches = make_model("bert", 2, seed=7), make_model("bert", 4), window(2)
    terms = {
        "hidden_mse": {"weight": 0.5},
        "second": {"kind": "hidden_mse", "weight": 1.0, "pairs": [[1, 1]]},
        "pooled": {"weight": 1.0},
        "cls": {"kind": "pooled", "weight": 2.0, "pooling": "cls"},
        "relations": {"weight": 1.0, "relation_heads": 4},
        "attention_scores": {"weight": 1.0},
    }
    together, sums = loss_of(make_objective(objective_config(**terms), student, teacher), student, teacher, batches)
    apart = loss_of(make_objective(objective_config(), student, teacher), student, teacher, batches)[0]
    for name, given in terms.items():
        loss, alone = loss_of(make_objective(settings(name, **given), student, teacher), student, teacher, batches)
        assert sums[name] == pytest.approx(alone[name], rel=1e-6)
        apart = apart + loss
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize(
    ("name", "given", "student", "words"),
    [
        ("hidden_mse", {"pairs": [[1]]}, {}, ["objective.hidden_mse.pairs=[[1]]", "[student layer, teacher layer]"]),
        ("hidden_mse", {"pairs": []}, {}, ["objective.hidden_mse.pairs=[]"]),
        ("hidden_mse", {"pairs": [[3, 1]]}, {}, ["objective.hidden_mse.pairs", "layer 3 of the student", "0 to 2"]),
        ("hidden_cosine", {"pairs": [[1, -2]]}, {}, ["objective.hidden_cosine.pairs", "layer -2 of the teacher"]),
        ("hidden_cosine", {"pairs": "all"}, {}, ["objective.hidden_cosine.pairs", "list"]),
        ("patient", {}, NARROW, ["objective.patient.weight", "32 and 20", "objective.hidden_mse"]),
        ("patient", {}, {"num_hidden_layers": 1}, ["objective.patient.pairs=null", "1 blocks"]),
        ("pooled", {"pooling": "min"}, {}, ["objective.pooled.pooling", "min", "mean"]),
        ("pooled", {"distance": "l1"}, {}, ["objective.pooled.distance", "l1", "cosine"]),
    ],
)
def test_what_cannot_be_is_refused(name: str, given: Any, student: Any, words: list[str]) -> None:
    with pytest.raises(SettingError) as error:
        make_objective(settings(name, **given), make_model("bert", 2, **student), make("bert"))
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), str(error.value)
