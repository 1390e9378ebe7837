"""Attention as batched products is torch's SDPA in value and gradient; what dropout drops belongs to the sequence."""

import copy
from typing import Any

import families
import pytest
import tiny
import torch
from torch import Tensor
from transformers import AutoConfig

from distill.models.kernels import CAUSAL_FAMILIES, FAMILIES
from distill.models.kernels import attention as batched
from distill.models.kernels.attention import DROPOUT_ONLY, NAME, attention, use_batched_products
from distill.models.kernels.dropout import Dropout, factors, keyed_by_sequence, replace_dropout
from distill.models.kernels.masks import use_known_masks
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.precision import autocast
from distill.models.student import dropout_names


def test_long_sequences_keep_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(2, 3, 16, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(batched, "MAX_SCORES", 2 * 3 * 16 * 16 - 1)
    monkeypatch.setattr(batched, "products", None)  # is not called
    attention(torch.nn.Module(), query, query, query, None)


def inputs_of(rows: str, chosen: list[int]) -> dict[str, Tensor]:
    """Rows that are full, padded, or packed with several documents."""
    ids = torch.from_numpy(tiny.make_rows(4, shortest=5 if rows == "padded" else None, seed=3)).long()[chosen]
    if rows != "packed":
        return {"input_ids": ids}
    size = ids.shape[1]
    starts = torch.stack([torch.arange(size) % length for length in (5, size, 3, 7)])
    return {"input_ids": ids, "position_ids": starts[chosen]}


def hidden(model: Any, rows: str, chosen: list[int]) -> Tensor:
    """At the non-padding positions: [A, H]."""
    inputs = inputs_of(rows, chosen)
    real = inputs["input_ids"] != tiny.PAD
    documents = tiny.documents_of(real if rows == "padded" else None)
    return LanguageModel(model)(inputs, documents, OutputSpec(layers=(LAST,))).hidden[LAST][real]


def trained(model: Any) -> list[torch.nn.Parameter]:
    """What the last hidden state depends on."""
    return [p for name, p in model.base_model.named_parameters() if "pooler" not in name]


LAYOUTS = [(family, rows) for family in FAMILIES for rows in ("full", "padded")]
LAYOUTS += [(family, "packed") for family in CAUSAL_FAMILIES]


@pytest.mark.parametrize(("family", "rows"), LAYOUTS)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_a_family_computes_what_it_did(family: str, rows: str, precision: str, tolerance: float) -> None:
    student = families.without_dropout(family).train()
    changed = copy.deepcopy(student)
    use_batched_products(changed)
    assert changed.config._attn_implementation == NAME and NAME not in changed.config.to_json_string()
    assert changed.state_dict().keys() == student.state_dict().keys()
    with autocast(precision, torch.device("cpu")):
        made, expected = (hidden(model, rows, [0, 1, 2, 3]) for model in (changed, student))
    assert (made - expected).norm() < tolerance * expected.norm()
    upstream = torch.randn(made.shape)
    found, exact = (
        torch.cat([g.flatten() for g in torch.autograd.grad(output, weights, upstream.to(output.dtype))])
        for output, weights in ((made, trained(changed)), (expected, trained(student)))
    )
    assert (found - exact).norm() < tolerance * exact.norm()


def test_other_models_are_left_alone() -> None:
    eager, unknown = (tiny.make_model("bert", 1) for _ in range(2))
    eager.set_attn_implementation("eager")
    unknown.config.model_type = "mine"
    for model, before in ((eager, "eager"), (unknown, "sdpa")):
        use_batched_products(model)
        assert model.config._attn_implementation == before
    for module in (torch.nn.Linear(1, 1), eager):  # a user's module has no configuration
        use_batched_products(module)
        use_known_masks(module)
    assert eager.config._attn_implementation == "eager"


# --- dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_values_are_dropped_at_random_and_keep_their_mean(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    found = factors(torch.empty(999, 1001, dtype=dtype), p)
    assert found.dtype == dtype and found.unique().numel() == 2
    kept = (found > 0).float()
    assert kept.mean().item() == pytest.approx(1 - p, abs=4 * (p * (1 - p) / kept.numel()) ** 0.5)
    assert found.max().item() == pytest.approx(1 / (1 - p), rel=5e-3 if dtype == torch.bfloat16 else 2e-4)
    # Four neighbours share a number: neither they nor those of the next row may know of each other.
    flat = kept.flatten() - kept.mean()
    for distance in (1, 2, 3, 4, 1001):
        assert abs((flat[distance:] * flat[:-distance]).mean().item()) < 5 * p * (1 - p) / flat.numel() ** 0.5


def test_weights_of_attention_are_dropped() -> None:
    torch.manual_seed(0)
    zeros, ones = torch.zeros(2, 3, 64, 8), torch.ones(2, 3, 64, 8)  # all weights alike: 1/64
    kept = attention(torch.nn.Module(), zeros, zeros, ones, None, dropout=0.25)[0][..., 0] * 64 * 0.75
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-3)  # of 64 values, each with probability 3/4
    assert kept.mean().item() == pytest.approx(48, abs=4 * 3.5 / kept.numel() ** 0.5)
    assert 2.5 < kept.std().item() < 4.5  # sqrt(64 * 3/16) = 3.46


def by_sequence(keys: list[int], calls: int = 2, shape: tuple[int, ...] = (5, 7)) -> list[Tensor]:
    """What several dropouts of one forward multiply the sequences of these keys by, [sequences, calls, ...]."""
    with keyed_by_sequence(keys):
        return list(torch.stack([factors(torch.empty(len(keys), *shape), 0.3) for _ in range(calls)], 1))


def test_a_key_drops_the_same_whatever_stands_beside_it_and_no_two_alike() -> None:
    together = dict(zip([11, 5, 2**63 + 9], by_sequence([11, 5, 2**63 + 9]), strict=True))
    torch.manual_seed(123)  # torch's own stream has no part in it
    for key, expected in together.items():
        assert torch.equal(by_sequence([key])[0], expected)
    drawn = by_sequence(list(range(100, 164)), calls=4, shape=(64, 16))
    kept = (torch.stack(drawn).flatten(2) > 0).double()  # [64 sequences, 4 calls, 1024 values]
    streams = kept.flatten(0, 1) - kept.mean()
    likeness = (streams @ streams.T / (0.3 * 0.7 * 1024)).fill_diagonal_(0)
    assert float(likeness.abs().max()) < 6 / 1024**0.5, "as unlike as independent draws"


@pytest.mark.parametrize("keys", [[], [1, 2, 3]])
def test_without_keys_and_for_other_shapes_torchs_stream_is_used(keys: list[int]) -> None:
    torch.manual_seed(7)
    with keyed_by_sequence(keys):
        first = factors(torch.empty(2, 40), 0.5)
    torch.manual_seed(7)
    assert torch.equal(factors(torch.empty(2, 40), 0.5), first)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("family", "rows"), [each for each in LAYOUTS if each[1] != "padded"])
def test_a_sequence_drops_the_same_whatever_stands_beside_it(family: str, rows: str, plain: bool) -> None:
    """Also in attention, and in every layer something else; in evaluation nothing is dropped."""
    student = families.make_family(family, **dict.fromkeys(dropout_names(AutoConfig.for_model(family)), 0.3)).train()
    names = list(student.state_dict())
    use_batched_products(student, plain)
    replace_dropout(student)
    assert student.config._attn_implementation == (DROPOUT_ONLY if plain else NAME)
    kinds = {type(module) for module in student.modules()}
    assert list(student.state_dict()) == names and torch.nn.Dropout not in kinds
    assert Dropout in kinds or family in CAUSAL_FAMILIES[1:]  # those drop in attention alone

    def of(keys: list[int], chosen: list[int]) -> Tensor:
        with keyed_by_sequence(keys), torch.no_grad():
            return hidden(student, rows, chosen).unflatten(0, (len(chosen), -1))

    together = of([7, 8, 9], [0, 1, 2])
    torch.manual_seed(5)
    torch.testing.assert_close(of([9, 7], [2, 0]), together[[2, 0]])
    assert not torch.allclose(of([9, 8], [2, 0])[1], together[0], atol=1e-2)
    student.eval()
    assert torch.equal(of([7], [0]), of([8], [0]))
