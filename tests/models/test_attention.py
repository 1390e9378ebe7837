"""Attention as batched products: torch's SDPA in value and gradient, for every family, with and without padding."""

import copy
from typing import Any

import families
import pytest
import tiny
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from distill.models.kernels import CAUSAL_FAMILIES, FAMILIES
from distill.models.kernels import attention as batched
from distill.models.kernels.attention import DROPOUT_ONLY, NAME, attention, use_batched_products
from distill.models.kernels.dropout import keyed_by_sequence, replace_dropout
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.precision import autocast
from distill.models.student import dropout_names


@pytest.mark.parametrize("mask", [None, "bool", "added"])
def test_it_is_torchs(mask: str | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 4, 17, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    real = torch.arange(17) < torch.tensor([17, 5, 11])[:, None]
    allowed = None if mask is None else real[:, None, None, :].expand(3, 1, 17, 17)
    if mask == "added":
        allowed = torch.zeros(3, 1, 17, 17, dtype=torch.bfloat16).masked_fill(~real[:, None, None, :], -1e30)
    upstream = torch.randn(3, 4, 17, 8)

    def of(output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (output, *torch.autograd.grad((output * upstream).sum(), (query, key, value)))

    made, weights = attention(torch.nn.Module(), query, key, value, allowed, scaling=0.3)
    assert weights is None and made.dtype == torch.bfloat16
    doubles = (t.double() for t in (query, key, value))
    exact = None if allowed is None or mask == "bool" else allowed.double()
    reference = scaled_dot_product_attention(*doubles, attn_mask=allowed if exact is None else exact, scale=0.3)
    for found, exact in zip(of(made.transpose(1, 2)), of(reference), strict=True):
        torch.testing.assert_close(found.double(), exact.double(), rtol=0.03, atol=0.03)


def test_weights_are_dropped() -> None:
    torch.manual_seed(0)
    query, key = torch.zeros(2, 3, 64, 8), torch.zeros(2, 3, 64, 8)  # all weights alike: 1/64
    made, _ = attention(torch.nn.Module(), query, key, torch.ones(2, 3, 64, 8), None, dropout=0.25)
    assert made.shape == (2, 64, 3, 8)
    kept = made[..., 0] * 64 * 0.75  # of 64 values, each with probability 3/4
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-3)
    assert kept.mean().item() == pytest.approx(48, abs=4 * 3.5 / kept.numel() ** 0.5)
    assert 2.5 < kept.std().item() < 4.5  # sqrt(64 * 3/16) = 3.46


class Attends(torch.nn.Module):
    """What an attention function looks at of the module that calls it."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_causal_module_sees_what_stands_before(kv_heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4, 17, 8, dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.randn(3, kv_heads, 17, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    made = attention(Attends(True), query, key, value, None)[0].transpose(1, 2)
    doubles = (t.double() for t in (query, key, value))
    reference = scaled_dot_product_attention(*doubles, is_causal=True, enable_gqa=True)
    upstream = torch.randn(made.shape)
    for found, exact in zip(
        (made, *torch.autograd.grad((made * upstream).sum(), (query, key, value))),
        (reference, *torch.autograd.grad((reference * upstream).sum(), (query, key, value))),
        strict=True,
    ):
        torch.testing.assert_close(found.double(), exact.double(), rtol=0.03, atol=0.03)
    ahead, _ = attention(Attends(False), query, key, value, None)
    assert not torch.allclose(ahead.transpose(1, 2)[:, :, 0], made[:, :, 0], atol=0.1)


def inputs_of(rows: str, chosen: list[int]) -> dict[str, torch.Tensor]:
    """Rows that are full, padded, or packed with several documents."""
    ids = torch.from_numpy(tiny.make_rows(4, shortest=5 if rows == "padded" else None, seed=3)).long()[chosen]
    if rows != "packed":
        return {"input_ids": ids}
    size = ids.shape[1]
    starts = torch.stack([torch.arange(size) % length for length in (5, size, 3, 7)])
    return {"input_ids": ids, "position_ids": starts[chosen]}


def hidden(model: Any, rows: str) -> torch.Tensor:
    """At the non-padding positions: [A, H]."""
    inputs = inputs_of(rows, [0, 1, 2, 3])
    real = inputs["input_ids"] != tiny.PAD
    documents = tiny.documents_of(real if rows == "padded" else None)
    return LanguageModel(model)(inputs, documents, OutputSpec(layers=(LAST,))).hidden[LAST][real]


def trained(model: Any) -> list[torch.nn.Parameter]:
    """What the last hidden state depends on."""
    return [p for name, p in model.base_model.named_parameters() if "pooler" not in name]


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        *((family, rows) for family in FAMILIES for rows in ("full", "padded")),
        *((family, "packed") for family in CAUSAL_FAMILIES),
    ],
)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_a_family_computes_what_it_did(family: str, rows: str, precision: str, tolerance: float) -> None:
    student = families.without_dropout(family).train()
    changed = copy.deepcopy(student)
    use_batched_products(changed)
    assert changed.config._attn_implementation == NAME
    assert changed.state_dict().keys() == student.state_dict().keys()
    assert NAME not in changed.config.to_json_string()
    with autocast(precision, torch.device("cpu")):
        made, expected = hidden(changed, rows), hidden(student, rows)
    assert (made - expected).norm() < tolerance * expected.norm()
    upstream = torch.randn(made.shape)
    found, exact = (
        torch.cat([g.flatten() for g in torch.autograd.grad(output, weights, upstream.to(output.dtype))])
        for output, weights in ((made, trained(changed)), (expected, trained(student)))
    )
    assert (found - exact).norm() < tolerance * exact.norm()


def test_long_rows_keep_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(2, 3, 16, 8, dtype=torch.bfloat16)
    short, _ = attention(torch.nn.Module(), query, query, query, None)
    monkeypatch.setattr(batched, "MAX_SCORES", 2 * 3 * 16 * 16 - 1)
    asked = []
    monkeypatch.setattr(batched, "sdpa_attention_forward", lambda *given, **_: asked.append(given) or (short, None))
    attention(torch.nn.Module(), query, query, query, None)
    assert len(asked) == 1


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("rows", ["full", "packed"])
@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_a_row_drops_the_same_whatever_stands_beside_it(family: str, rows: str, plain: bool) -> None:
    """Also in attention, and in every layer something else."""
    student = families.make_family(family, **dict.fromkeys(dropout_names(AutoConfig.for_model(family)), 0.3)).train()
    use_batched_products(student, plain)
    replace_dropout(student)
    assert student.config._attn_implementation == (DROPOUT_ONLY if plain else NAME)

    def of(row_keys: list[int], chosen: list[int]) -> torch.Tensor:
        with keyed_by_sequence(row_keys), torch.no_grad():
            return LanguageModel(student)(inputs_of(rows, chosen), None, OutputSpec(layers=(LAST,))).hidden[LAST]

    together = of([7, 8, 9], [0, 1, 2])
    torch.manual_seed(5)
    torch.testing.assert_close(of([9, 7], [2, 0]), together[[2, 0]])
    assert not torch.allclose(of([9, 8], [2, 0])[1], together[0], atol=1e-2)


def test_other_models_are_left_alone() -> None:
    eager, unknown = (tiny.make_model("bert", 1) for _ in range(2))
    eager.set_attn_implementation("eager")
    unknown.config.model_type = "mine"
    for model, before in ((eager, "eager"), (unknown, "sdpa")):
        use_batched_products(model)
        assert model.config._attn_implementation == before
    use_batched_products(torch.nn.Linear(1, 1))


def test_autocast_holds_for_it() -> None:
    query = torch.randn(2, 3, 16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        made, _ = attention(torch.nn.Module(), query, query, query, None)
        expected = scaled_dot_product_attention(query, query, query)
    assert made.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(made.transpose(1, 2), expected, rtol=0.02, atol=0.02)
