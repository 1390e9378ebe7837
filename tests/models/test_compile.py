"""What torch.compile makes of blocks: graphs without a break, shared by like blocks and by all micro-batches."""

from functools import partial

import pytest
import torch
from families import CAUSAL, FAMILIES, without_dropout
from torch._dynamo.utils import counters

from distill.models.kernels.attention import use_batched_products
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.runs import setup

QUICK = ("bert", "qwen2")


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_blocks_share_a_graph_in_all_micro_batches(
    family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 a CPU attends by batched products."""
    torch._dynamo.reset()
    counters.clear()
    model = without_dropout(family).train()
    use_batched_products(model)
    # A break, or a question for a value, raises.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    setup.compile_blocks(model)
    ids = torch.randint(5, 40, (3, 12))
    for number in (7, 9, 11):  # of positions that are read, of tokens that are no padding, of a document's tokens
        inputs, documents = {"input_ids": ids}, torch.zeros(3, 12, dtype=torch.long)
        documents[0, number:] = -1
        if family in CAUSAL:
            inputs["position_ids"], documents = torch.arange(12).remainder(number).repeat(3, 1), None
        spec = OutputSpec(head=True, positions=torch.arange(number), layers=(1, LAST))
        rows = LanguageModel(model, precision)(inputs, documents, spec).head_rows
        assert rows is not None
        rows.sum().backward()
    kinds = 2 if family in ("modernbert", "cohere2") else 1  # some blocks attend to all tokens, others to near ones
    assert counters["stats"]["unique_graphs"] == kinds
