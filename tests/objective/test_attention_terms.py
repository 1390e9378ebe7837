"""Losses on attention scores and relations, against loops over rows, heads, queries and keys."""

import math
from typing import Any

import pytest
import torch
from families import make
from pairs import assert_agrees, window
from tiny import loss_of, make_model, make_objective, objective_config
from torch import Tensor, nn

from distill.config.settings import ObjectiveConfig, PrecisionConfig
from distill.models.blocks import block_list
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.recorded_attention import QKV
from distill.objective.terms.attention_scores import mean_squared_error
from distill.objective.terms.relations import divergence
from distill.runtime.errors import SettingError

HEADS: dict[str, dict[str, Any]] = {"attention_scores": {}, "relations": {"relation_heads": 4}}
Vectors = tuple[Tensor, Tensor, Tensor]  # queries, keys, values of one row: [heads, length, size of a head]


def settings(name: str, **given: Any) -> ObjectiveConfig:
    return objective_config(0.0, 0.0, 0.0, **{name: {"weight": 1.0, **given}})


def projected(model: Any, ids: Tensor) -> list[Vectors]:
    """Of every block of a BERT, from its projections: nothing stands between these and its attention."""
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
    heads = model.config.num_attention_heads
    split = [each.unflatten(-1, (heads, -1)).transpose(0, 1) for each in found]
    return [(split[n], split[n + 1], split[n + 2]) for n in range(0, len(split), 3)]


def rotated(model: Any, ids: Tensor) -> list[Vectors]:
    """Of every block of a Llama, after its rotary embedding; keys and values once for every query head."""
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


def relation_loss(student: Vectors, teacher: Vectors, query: int, causal: bool, heads: int, weights: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for s, t, weight in zip(student, teacher, weights, strict=True):
        for head in range(heads):
            p, q = (relation(each, heads, head, query, causal) for each in (t, s))
            total = total + weight / heads * sum(p * (p / q).log())
    return total


def mean_over_positions(loss: Any, student: Any, teacher: Any, pairs: list[tuple[int, int]], causal: bool) -> Any:
    """A definition: the mean over all positions of all rows of the sum over pairs of blocks."""
    vectors = rotated if causal else projected

    def definition(rows: list[Tensor], projections: dict[str, Tensor]) -> Tensor:
        assert not projections
        found = []
        for ids in rows:
            own, other = vectors(student, ids), vectors(teacher, ids)
            for query in range(ids.shape[1]):
                found.append(sum(loss(own[a - 1], other[b - 1], query, causal) for a, b in pairs))
        return sum(found) / len(found)

    return definition


PAIRS = {"default": (None, [(1, 2), (2, 4)]), "named": ([[2, 1], [-1, -1]], [(2, 1), (2, 4)])}


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.parametrize("width", [32, 20])
def test_attention_scores(width: int, case: str) -> None:
    student, teacher = make_model("bert", 2, seed=7, hidden_size=width), make_model("bert", 4)
    given, pairs = PAIRS[case]
    definition = mean_over_positions(score_loss, student, teacher, pairs, causal=False)
    assert_agrees("attention_scores", {"pairs": given}, student, teacher, definition)


def test_attention_scores_of_grouped_and_causal_heads() -> None:
    student, teacher = make("llama", num_key_value_heads=1, layers=2), make("llama")
    definition = mean_over_positions(score_loss, student, teacher, [(1, 2), (2, 3)], causal=True)
    assert_agrees("attention_scores", {}, student, teacher, definition)


@pytest.mark.parametrize(
    ("given", "pair", "weights"),
    [
        ({"relation_heads": 4}, (2, 4), (1, 1, 1)),
        ({"relation_heads": 2, "student_layer": 1, "teacher_layer": 3}, (1, 3), (1, 1, 1)),
        ({"relation_heads": 1, "query": 0, "key": 0.5, "value": 2}, (2, 4), (0, 0.5, 2)),
    ],
)
def test_relations(given: dict[str, Any], pair: tuple[int, int], weights: tuple[float, ...]) -> None:
    """Between models of different widths and numbers of heads."""
    student = make_model("bert", 2, seed=7, hidden_size=20, num_attention_heads=5)
    teacher = make_model("bert", 4)

    def loss(*given_: Any) -> Tensor:
        return relation_loss(*given_, given["relation_heads"], weights)

    definition = mean_over_positions(loss, student, teacher, [pair], causal=False)
    assert_agrees("relations", given, student, teacher, definition)


def test_relations_of_grouped_and_causal_heads() -> None:
    """Keys that a position does not see do not enter; 48 numbers of the teacher beside 16 of the student."""
    student, teacher = make("llama", num_key_value_heads=1, layers=2, head_dim=4), make("llama")

    def loss(*given: Any) -> Tensor:
        return relation_loss(*given, 8, (1, 1, 1))

    definition = mean_over_positions(loss, student, teacher, [(2, 3)], causal=True)
    assert_agrees("relations", {"relation_heads": 8}, student, teacher, definition)


def test_a_key_that_one_model_does_not_see_does_not_enter() -> None:
    """A causal student beside a teacher that sees both ways is compared where both look."""
    student, teacher = make("llama", layers=1), make_model("bert", 2)

    def definition(rows: list[Tensor], _: dict[str, Tensor]) -> Tensor:
        found = []
        for ids in rows:
            own, other = rotated(student, ids)[-1], projected(teacher, ids)[-1]
            found += [relation_loss(own, other, query, True, 4, (1, 1, 1)) for query in range(ids.shape[1])]
        return sum(found) / len(found)

    assert_agrees("relations", {"relation_heads": 4}, student, teacher, definition)


def test_equal_models_have_no_loss() -> None:
    model = make_model("bert", 2)
    for name in ("attention_scores", "relations"):
        _, sums = loss_of(make_objective(settings(name, **HEADS[name]), model, model), model, model, window(2))
        assert sums[name] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "given", "student", "words"),
    [
        ("attention_scores", {"pairs": [[0, 1]]}, {}, ["objective.attention_scores.pairs", "layer 0", "1 to 2"]),
        ("attention_scores", {}, {"num_attention_heads": 2}, ["weight", "4 attention heads", "student 2", "relations"]),
        ("relations", {}, {}, ["objective.relations.relation_heads=12", "32", "divisor of 32"]),
        ("relations", {"relation_heads": 8}, {"hidden_size": 20}, ["relation_heads=8", "20", "32", "divisor of 4"]),
        ("relations", {"relation_heads": 0}, {}, ["relation_heads=0", "1 or more"]),
        ("relations", {"teacher_layer": 5}, {}, ["objective.relations.teacher_layer=5", "1 to 4"]),
        ("relations", {"student_layer": 0}, {}, ["objective.relations.student_layer=0", "1 to 2"]),
        ("relations", {"query": -1.0}, {}, ["objective.relations.query=-1.0", "0 or more"]),
        ("relations", {"query": 0.0, "key": 0.0, "value": 0.0}, {}, ["query=0", "nothing to compare"]),
    ],
)
def test_what_cannot_be_is_refused(name: str, given: Any, student: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingError) as error:
        make_objective(settings(name, **given), make_model("bert", 2, **student), make_model("bert", 4))
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("name", HEADS)
def test_models_that_do_not_show_their_attention_are_refused(name: str) -> None:
    with pytest.raises(SettingError, match=f"objective.{name}.*MPNet.* does not show"):
        make_objective(settings(name, **HEADS[name]), make_model("bert", 3), make("mpnet"))


@pytest.mark.parametrize("name", HEADS)
def test_compiled_encoders_are_refused(name: str) -> None:
    student, teacher = make_model("bert", 2), make_model("bert", 4)
    with pytest.raises(SettingError, match=f"precision.compile=true, but objective.{name} .* precision.compile=false"):
        make_objective(settings(name, **HEADS[name]), student, teacher, PrecisionConfig(compile=True))


def test_masked_rows_without_any_key_give_no_nan() -> None:
    """A padding query may see nothing at all; it does not count, and must not spoil the gradient either."""
    torch.manual_seed(0)
    student, teacher = (torch.randn(1, 2, 3, 4) for _ in range(2))
    visible = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])[None, None]
    layer = nn.Linear(4, 4)
    divergence(layer(student), teacher, 2, visible)[:, :2].sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.isfinite().all()
    own = QKV(layer(student), student, student, visible, 0.5)
    mean_squared_error(own, QKV(teacher, teacher, teacher, None, 0.5))[:, :2].sum().backward()
    assert layer.weight.grad.isfinite().all()
