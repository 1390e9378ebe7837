"""Queries, keys and values are those that attention uses: they give the model's own probabilities and contexts."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from families import make
from tiny import PAD, VOCAB, documents_of, make_rows
from torch import Tensor, nn

from distill.models.blocks import block_list
from distill.models.kernels.attention import use_batched_products
from distill.models.language_model import LAST, LanguageModel, OutputSpec, attention_shapes, hidden_widths, pooled_width
from distill.models.pooling import CLS as FIRST
from distill.models.pooling import MEAN
from distill.models.recorded_attention import QKV

# What takes the context of all heads, side by side, in a block of each family.
OUTPUT = {
    "bert": "attention.output.dense",
    "roberta": "attention.output.dense",
    "electra": "attention.output.dense",
    "albert": "albert_layers.0.attention.dense",
    "modernbert": "attn.Wo",
    "distilbert": "attention.out_lin",
    "gpt2": "attn.c_proj",
    "llama": "self_attn.o_proj",
}


def rows(padded: bool) -> tuple[Tensor, Tensor | None]:
    ids = torch.from_numpy(make_rows(3, shortest=5 if padded else None).astype("int64"))
    return ids, ids != PAD if padded else None


def eager(model: Any, family: str, ids: Tensor, attention: Tensor | None) -> tuple[Any, list[Tensor]]:
    """The model's own attention probabilities [B, heads, S, S] by block, and what leaves its heads [B, S, H]."""
    other = deepcopy(model)
    other.set_attn_implementation("eager")
    contexts: list[Tensor] = []
    handles = [
        block.get_submodule(OUTPUT[family]).register_forward_pre_hook(lambda _, given: contexts.append(given[0]))
        for block in block_list(other.base_model, 3)
    ]
    found = other(input_ids=ids, attention_mask=attention, output_attentions=True)
    for handle in handles:
        handle.remove()
    return found.attentions, contexts


def probabilities(qkv: QKV) -> Tensor:
    """Of attention by its definition, one query at a time."""
    groups = qkv.query.shape[1] // qkv.key.shape[1]
    result = torch.zeros(*qkv.query.shape[:3], qkv.key.shape[2])
    for row, head, query in torch.cartesian_prod(*map(torch.arange, qkv.query.shape[:3])).tolist():
        scores = qkv.scaling * qkv.key[row, head // groups] @ qkv.query[row, head, query]
        if qkv.mask is not None:
            seen = qkv.mask.expand(result.shape)[row, head, query]
            scores = scores.masked_fill(~seen, -torch.inf)
        result[row, head, query] = scores.softmax(0)
    return result


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "batched_products"])
@pytest.mark.parametrize("family", OUTPUT)
@torch.no_grad()
def test_they_are_what_attention_uses(family: str, implementation: str, padded: bool) -> None:
    model = make(family)
    ids, attention = rows(padded)
    attentions, contexts = eager(model, family, ids, attention)
    if implementation == "batched_products":
        use_batched_products(model)
    else:
        model.set_attn_implementation(implementation)
    in_force = model.config._attn_implementation
    found = LanguageModel(model)({"input_ids": ids}, documents_of(attention), OutputSpec(layers=(1,), qkv=(1, 2, 3)))
    assert tuple(found.qkv) == (1, 2, 3) and model.config._attn_implementation == in_force
    valid = torch.ones_like(ids, dtype=torch.bool) if attention is None else attention
    for block, qkv in found.qkv.items():
        own = probabilities(qkv)
        torch.testing.assert_close(own.transpose(1, 2)[valid], attentions[block - 1].transpose(1, 2)[valid])
        value = qkv.repeated().value
        context = (own @ value).transpose(1, 2).flatten(2)
        torch.testing.assert_close(context[valid], contexts[block - 1].flatten(2)[valid])
    heads = (2, 4) if family == "llama" else (4, 4)
    assert (found.qkv[1].key.shape[1], found.qkv[1].query.shape[1]) == heads
    plain = LanguageModel(model)({"input_ids": ids}, documents_of(attention), OutputSpec(layers=(1,)))
    assert torch.equal(plain.hidden[1], found.hidden[1]) and plain.qkv == {}


def test_sizes_are_measured() -> None:
    llama, albert = make("llama").train(), make("albert")
    assert attention_shapes(llama, (1, 3)) == [(4, (48, 48, 48))] * 2 and llama.training
    assert hidden_widths(llama, (0, 2, LAST)) == [32, 32, 32]
    assert hidden_widths(albert, (0, 1)) == [32, 32] and pooled_width(albert, MEAN) == 32


def test_gradients_reach_the_projections() -> None:
    model = make("bert")
    ids, attention = rows(padded=True)
    qkv = LanguageModel(model)({"input_ids": ids}, documents_of(attention), OutputSpec(qkv=(2,))).qkv[2]
    attended = model.bert.encoder.layer[1].attention.self
    for each, layer in ((qkv.query, attended.query), (qkv.key, attended.key), (qkv.value, attended.value)):
        model.zero_grad()
        each.square().sum().backward(retain_graph=True)
        assert layer.weight.grad is not None and float(layer.weight.grad.abs().max()) > 0
        assert model.bert.encoder.layer[2].attention.self.query.weight.grad is None


class Block(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.tanh()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCAB, 8), nn.ModuleList([Block()])

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.blocks[0](self.embedding(input_ids))


class Plain(nn.Module):
    """A model of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = Encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.base_model(input_ids, attention_mask)


@pytest.mark.parametrize("model", [Plain(), make("deberta-v2"), make("mpnet")], ids=lambda model: type(model).__name__)
def test_attention_of_a_models_own_is_refused_by_name(model: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(model).__name__} does not show .*choose another") as error:
        LanguageModel(model)({"input_ids": torch.arange(8)[None]}, None, OutputSpec(qkv=(1,)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["bert", "modernbert", "llama"])
@pytest.mark.parametrize("padded", [False, True])
def test_pooled_vectors_leave_padding_out(family: str, padded: bool) -> None:
    model, (ids, attention) = make(family), rows(padded)
    spec = OutputSpec(True, torch.tensor([0, 4]), (LAST,), (), (FIRST, MEAN))
    found = LanguageModel(model)({"input_ids": ids}, documents_of(attention), spec)
    last = found.hidden[LAST]
    assert found.head_rows is not None and found.head_rows.shape[0] == 2
    for row, length in enumerate([ids.shape[1]] * 3 if attention is None else attention.sum(1).tolist()):
        torch.testing.assert_close(found.pooled[MEAN][row], sum(last[row, :length].unbind()) / length)
        assert torch.equal(found.pooled[FIRST][row], last[row, 0])
    assert LAST not in LanguageModel(model)({"input_ids": ids}, None, OutputSpec(pooled=(MEAN,))).hidden
