"""What torch.compile makes of an encoder: one graph, without a break, and the same one for every micro-batch."""

import pytest
import torch
from families import CAUSAL, FAMILIES, without_dropout
from torch._dynamo.utils import counters

from distill.models.language_model import LAST, LanguageModel, OutputSpec

QUICK = ("bert", "qwen2")


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_an_encoder_is_one_graph_for_all_micro_batches(family: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = without_dropout(family).train()
    # A break, or a question for a value, raises.
    model.base_model.forward = torch.compile(model.base_model.forward, backend="eager", fullgraph=True)
    ids = torch.randint(5, 40, (3, 12))
    for number in (7, 9, 11):  # of positions that are read, of tokens that are no padding, of a document's tokens
        inputs, documents = {"input_ids": ids}, torch.zeros(3, 12, dtype=torch.long)
        documents[0, number:] = -1
        if family in CAUSAL:
            inputs["position_ids"], documents = torch.arange(12).remainder(number).repeat(3, 1), None
        spec = OutputSpec(head=True, positions=torch.arange(number), layers=(1, LAST))
        rows = LanguageModel(model)(inputs, documents, spec).head_rows
        assert rows is not None
        rows.sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
