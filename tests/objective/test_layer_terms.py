"""Losses between the inside of two models against loops over rows, positions, heads, queries, keys and layers."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make
from pairs import Definition, assert_agrees, window
from tiny import Fit, loss_of, make_model, make_objective, make_rows, objective_config, only
from torch import Tensor, nn

from distill.models.blocks import block_list
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.recorded_attention import QKV
from distill.objective.terms.attention_scores import mean_squared_error
from distill.objective.terms.relations import divergence

NARROW = {"hidden_size": 20, "num_attention_heads": 5}
Vectors = tuple[Tensor, Tensor, Tensor]  # queries, keys, values of one row: [heads, length, size of a head]


def pair(layers: int = 2, teacher_layers: int = 4, **student: Any) -> tuple[Any, Any]:
    return make_model("bert", layers, seed=7, **student), make_model("bert", teacher_layers)


# --- hidden states and pooled vectors


def hidden(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    """The model's own, each [length, H]: the embeddings, then the output of every block."""
    return tuple(states[0] for states in model(input_ids=ids, output_hidden_states=True).hidden_states)


def weight_of(projections: dict[str, Tensor], number: int) -> Tensor:
    """[teacher's width, student's width]; the identity where there is no projection."""
    return projections.get(f"{number}.weight", torch.eye(32, dtype=torch.float64))


def mse(s: Tensor, t: Tensor) -> Tensor:
    return sum((a - b) ** 2 for a, b in zip(s, t, strict=True)) / len(t)


def l2(s: Tensor, t: Tensor) -> Tensor:
    return sum((s - t) ** 2)


def cosine(s: Tensor, t: Tensor) -> Tensor:
    return 1 - s @ t / (s.norm() * t.norm())


def of_layers(student: Any, teacher: Any, pairs: list[tuple[int, int]], distance: Any) -> Definition:
    def definition(rows: list[Tensor], projections: dict[str, Tensor]) -> Tensor:
        assert len(projections) == (len(pairs) if student.config.hidden_size == 20 else 0)
        assert not any("bias" in name for name in projections)
        found = []
        for own, other in ((hidden(student, ids), hidden(teacher, ids)) for ids in rows):
            for at in range(len(own[0])):
                weights = [weight_of(projections, n) for n in range(len(pairs))]
                values = [distance(w @ own[a][at], other[b][at]) for w, (a, b) in zip(weights, pairs, strict=True)]
                found.append(sum(values))
        return sum(found) / len(found)

    return definition


# The setting, and what it stands for with 2 blocks beside 4.
DEFAULT = (None, [(0, 0), (1, 2), (2, 4)])
NAMED = ([[1, 3], [-1, -1], [1, 0]], [(1, 3), (2, 4), (1, 0)])


@pytest.mark.parametrize(
    ("kind", "sizes", "pairs"),
    [
        ("hidden_mse", NARROW, DEFAULT),
        ("hidden_mse", {}, NAMED),
        ("hidden_cosine", NARROW, NAMED),
        ("hidden_cosine", {}, DEFAULT),
    ],
)
def test_hidden_layers(kind: str, sizes: dict[str, Any], pairs: Any) -> None:
    student, teacher = pair(**sizes)
    definition = of_layers(student, teacher, pairs[1], mse if kind == "hidden_mse" else cosine)
    assert_agrees(kind, {"pairs": pairs[0]}, student, teacher, definition)


@pytest.mark.parametrize(
    ("given", "pairs"), [(None, [(1, 1), (2, 3)]), ([[0, 0], [-1, 2]], [(0, 0), (3, 2)])], ids=["default", "named"]
)
def test_patient(given: Any, pairs: list[tuple[int, int]]) -> None:
    student, teacher = pair(3)

    def definition(rows: list[Tensor], _: dict[str, Tensor]) -> Tensor:
        found = []
        for own, other in ((hidden(student, ids), hidden(teacher, ids)) for ids in rows):
            for s, t in ((own[a][0], other[b][0]) for a, b in pairs):
                found.append(sum((s / (s @ s).sqrt() - t / (t @ t).sqrt()) ** 2))
        return sum(found) / len(rows)

    assert_agrees("patient", {"pairs": given}, student, teacher, definition)


@pytest.mark.parametrize(
    ("sizes", "distance", "pooling"), [(NARROW, "l2", "mean"), (NARROW, "cosine", "cls"), ({}, "cosine", "mean")]
)
def test_pooled(sizes: dict[str, Any], distance: str, pooling: str) -> None:
    student, teacher = pair(2, 3, **sizes)

    def pooled(model: Any, ids: Tensor) -> Tensor:
        states = hidden(model, ids)[-1]
        return states[0] if pooling == "cls" else sum(states.unbind()) / len(states)

    def definition(rows: list[Tensor], projections: dict[str, Tensor]) -> Tensor:
        measure, weight = {"l2": l2, "cosine": cosine}[distance], weight_of(projections, 0)
        return sum(measure(weight @ pooled(student, ids), pooled(teacher, ids)) for ids in rows) / len(rows)

    assert_agrees("pooled", {"pooling": pooling, "distance": distance}, student, teacher, definition)


# --- attention


def of_bert(model: Any, ids: Tensor) -> list[Vectors]:
    """Of every block, from its projections: nothing stands between these and its attention."""
    layers = [block.attention.self for block in block_list(model.base_model, model.config.num_hidden_layers)]
    found: list[Tensor] = []
    handles = [
        getattr(layer, name).register_forward_hook(lambda _, __, output: found.append(output[0]))
        for layer in layers
        for name in ("query", "key", "value")
    ]
    model(input_ids=ids)
    for handle in handles:
        handle.remove()
    split = [each.unflatten(-1, (model.config.num_attention_heads, -1)).transpose(0, 1) for each in found]
    return [(split[n], split[n + 1], split[n + 2]) for n in range(0, len(split), 3)]


def of_llama(model: Any, ids: Tensor) -> list[Vectors]:
    """Of every block, after its rotary embedding; keys and values once for every query head."""
    depth = model.config.num_hidden_layers
    qkv = LanguageModel(model)({"input_ids": ids}, None, OutputSpec(qkv=tuple(range(1, depth + 1)))).qkv
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    return [
        (each.query[0], *(torch.stack([x[0, h // groups] for h in range(len(each.query[0]))]) for x in each[1:3]))
        for each in qkv.values()
    ]


def score_loss(student: Vectors, teacher: Vectors, query: int, causal: bool) -> Tensor:
    """Mean over heads and visible keys of the squared difference of the scaled scores."""
    found = []
    for head in range(len(student[0])):
        for key in range(query + 1 if causal else student[0].shape[1]):
            a, b = (q[head, query] @ k[head, key] / math.sqrt(q.shape[-1]) for q, k, _ in (student, teacher))
            found.append((a - b) ** 2)
    return sum(found) / len(found)


def relation(vectors: Tensor, heads: int, head: int, query: int, causal: bool) -> Tensor:
    """softmax over the visible keys, for one of `heads` new heads."""
    joined = torch.cat(list(vectors), -1)  # [length, width]
    size = joined.shape[-1] // heads
    part = joined[: query + 1 if causal else None, head * size : (head + 1) * size]
    return (part @ part[query] / math.sqrt(size)).softmax(0)


def relation_loss(
    student: Vectors, teacher: Vectors, query: int, causal: bool, heads: int, weights: Any = (1, 1, 1)
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for s, t, weight in zip(student, teacher, weights, strict=True):
        for head in range(heads):
            p, q = (relation(each, heads, head, query, causal) for each in (t, s))
            total = total + weight / heads * sum(p * (p / q).log())
    return total


def over_queries(
    loss: Any, own: Callable[[Tensor], Any], other: Callable[[Tensor], Any], pairs: Any, causal: bool
) -> Any:
    """A definition: the mean over all positions of all rows of the sum over pairs of blocks."""

    def definition(rows: list[Tensor], projections: dict[str, Tensor]) -> Tensor:
        found = []
        for ids in rows:
            mine, others = own(ids), other(ids)
            for query in range(ids.shape[1]):
                found.append(sum(loss(mine[a - 1], others[b - 1], query, causal) for a, b in pairs))
        return sum(found) / len(found)

    return definition


@pytest.mark.parametrize(
    ("width", "given", "pairs"), [(32, None, [(1, 2), (2, 4)]), (20, [[2, 1], [-1, -1]], [(2, 1), (2, 4)])]
)
def test_attention_scores(width: int, given: Any, pairs: list[tuple[int, int]]) -> None:
    student, teacher = pair(hidden_size=width)
    definition = over_queries(score_loss, partial(of_bert, student), partial(of_bert, teacher), pairs, causal=False)
    assert_agrees("attention_scores", {"pairs": given}, student, teacher, definition)


@pytest.mark.parametrize(
    ("given", "blocks", "weights"),
    [
        ({"relation_heads": 4}, (2, 4), (1, 1, 1)),
        ({"relation_heads": 2, "student_layer": 1, "teacher_layer": 3}, (1, 3), (1, 1, 1)),
        ({"relation_heads": 1, "query": 0, "key": 0.5, "value": 2}, (2, 4), (0, 0.5, 2)),
    ],
)
def test_relations(given: dict[str, Any], blocks: tuple[int, int], weights: tuple[float, ...]) -> None:
    """Between models of different widths and numbers of heads."""
    student, teacher = pair(**NARROW)
    loss = partial(relation_loss, heads=given["relation_heads"], weights=weights)
    definition = over_queries(loss, partial(of_bert, student), partial(of_bert, teacher), [blocks], causal=False)
    assert_agrees("relations", given, student, teacher, definition)


@pytest.mark.parametrize("name", ["attention_scores", "relations"])
def test_grouped_and_causal_heads(name: str) -> None:
    """Keys that a position does not see do not enter; 48 numbers of the teacher beside 16 of the student."""
    relates = name == "relations"
    student, teacher = (
        make("llama", num_key_value_heads=1, layers=2, **({"head_dim": 4} if relates else {})),
        make("llama"),
    )
    loss, given = (partial(relation_loss, heads=8), {"relation_heads": 8}) if relates else (score_loss, {})
    pairs = [(2, 3)] if relates else [(1, 2), (2, 3)]
    definition = over_queries(loss, partial(of_llama, student), partial(of_llama, teacher), pairs, causal=True)
    assert_agrees(name, given, student, teacher, definition)


def test_a_key_that_one_model_does_not_see_does_not_enter() -> None:
    """A causal student beside a teacher that sees both ways is compared where both look."""
    student, teacher = make("llama", layers=1), make_model("bert", 2)
    loss = partial(relation_loss, heads=4)
    definition = over_queries(loss, partial(of_llama, student), partial(of_bert, teacher), [(1, 2)], causal=True)
    assert_agrees("relations", {"relation_heads": 4}, student, teacher, definition)


def test_masked_rows_without_any_key_give_no_nan() -> None:
    """A padding query may see nothing at all; it does not count, and must not spoil the gradient either."""
    torch.manual_seed(0)
    student, teacher = (torch.randn(1, 2, 3, 4) for _ in range(2))
    visible = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])[None, None]
    layer = nn.Linear(4, 4)
    divergence(layer(student), teacher, 2, visible)[:, :2].sum().backward()
    own = QKV(layer(student), student, student, visible, 0.5)
    mean_squared_error(own, QKV(teacher, teacher, teacher, None, 0.5))[:, :2].sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_they_stand_beside_each_other_and_beside_losses_on_logits() -> None:
    """What several terms read is read once, and each finds its own; two of one kind have names of their own."""
    (student, teacher), batches = pair(), window(2)
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
        loss, alone = loss_of(make_objective(only(**{name: given}), student, teacher), student, teacher, batches)
        assert sums[name] == pytest.approx(alone[name], rel=1e-6)
        apart = apart + loss
    torch.testing.assert_close(together, apart)


# --- training through all of them changes nothing in the teacher

EVERY: dict[str, dict[str, Any]] = {
    **{name: {"weight": 1.0} for name in ("hidden_mse", "hidden_cosine", "attention_scores", "pooled")},
    "relations": {"weight": 1.0, "relation_heads": 4},
    "pooled_cosine": {"kind": "pooled", "weight": 1.0, "pooling": "cls", "distance": "cosine"},
}


def content(model: nn.Module) -> dict[str, bytes]:
    """Every tensor of a model, buffers included, byte by byte."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: each.detach().numpy().tobytes() for name, each in tensors.items()}


def test_training_leaves_the_teacher_as_it_was(tokenizer: Any, tmp_path: Path) -> None:
    teacher = make_model("bert", 4, dropout=0.3).requires_grad_(False)
    before, attributes = content(teacher), dict(vars(teacher.config))
    for width, terms in ((32, {**EVERY, "patient": {"weight": 1.0}}), (20, EVERY)):
        student = make_model("bert", 2, seed=5, hidden_size=width, dropout=0.1).train()
        old, settings = content(student), objective_config(cosine=float(width == 32), **terms)
        fit = Fit(tmp_path / str(width), tokenizer, make_rows(20, shortest=5), teacher, student, settings)
        fit.run()
        assert fit.logs[-1]["step"] == 6 and fit.logs[-1]["skipped"] == 0
        assert all(fit.logs[-1][f"loss/{name}"] > 0 for name in terms)
        assert content(student) != old, "a training that changes nothing shows nothing"
        assert (len(fit.terms.modules()) > 0) == (width == 20)
        for name, module in fit.terms.modules().items():
            assert all(p.grad is not None and bool(p.grad.any()) for p in module.parameters()), name
    assert content(teacher) == before and dict(vars(teacher.config)) == attributes
    assert not any(module.training for module in teacher.modules())
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in teacher.modules())
