"""The last block at selected positions alone: the same values and gradients as the whole, and when it is not."""

from typing import Any

import pytest
import torch
from tiny import VOCAB, make_model

from distill.models.known_layers import last_block_at
from distill.models.language_model import LAST, LanguageModel, OutputSpec

KNOWN = ["bert", "distilbert", "roberta"]


def inputs(padded: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    torch.manual_seed(3)
    ids = torch.randint(8, VOCAB, (5, 12))
    lengths = torch.tensor([12, 3, 9, 12, 5])
    documents = torch.where(torch.arange(12) < lengths[:, None], 0, -1) if padded else None
    return {"input_ids": ids}, documents


# Not in order; some rows have many, one, or none; nearly all of them; none at all.
POSITIONS = [[37, 3, 24], [0], [3, 4, 11, 24, 30, 37], [59], [*range(24)], [*range(59)], []]


def head_rows(model: Any, padded: bool, positions: list[int], plain: bool, precision: str = "fp32") -> torch.Tensor:
    spec = OutputSpec(True, torch.tensor(positions, dtype=torch.int64))
    found = LanguageModel(model, precision, plain)(*inputs(padded), spec).head_rows
    assert found is not None
    return found


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("positions", POSITIONS, ids=len)
def test_values_and_gradients_are_those_of_the_whole_block(family: str, padded: bool, positions: list[int]) -> None:
    model = make_model(family, 3).double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    found, gradients = [], []
    for plain in (True, False):
        model.zero_grad()
        rows = head_rows(model, padded, positions, plain)
        (rows * torch.arange(1, rows.numel() + 1).view_as(rows).sin()).sum().backward()
        found.append(rows.detach())
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        if gradient is None or other is None:  # of what has no part in the outcome: none, or zeros
            assert not any(torch.count_nonzero(each) for each in (gradient, other) if each is not None), name
            continue
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", KNOWN)
@torch.no_grad()
def test_in_bf16_it_stays_within_rounding(family: str) -> None:
    model = make_model(family, 3)
    found = [head_rows(model, True, POSITIONS[2], plain, "bf16").float() for plain in (True, False)]
    torch.testing.assert_close(found[0], found[1], rtol=0.03, atol=0.03)


@pytest.mark.parametrize("family", KNOWN)
@torch.no_grad()
def test_the_last_block_computes_fewer_rows(family: str) -> None:
    """Its feed-forward part sees the fullest row's number of positions, and not the whole length."""
    model, seen = make_model(family, 2), []
    linear = [m for n, m in model.base_model.named_modules() if n.endswith(("intermediate.dense", "ffn.lin1"))][-1]
    linear.register_forward_hook(lambda module, arguments, output: seen.append(arguments[0].shape[-2]))
    for plain in (True, False):
        head_rows(model, False, POSITIONS[2], plain)
    assert seen == [12, 3]


@torch.no_grad()
def test_where_it_would_be_wrong_the_whole_block_is_computed() -> None:
    spec = torch.tensor([1, 5])
    bert = make_model("bert", 2)
    dropping = make_model("bert", 2).train()
    for module in dropping.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    for model in (make_model("modernbert", 2), make_model("albert", 2), dropping):
        with last_block_at(model, spec) as reduced:
            assert not reduced
    bert.base_model.forward = bert.base_model.forward  # as a compiled encoder has one
    with last_block_at(bert, spec) as reduced:
        assert not reduced
    del bert.base_model.forward
    with last_block_at(bert, spec) as reduced:
        assert reduced
    with last_block_at(bert, None) as reduced:
        assert not reduced
    assert "forward" not in vars(bert.bert.encoder.layer[-1])


@torch.no_grad()
def test_who_reads_the_last_hidden_states_gets_all_of_them() -> None:
    model = make_model("bert", 2)
    ids, documents = inputs(True)
    reader, positions = LanguageModel(model), torch.tensor([1, 5])
    whole = reader(ids, documents, OutputSpec(False, None, (LAST,))).hidden[LAST]
    for layers in ((LAST,), (2,)):
        found = reader(ids, documents, OutputSpec(True, positions, layers))
        torch.testing.assert_close(found.hidden[layers[0]], whole)
    pooled = reader(ids, documents, OutputSpec(True, positions, pooled=("mean",))).pooled["mean"]
    torch.testing.assert_close(pooled, reader(ids, documents, OutputSpec(pooled=("mean",))).pooled["mean"])
    inner = reader(ids, documents, OutputSpec(True, positions, (1,)))
    assert inner.hidden[1].shape == whole.shape
