"""What is read from a model's forward is its own: hidden states, logits of all heads, attention; or it is refused."""

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make
from tiny import LENGTH, PAD, VOCAB, WIDTH, documents_of, make_model, make_rows
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import AutoConfig, AutoModelForPreTraining
from transformers.utils import logging as transformers_logging

from distill.distributed.shard import device_of
from distill.models import check, language_model
from distill.models.blocks import block_list
from distill.models.check import check_model
from distill.models.kernels.attention import use_batched_products
from distill.models.kind import CAUSAL, MASKED, ORDERED
from distill.models.language_model import LAST, LanguageModel, OutputSpec, attention_shapes, hidden_widths, pooled_width
from distill.models.load import load_pretrained
from distill.models.pooling import CLS as FIRST
from distill.models.pooling import MEAN
from distill.models.recorded_attention import QKV
from distill.runtime.errors import SettingError


def inputs(count: int, padded: bool) -> tuple[dict[str, Tensor], Tensor | None]:
    """Token ids, and the attention mask of padded rows."""
    ids = torch.from_numpy(make_rows(count, shortest=4 if padded else None).astype("int64"))
    return {"input_ids": ids}, ids != PAD if padded else None


def logits_of(model: Any, ids: dict[str, Tensor], attention: Tensor | None, positions: Tensor | None) -> Tensor:
    reader = LanguageModel(model)
    rows = reader(ids, documents_of(attention), OutputSpec(True, positions)).head_rows
    return reader.logits(rows, VOCAB)


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert", "albert"])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_it_gives_the_models_own_logits_and_hidden_states(family: str, padded: bool) -> None:
    model = make_model(family)
    ids, attention = inputs(5, padded)
    own = model(**ids, attention_mask=attention, output_hidden_states=True)
    valid = torch.arange(ids["input_ids"].numel()) if attention is None else attention.flatten().nonzero()[:, 0]
    some, logits = valid[::3], own.logits.flatten(0, 1)
    for positions in (valid, some):
        torch.testing.assert_close(logits_of(model, ids, attention, positions), logits[positions])
    torch.testing.assert_close(logits_of(model, ids, attention, None)[valid], logits[valid])
    assert float(logits.std()) > 0.1, "the check would not see a missing piece"
    layers = (0, 1, 2, 3, LAST)
    last = model.base_model(**ids, attention_mask=attention).last_hidden_state
    assert last.shape == (5, LENGTH, WIDTH)
    for head in (True, False):
        found = LanguageModel(model)(ids, documents_of(attention), OutputSpec(head, some, layers))
        assert (found.head_rows is not None) == head and tuple(found.hidden) == layers
        for layer, states in zip(layers, (*own.hidden_states[:4], last), strict=True):
            assert torch.equal(found.hidden[layer], states)
    check_model(model, "student")
    assert model.training is False


def test_a_check_of_a_model_that_pads_with_its_first_token_brings_no_advice_on_masks(caplog: Any) -> None:
    """Of transformers, which gives each advice once to a process."""
    source = logging.getLogger("transformers.modeling_utils")
    source.addHandler(caplog.handler)
    try:
        model = make("gpt2", pad_token_id=0)
        transformers_logging.warning_once.cache_clear()
        check_model(model, "student", CAUSAL)
        assert "attention_mask" not in caplog.text
        transformers_logging.warning_once.cache_clear()
        model(torch.zeros(1, 2, dtype=torch.long))
        assert "passing in an `attention_mask`" in caplog.text, "it would be seen"
    finally:
        source.removeHandler(caplog.handler)


def test_the_number_of_the_last_layer_is_its_depth() -> None:
    model = make_model("albert", 3)  # one block that is called three times
    found = LanguageModel(model)(inputs(2, padded=False)[0], None, OutputSpec(False, None, (2, 3, LAST)))
    assert torch.equal(found.hidden[3], found.hidden[LAST]) and not torch.equal(found.hidden[2], found.hidden[3])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()), "no trace is left"


# --- models of one's own, and those that would be read wrong


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCAB, 8), nn.ModuleList([nn.Tanh()])

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.blocks[0](self.embedding(input_ids))


class Plain(nn.Module):
    """The least that a model of one's own has to offer; no transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model, self.output = Encoder(), nn.Linear(8, VOCAB)

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.output(self.base_model(input_ids, attention_mask).tanh())


class Adapter(nn.Linear):
    """A layer as PEFT wraps it: its weight is that of the layer inside, which its forward adds to."""

    def get_base_layer(self) -> nn.Module:
        return self


def test_a_module_of_ones_own_will_do_unless_its_head_has_an_adapter() -> None:
    model, positions = Plain(), torch.tensor([1, 5, 20])
    check_model(model, "student")
    ids, _ = inputs(2, padded=False)
    torch.testing.assert_close(logits_of(model, ids, None, positions), model(**ids).flatten(0, 1)[positions])
    model.output = Adapter(8, VOCAB)  # losses on logits read the weight alone
    with pytest.raises(SettingError, match="student: the output embedding of Plain has an adapter"):
        check_model(model, "student")


@pytest.mark.parametrize("part", ["logits", "hidden states"])
def test_a_model_whose_forward_adds_what_is_not_read_is_refused(part: str) -> None:
    """As with soft-capping: what is trained would be another function than the model computes."""
    model = make_model("bert", 2)
    forward = model.forward

    def other(**arguments: Any) -> Any:
        out = forward(**arguments)
        if part == "logits":
            out.logits = 0.1 * (out.logits / 0.1).tanh()
        elif out.hidden_states is not None:
            out.hidden_states = tuple(2 * states for states in out.hidden_states)
        return out

    model.forward = other
    with pytest.raises(SettingError, match=r"^student\.path=x: BertForMaskedLM .* Distill does not support"):
        check_model(model, "student.path=x")


# --- the head for the order of segments


def make_ordered(family: str) -> Any:
    """A model with a head for the order of segments, in evaluation mode."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    known = {"vocab_size": VOCAB, "pad_token_id": PAD, "max_position_embeddings": 32, "embedding_size": 16}
    model = AutoModelForPreTraining.from_config(AutoConfig.for_model(family, **sizes, **known))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def segments() -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.from_numpy(make_rows(6, shortest=5).astype("int64"))
    return {"input_ids": ids, "token_type_ids": (torch.arange(ids.shape[1]) > 4).long().expand_as(ids)}, ids != PAD


@pytest.mark.parametrize("family", ["albert", "bert"])
@pytest.mark.parametrize("head", [False, True])
def test_logits_of_another_head_and_their_gradients_are_the_models_own(family: str, head: bool) -> None:
    model = make_ordered(family)
    batch, attention = segments()
    own = model(**batch, attention_mask=attention.long())
    order = own.sop_logits if family == "albert" else own.seq_relationship_logits
    positions = attention.flatten().nonzero()[::3, 0]
    reader = LanguageModel(model)
    found = reader(batch, documents_of(attention), OutputSpec(head, positions, (LAST,), extra=("sop",)))
    torch.testing.assert_close(found.extra["sop"], order)
    assert (found.head_rows is not None) == head and float(order.detach().std()) > 0.01
    if head:
        logits = reader.logits(found.head_rows, VOCAB)
        torch.testing.assert_close(logits, own.prediction_logits.flatten(0, 1)[positions])
    weights = [weight for name, weight in model.named_parameters() if "predictions" not in name]
    gradients = [torch.autograd.grad(each.square().sum(), weights) for each in (found.extra["sop"], order)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    check_model(model, "student", ORDERED)


def test_a_model_with_two_heads_is_loaded_as_either_kind_and_one_without_is_refused(
    tmp_path: Path, teacher: Any
) -> None:
    model, (batch, attention) = make_ordered("albert"), segments()
    model.save_pretrained(tmp_path / "two")
    masked, again = (load_pretrained("teacher.path", str(tmp_path / "two"), kind) for kind in (MASKED, ORDERED))
    torch.testing.assert_close(masked(**batch).logits, model(**batch).prediction_logits)
    torch.testing.assert_close(again(**batch).sop_logits, model(**batch).sop_logits)
    with pytest.raises(ValueError, match="BertForMaskedLM has no head sop"):
        LanguageModel(teacher)(batch, documents_of(attention), OutputSpec(extra=("sop",)))
    teacher.save_pretrained(tmp_path / "one")
    with pytest.raises(SettingError, match=r"lacks weights of a .* head for the order of segments"):
        load_pretrained("teacher.path", str(tmp_path / "one"), ORDERED)


# --- queries, keys and values; vectors of sequences

OUTPUT = {  # what takes the context of all heads, side by side, in a block of each family
    "bert": "attention.output.dense",
    "roberta": "attention.output.dense",
    "electra": "attention.output.dense",
    "albert": "albert_layers.0.attention.dense",
    "modernbert": "attn.Wo",
    "distilbert": "attention.out_lin",
    "gpt2": "attn.c_proj",
    "llama": "self_attn.o_proj",
}


def eager(model: Any, family: str, ids: dict[str, Tensor], attention: Tensor | None) -> tuple[Any, list[Tensor]]:
    """The model's own attention probabilities [B, heads, S, S] by block, and what leaves its heads [B, S, H]."""
    other, contexts = deepcopy(model), list[Tensor]()
    other.set_attn_implementation("eager")
    for block in block_list(other.base_model, 3):
        layer = block.get_submodule(OUTPUT[family])
        layer.register_forward_pre_hook(lambda _, given: contexts.append(given[0].flatten(2)))
    return other(**ids, attention_mask=attention, output_attentions=True).attentions, contexts


def probabilities(qkv: QKV) -> Tensor:
    """Of attention by its definition, one query at a time."""
    groups = qkv.query.shape[1] // qkv.key.shape[1]
    result = torch.zeros(*qkv.query.shape[:3], qkv.key.shape[2])
    for row, head, query in torch.cartesian_prod(*map(torch.arange, qkv.query.shape[:3])).tolist():
        scores = qkv.scaling * qkv.key[row, head // groups] @ qkv.query[row, head, query]
        if qkv.mask is not None:
            scores = scores.masked_fill(~qkv.mask.expand(result.shape)[row, head, query], -torch.inf)
        result[row, head, query] = scores.softmax(0)
    return result


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "batched_products"])
@pytest.mark.parametrize("family", OUTPUT)
@torch.no_grad()
def test_queries_keys_and_values_are_what_attention_uses(family: str, implementation: str, padded: bool) -> None:
    model = make(family)
    ids, attention = inputs(3, padded)
    attentions, contexts = eager(model, family, ids, attention)
    if implementation == "batched_products":
        use_batched_products(model)
    else:
        model.set_attn_implementation(implementation)
    in_force, documents = model.config._attn_implementation, documents_of(attention)
    found = LanguageModel(model)(ids, documents, OutputSpec(layers=(1,), qkv=(1, 2, 3)))
    assert tuple(found.qkv) == (1, 2, 3) and model.config._attn_implementation == in_force
    valid = torch.ones_like(ids["input_ids"], dtype=torch.bool) if attention is None else attention
    for block, qkv in found.qkv.items():
        own = probabilities(qkv)
        torch.testing.assert_close(own.transpose(1, 2)[valid], attentions[block - 1].transpose(1, 2)[valid])
        context = (own @ qkv.repeated().value).transpose(1, 2).flatten(2)
        torch.testing.assert_close(context[valid], contexts[block - 1][valid])
    assert found.qkv[1].key.shape[1] == (2 if family == "llama" else 4)
    plain = LanguageModel(model)(ids, documents, OutputSpec(layers=(1,)))
    assert torch.equal(plain.hidden[1], found.hidden[1]) and plain.qkv == {}


def test_sizes_are_measured() -> None:
    llama, albert = make("llama").train(), make("albert")
    assert attention_shapes(llama, (1, 3)) == [(4, (48, 48, 48))] * 2 and llama.training
    assert hidden_widths(llama, (0, 2, LAST)) == [32, 32, 32]
    assert hidden_widths(albert, (0, 1)) == [32, 32] and pooled_width(albert, MEAN) == 32


@pytest.mark.parametrize("model", [Plain(), make("deberta-v2"), make("mpnet")], ids=lambda model: type(model).__name__)
def test_attention_of_a_models_own_is_refused_by_name(model: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(model).__name__} does not show .*choose another"):
        LanguageModel(model)({"input_ids": torch.arange(8)[None]}, None, OutputSpec(qkv=(1,)))


@pytest.mark.parametrize("family", ["bert", "modernbert", "llama"])
@pytest.mark.parametrize("padded", [False, True])
def test_pooled_vectors_leave_padding_out(family: str, padded: bool) -> None:
    model, (ids, attention) = make(family), inputs(3, padded)
    spec = OutputSpec(True, torch.tensor([0, 4]), (LAST,), (), (FIRST, MEAN))
    found = LanguageModel(model)(ids, documents_of(attention), spec)
    last = found.hidden[LAST]
    assert found.head_rows is not None and found.head_rows.shape[0] == 2
    for row, length in enumerate([LENGTH] * 3 if attention is None else attention.sum(1).tolist()):
        torch.testing.assert_close(found.pooled[MEAN][row], sum(last[row, :length].unbind()) / length)
        assert torch.equal(found.pooled[FIRST][row], last[row, 0])


def test_ids_are_made_on_the_device_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the mesh, where the parts of a sharded model lie on the host (backend.offload_teacher)."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    weight = nn.Linear(3, 2).weight.detach()
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(weight.shape, weight.stride(), weight.dtype))
    offloaded = nn.Module()
    offloaded.weight = nn.Parameter(DTensor(weight, spec, requires_grad=False), False)
    assert offloaded.weight.device.type == "cpu" and device_of(offloaded) == torch.device("cuda", 3)
    assert device_of(nn.Linear(3, 2, device="meta")).type == "meta"
    model, seen = make("bert"), []
    for module in (language_model, check):
        monkeypatch.setattr(module, "device_of", lambda _: torch.device("meta"))
    monkeypatch.setattr(LanguageModel, "forward", lambda _, inputs, *__: seen.append(inputs["input_ids"].device.type))
    monkeypatch.setattr(type(model), "forward", lambda _, input_ids, **__: seen.append(input_ids.device.type))
    language_model.idle_forward(model)
    language_model.outputs_of_few(model, OutputSpec())
    assert language_model.has_head(LanguageModel(model), "class")
    with pytest.raises(AttributeError):  # there is no outcome
        check._read_and_expected(model, MASKED, None)
    assert seen == ["meta"] * 5


def test_the_head_of_a_frozen_model_is_rounded_once_and_anew_after_a_change() -> None:
    def rounded_in_two_steps(reader: LanguageModel) -> list[Tensor]:
        found: list[Tensor] = []
        for _ in range(2):
            with reader.weight_cast_cache():
                found += [cast for _ in range(2) if (cast := reader.head(torch.ones(3, WIDTH)).rounded) is not None]
        weight = reader.model.get_output_embeddings().weight
        assert len(found) == 4 and all(torch.equal(cast, weight.bfloat16()) for cast in found)
        return found

    trained, frozen = (LanguageModel(make_model("bert", 1), "bf16") for _ in range(2))
    frozen.requires_grad_(False)
    one, same, other, _ = rounded_in_two_steps(trained)
    assert one is same and one is not other and not one.requires_grad
    before = rounded_in_two_steps(frozen)
    assert all(cast is before[0] for cast in before)
    frozen.load_state_dict({name: 2 * tensor for name, tensor in frozen.state_dict().items()})
    assert rounded_in_two_steps(frozen)[0] is not before[0]
