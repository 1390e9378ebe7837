"""Heads beside that over the vocabulary: their logits are the model's own, whatever else is read beside them."""

from typing import Any

import pytest
import torch
from tiny import PAD, VOCAB, documents_of, make_rows
from transformers import AlbertForPreTraining, AutoConfig, AutoModelForPreTraining

from distill.models.check import check_model
from distill.models.kind import MASKED, ORDERED
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.load import load_pretrained
from distill.runtime.errors import SettingError

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def make_ordered(family: str, seed: int = 0, **fields: Any) -> Any:
    """A model with a head for the order of segments, in evaluation mode."""
    torch.manual_seed(seed)
    known = {"vocab_size": VOCAB, "pad_token_id": PAD, "max_position_embeddings": 32, "embedding_size": 16}
    model = AutoModelForPreTraining.from_config(AutoConfig.for_model(family, **{**SIZES, **known, **fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def inputs() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    ids = torch.from_numpy(make_rows(6, shortest=5).astype("int64"))
    return {"input_ids": ids, "token_type_ids": (torch.arange(ids.shape[1]) > 4).long().expand_as(ids)}, ids != PAD


@pytest.mark.parametrize("family", ["albert", "bert"])
@pytest.mark.parametrize("head", [False, True])
def test_its_logits_are_the_models_own(family: str, head: bool) -> None:
    model = make_ordered(family)
    batch, attention = inputs()
    own = model(**batch, attention_mask=attention.long())
    order = own.sop_logits if family == "albert" else own.seq_relationship_logits
    positions = attention.flatten().nonzero()[::3, 0]
    spec = OutputSpec(head, positions, (LAST,), extra=("sop",))
    reader = LanguageModel(model)
    found = reader(batch, documents_of(attention), spec)
    torch.testing.assert_close(found.extra["sop"], order)
    assert (found.head_rows is not None) == head
    if head:
        logits = reader.logits(found.head_rows, VOCAB)
        torch.testing.assert_close(logits, own.prediction_logits.flatten(0, 1)[positions])
    assert float(order.detach().std()) > 0.01, "the check would not see a missing piece"
    check_model(model, "student", ORDERED)


def test_its_gradients_are_the_models_own() -> None:
    model = make_ordered("albert")
    batch, attention = inputs()
    model(**batch, attention_mask=attention.long()).sop_logits.square().sum().backward()
    own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    spec = OutputSpec(extra=("sop",))
    LanguageModel(model)(batch, documents_of(attention), spec).extra["sop"].square().sum().backward()
    for name, parameter in model.named_parameters():
        if name in own:
            torch.testing.assert_close(parameter.grad, own[name], rtol=1e-4, atol=1e-6)
    assert own["sop_classifier.classifier.weight"].abs().sum() > 0


def test_a_model_without_such_a_head_is_refused(tmp_path: Any, teacher: Any) -> None:
    batch, attention = inputs()
    with pytest.raises(ValueError, match="BertForMaskedLM has no head sop"):
        LanguageModel(teacher)(batch, documents_of(attention), OutputSpec(extra=("sop",)))
    teacher.save_pretrained(tmp_path)
    with pytest.raises(
        SettingError, match=r"lacks weights of a masked language model with a head for the order of segments"
    ):
        load_pretrained("teacher.path", str(tmp_path), ORDERED)


def test_a_saved_one_is_a_masked_model_too(tmp_path: Any) -> None:
    model = make_ordered("albert")
    model.save_pretrained(tmp_path)
    masked = load_pretrained("teacher.path", str(tmp_path), MASKED)
    batch, _ = inputs()
    torch.testing.assert_close(masked(**batch).logits, model(**batch).prediction_logits)
    again = load_pretrained("teacher.path", str(tmp_path), ORDERED)
    assert isinstance(again, AlbertForPreTraining)
    torch.testing.assert_close(again(**batch).sop_logits, model(**batch).sop_logits)
