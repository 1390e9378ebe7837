"""What is read from a model's forward: its own hidden states and head, or the model is refused."""

from copy import deepcopy
from typing import Any

import pytest
import tiny
import torch
from tiny import LENGTH, PAD, VOCAB, documents_of, make_model, make_rows
from torch import Tensor, nn

from distill.models.check import check_model
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.runtime.errors import SettingError

FAMILIES = ("bert", "distilbert", "roberta", "modernbert", "albert")


def inputs(count: int, padded: bool) -> tuple[dict[str, Tensor], Tensor | None]:
    """Token ids, and the attention mask of padded rows."""
    ids = torch.from_numpy(make_rows(count, shortest=4 if padded else None).astype("int64"))
    return {"input_ids": ids}, ids != PAD if padded else None


def logits_of(model: Any, ids: dict[str, Tensor], attention: Tensor | None, positions: Tensor | None) -> Tensor:
    reader = LanguageModel(model)
    rows = reader(ids, documents_of(attention), OutputSpec(True, positions)).head_rows
    return reader.logits(rows, VOCAB)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_it_gives_the_models_own_logits_and_hidden_states(family: str, padded: bool) -> None:
    model = make_model(family)
    ids, attention = inputs(5, padded)
    own = model(**ids, attention_mask=attention, output_hidden_states=True)
    valid = torch.arange(ids["input_ids"].numel()) if attention is None else attention.flatten().nonzero()[:, 0]
    torch.testing.assert_close(logits_of(model, ids, attention, valid), own.logits.flatten(0, 1)[valid])
    some = valid[::3]
    torch.testing.assert_close(logits_of(model, ids, attention, some), own.logits.flatten(0, 1)[some])
    everywhere = logits_of(model, ids, attention, None)
    torch.testing.assert_close(everywhere[valid], own.logits.flatten(0, 1)[valid])
    layers = (0, 1, 2, 3, LAST)
    for head in (True, False):
        found = LanguageModel(model)(ids, documents_of(attention), OutputSpec(head, some, layers))
        assert (found.head_rows is not None) == head and tuple(found.hidden) == layers
        for layer in (0, 1, 2, 3):
            torch.testing.assert_close(found.hidden[layer], own.hidden_states[layer], rtol=0, atol=0)
        last = model.base_model(**ids, attention_mask=attention).last_hidden_state
        assert found.hidden[LAST].shape == (5, LENGTH, tiny.WIDTH)
        torch.testing.assert_close(found.hidden[LAST], last, rtol=0, atol=0)
    assert float(everywhere.std()) > 0.1, "the check would not see a missing piece"
    check_model(model, "student")
    assert model.training is False


def test_it_leaves_no_trace_in_the_model() -> None:
    """A copy that is made between two forwards answers for itself, and the model is as it was."""
    model = make_model("bert", 2)
    ids, _ = inputs(2, padded=False)
    spec = OutputSpec(True, None, (1, LAST))
    LanguageModel(model)(ids, None, spec)
    hooks = [*model.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in hooks)
    copied = deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert float(LanguageModel(copied)(ids, None, spec).hidden[1].detach().abs().max()) == 0
    assert float(LanguageModel(model)(ids, None, spec).hidden[1].detach().abs().max()) > 0


@pytest.mark.parametrize("head", [True, False])
def test_a_forward_is_called_as_one(head: bool) -> None:
    """What wraps a model in shards or counts its work does so around the forwards of its modules."""
    model = make_model("bert", 2)
    ids, _ = inputs(2, padded=False)
    called: list[str] = []
    parts = {"model": model, "encoder": model.base_model} | {
        f"block {n}": b for n, b in enumerate(model.bert.encoder.layer)
    }
    parts |= {"output embedding": model.get_output_embeddings()}
    for name, module in parts.items():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    LanguageModel(model)(ids, None, OutputSpec(head, None, (1, LAST)))
    inner = ["block 0", "block 1", "encoder"]
    assert called == ([*inner, "output embedding", "model"] if head else inner)


def test_the_number_of_the_last_layer_is_its_depth() -> None:
    model = make_model("albert", 3)  # one block that is called three times
    ids, _ = inputs(2, padded=False)
    found = LanguageModel(model)(ids, None, OutputSpec(False, None, (2, 3, LAST)))
    assert torch.equal(found.hidden[3], found.hidden[LAST]) and not torch.equal(found.hidden[2], found.hidden[3])


def refusal(model: Any) -> str:
    with pytest.raises(SettingError) as error:
        check_model(model, "student.path=x")
    text = str(error.value)
    assert "\n" not in text and "student.path=x" in text and type(model).__name__ in text
    return text


def test_a_model_whose_logits_are_not_those_of_its_output_embedding_is_refused() -> None:
    """As with soft-capping: what is trained would be another function than the model computes."""
    model = make_model("bert", 1)
    forward = model.forward

    def capped(**arguments: Any) -> Any:
        out = forward(**arguments)
        out.logits = 0.1 * (out.logits / 0.1).tanh()
        return out

    model.forward = capped
    assert "Distill does not support" in refusal(model)


def test_a_model_whose_inner_layers_are_read_wrong_is_refused() -> None:
    model = make_model("bert", 2)
    forward = model.forward

    def other_layers(**arguments: Any) -> Any:
        out = forward(**arguments)
        if out.hidden_states is not None:
            out.hidden_states = tuple(2 * states for states in out.hidden_states)
        return out

    model.forward = other_layers
    assert "Distill does not support" in refusal(model)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.embedding(input_ids)


class Plain(nn.Module):
    """The least that a model of one's own has to offer; no transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model, self.output = Encoder(), nn.Linear(8, VOCAB)

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.output(self.base_model(input_ids, attention_mask).tanh())


def test_a_module_of_ones_own_will_do() -> None:
    model = Plain()
    check_model(model, "student")
    ids, _ = inputs(2, padded=False)
    positions = torch.tensor([1, 5, 20])
    own = model(**ids).flatten(0, 1)[positions]
    torch.testing.assert_close(logits_of(model, ids, None, positions), own)


class Adapter(nn.Linear):
    """A layer as PEFT wraps it: its weight is that of the layer inside, which its forward adds to."""

    def get_base_layer(self) -> nn.Module:
        return self


def test_an_adapter_on_the_output_embedding_is_refused() -> None:
    """Losses on logits read the weight alone."""
    model = Plain()
    model.output = Adapter(8, VOCAB)
    assert "the output embedding of Plain has an adapter" in refusal(model)
