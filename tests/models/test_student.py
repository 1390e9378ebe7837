"""Students: which layers they take, what they own and freeze, how they begin anew; what is refused."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from families import make_family
from tiny import LENGTH, PAD, VOCAB, make_model, make_rows, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoConfig, GPTNeoForCausalLM
from vocabularies import vocabulary_of

from distill.config.settings import StudentConfig
from distill.models.blocks import freeze
from distill.models.kind import CAUSAL
from distill.models.layers import choose_layers
from distill.models.student import make_student, tokenizer_of
from distill.runtime.errors import SettingError

IDS = torch.from_numpy(make_rows(6, shortest=4).astype("int64"))
REAL = IDS != PAD


def make(settings: StudentConfig, teacher: Any | None = None, length: int = LENGTH) -> Any:
    return make_student(settings, teacher, make_tokenizer(), length)


def refused(settings: StudentConfig, teacher: Any | None = None, length: int = LENGTH) -> str:
    with pytest.raises(SettingError) as error:
        make(settings, teacher, length)
    text = str(error.value)
    assert "\n" not in text
    return text


def answers(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        out = model.eval()(input_ids=IDS, attention_mask=REAL, output_hidden_states=True)
    return out.hidden_states[-1][REAL], out.logits[REAL]


@pytest.fixture
def saved(tmp_path: Path, tokenizer: Any) -> StudentConfig:
    for part in (make_model("bert", 1), tokenizer):
        part.save_pretrained(tmp_path)
    return StudentConfig(init="pretrained", path=str(tmp_path))


# --- layers


def test_a_distilbert_of_all_layers_is_the_bert_that_it_takes_them_from(teacher: Any) -> None:
    student = make(StudentConfig(architecture="distilbert", layers=list(range(4))), teacher)
    assert student.training and all(p.requires_grad for p in student.parameters())
    for made, expected in zip(answers(student), answers(teacher), strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("family", "architecture"), [("bert", "distilbert"), ("modernbert", "same")])
def test_a_student_owns_its_weights_and_ties_them(family: str, architecture: str) -> None:
    teacher = make_model(family)
    before = tiny.weights_of(teacher)
    student = make(StudentConfig(architecture=architecture, layers=[0, 2]), teacher)
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    tiny.assert_close(tiny.weights_of(teacher), before, rtol=0, atol=0)


def test_layers_of_modernbert_that_move() -> None:
    """Its first layer has no norm before the attention, the others have; and layers differ in their attention."""
    teacher = make_model("modernbert")
    assert teacher.config.layer_types[0] != teacher.config.layer_types[1]
    with pytest.raises(SettingError) as error:
        make(StudentConfig(layers=[1, 2]), teacher)
    assert (error.value.setting, error.value.value) == ("student.layers", [1, 2])
    assert "student.layers=auto or first" in error.value.cure
    student = make(StudentConfig(layers=[0, 3]), teacher)
    assert student.config.layer_types == [teacher.config.layer_types[0], teacher.config.layer_types[3]]
    torch.testing.assert_close(student.model.layers[1].attn.Wqkv.weight, teacher.model.layers[3].attn.Wqkv.weight)


def test_layers_of_kinds_that_their_numbers_decide() -> None:
    """Qwen3-MoE with experts in layers 1 and 3; and GPT-Neo, whose configuration counts kinds of layers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2}
    teacher = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes, **heads, **experts)).eval()

    def start(layers: Any) -> Any:
        return make_student(StudentConfig(layers=layers), teacher, vocabulary_of("gpt2"), 16, CAUSAL)

    with pytest.raises(SettingError, match=r"student\.layers=\[0, 2\]"):
        start([0, 2])
    assert start([0, 1]).config.num_hidden_layers == start("auto").config.num_hidden_layers == 2
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 32}
    teacher = GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 2]]))
    assert start([1, 2]).config.attention_layers == ["local", "global"]


def test_a_causal_student_ends_its_answers_as_its_teacher() -> None:
    teacher = make_family("llama")
    teacher.generation_config.eos_token_id = [1, 7]
    student = make_student(StudentConfig(layers=[0]), teacher, make_tokenizer(), 16, CAUSAL)
    assert student.generation_config.eos_token_id == [1, 7]
    assert student.generation_config is not teacher.generation_config


@pytest.mark.parametrize(
    ("layers", "count", "available", "chosen"),
    [
        ([0, 2, 4, 7, 9, 11], None, 12, [0, 2, 4, 7, 9, 11]),  # the published DistilBERT
        (None, None, 12, [0, 2, 4, 6, 8, 10]),
        (None, None, 5, [0, 2, 4]),
        ("every_second", 8, 12, [0, 2, 4, 6, 8, 9, 10, 11]),
        ("even", 6, 12, [0, 2, 4, 7, 9, 11]),  # by rounding halves to even, that of DistilBERT
        ("even", 1, 12, [0]),
        ("even", 2, 12, [0, 11]),
        ("first", 3, 12, [0, 1, 2]),
        ("auto", 3, 5, [0, 2, 4]),  # until the layers are found: what has their number
        ([0, 4], None, 4, "layers 0 to 3"),
        ([0, 1], 3, 4, "names 2"),
        ("even", 5, 4, "take 1 to 4"),
        (None, 0, 4, "take 1 to 4"),
    ],
)
def test_what_a_list_or_a_rule_chooses(layers: Any, count: int | None, available: int, chosen: Any) -> None:
    if isinstance(chosen, str):
        with pytest.raises(SettingError, match=chosen):
            choose_layers(layers, count, available)
    else:
        assert choose_layers(layers, count, available) == chosen


# --- configurations, saved models, and functions of the user's


def test_dropout_is_the_students_own(teacher: Any, saved: StudentConfig) -> None:
    assert make(StudentConfig(architecture="distilbert", dropout=0.3), teacher).config.dropout == 0.3
    modern = make(StudentConfig(dropout=0.2), make_model("modernbert")).config
    assert (modern.attention_dropout, modern.embedding_dropout, modern.mlp_dropout) == (0.2, 0.2, 0.2)
    own = make(StudentConfig(architecture="distilbert", config={"attention_dropout": 0.05}), teacher).config
    assert (own.dropout, own.attention_dropout) == (0.1, 0.05)
    for settings, rates in (
        (saved, (0.0, 0.0)),  # as it was saved
        (saved.changed(dropout=0.2, config={"hidden_dropout_prob": 0.3}), (0.3, 0.2)),
    ):
        config = make(settings).config
        assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == rates


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert", "albert"])
def test_a_student_from_a_configuration(family: str) -> None:
    """Every family works on full rows of the length that was asked for."""
    number = "n_layers" if family == "distilbert" else "num_hidden_layers"
    student = make(StudentConfig(init="random", architecture=family, config={**tiny.FIELDS[family], number: 1}))
    assert student.config.vocab_size == VOCAB and student.config.pad_token_id == PAD
    full = torch.from_numpy(make_rows(2).astype("int64"))
    assert student(input_ids=full).logits.shape == (2, LENGTH, VOCAB)


def test_a_saved_student_and_its_tokenizer(saved: StudentConfig, tokenizer: Any) -> None:
    student = make(saved)
    assert student.training
    tiny.assert_close(tiny.weights_of(student), tiny.weights_of(make_model("bert", 1)), rtol=0, atol=0)
    own = tokenizer_of(saved)
    assert own is not None and own.get_vocab() == tokenizer.get_vocab()
    assert tokenizer_of(StudentConfig(init="random", architecture="bert")) is None
    make_model("bert", 1).base_model.save_pretrained(saved.path)  # an encoder alone, where no head is read
    assert "lacks weights of a masked language model" in refused(saved)
    encoder = make_student(saved, None, tokenizer, LENGTH, reads_head=False).base_model
    tiny.assert_close(tiny.weights_of(encoder), tiny.weights_of(make_model("bert", 1).base_model), rtol=0, atol=0)


def make_custom(teacher: Any, tokenizer: Any, layers: int) -> Any:
    """A user's own function, of which a weight is not laid out by rows."""
    assert len(tokenizer) == VOCAB and (teacher is None or teacher.config.num_hidden_layers == 4)
    model = make_model("bert", layers)
    weight = model.bert.encoder.layer[0].intermediate.dense.weight
    weight.data = weight.data.t().contiguous().t()
    return model


def not_a_model(tokenizer: Any) -> str:
    return "a model"


def custom(path: str, **arguments: Any) -> StudentConfig:
    """As `student._target_=PATH` and the settings beside it."""
    return StudentConfig(**{"_target_": path, **arguments})


def test_a_student_from_ones_own_function(teacher: Any) -> None:
    path = f"{__name__}.make_custom"
    student = make(custom(path, layers=3), teacher)
    assert student.config.num_hidden_layers == 3 and all(weight.is_contiguous() for weight in student.parameters())
    assert "student.layers: missing" in refused(custom(path), teacher)
    text = refused(custom(path, layers=3, width=8), teacher)
    assert "student.width" in text and "it takes layers" in text


NEW, SAVED = {"init": "random", "architecture": "bert"}, {"init": "pretrained"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (StudentConfig(), ("student.init=layers", "teacher.path=null")),
        (StudentConfig(init="random"), ("student.architecture=same",)),
        (StudentConfig(init="random", architecture="perceptron"), ("student.architecture=perceptron",)),
        (StudentConfig(init="random", architecture="gpt2"), ("student.architecture=gpt2",)),
        (StudentConfig(**NEW, config={"colour": "blue"}), ("student.config.colour", "bert")),
        (StudentConfig(**NEW, config={"hidden_size": 30}), ("student.config",)),
        (StudentConfig(**NEW, config={"hidden_size": "wide"}), ("student.config.hidden_size=wide",)),
        (StudentConfig(**SAVED), ("student.path=null",)),
        (StudentConfig(**SAVED, path="/nowhere/at/all"), ("student.path=/nowhere/at/all",)),
        (StudentConfig(**SAVED, path="SAVED", config={"intermediate_size": 7}), ("student.path=",)),
        (StudentConfig(**SAVED, path="SAVED", config={"no_such_field": 1}), ("student.config.no_such_field",)),
        (custom("nothing.there"), ("student._target_=nothing.there",)),
        (custom("distill.config.settings.Nothing"), ("student._target_=distill.config.settings.Nothing",)),
        (custom("distill.config.settings.SEEDS"), ("student._target_=distill.config.settings.SEEDS", "not a callable")),
        (custom(f"{__name__}.not_a_model"), ("gives a str", "not a torch module")),
        (StudentConfig(layers=[0, 4], num_layers=None), ("TEACHER", "student.layers=[0, 4]", "0 to 3")),
        (StudentConfig(architecture="roberta"), ("TEACHER", "student.architecture=roberta", "distilbert")),
        (StudentConfig(config={"hidden_size": 16}), ("TEACHER", "student.config", "hidden_size")),
    ],
)
def test_impossible_students_are_refused(
    settings: StudentConfig, words: tuple[str, ...], saved: StudentConfig, teacher: Any
) -> None:
    settings = settings.changed(path=saved.path) if settings.path == "SAVED" else settings
    text = refused(settings, teacher if "TEACHER" in words else None)
    assert all(word in text for word in words if word != "TEACHER"), text


def test_sequences_longer_than_the_positions_are_refused(teacher: Any) -> None:
    roberta = make_model("roberta", 1)  # whose positions begin after its padding id
    for model, longest in ((teacher, 32), (roberta, 31)):
        make(StudentConfig(layers=[0]), model, length=longest)
        text = refused(StudentConfig(layers=[0]), model, length=longest + 1)
        assert f"corpus.sequence_length={longest + 1}" in text and f"{longest} positions" in text


# --- frozen parts


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert", "gpt2", "llama"])
def test_the_parts_that_are_named_are_frozen_and_no_others(family: str) -> None:
    model = make_family(family)
    before = trained(model)
    freeze(model, ["embeddings", 0])
    gone = before - trained(model)
    blocks = {name for name in before if ".0." in name}
    assert blocks <= gone and gone - blocks
    assert all("embed" in name or "wte" in name or "wpe" in name for name in gone - blocks)


def test_what_cannot_be_frozen_is_refused() -> None:
    with pytest.raises(SettingError, match=r"student\.frozen=.*2 is no layer.*layers 0 to 1"):
        freeze(make_model("bert", 2), [2])
    with pytest.raises(SettingError, match="calls one block several times"):
        freeze(make_model("albert", 4), [0])


# --- a start that looks at neighbouring words


@pytest.mark.parametrize("family", ["bert", "distilbert", "albert"])
def test_every_head_of_the_first_layer_attends_to_its_offset(family: str) -> None:
    """On random words at 48 positions: over six times the attention of a uniform head, at -1, +1, -2, +2."""
    torch.manual_seed(0)
    config = {"dim": 128, "n_heads": 4} if family == "distilbert" else {"hidden_size": 128, "num_attention_heads": 4}
    if family == "albert":
        config |= {"embedding_size": 64, "num_hidden_layers": 2, "intermediate_size": 256}
    settings = StudentConfig(init="neighbours", architecture=family, dropout=0.0, config=config)
    model = make(settings, None, 48).eval()
    model.set_attn_implementation("eager")
    ids = torch.randint(5, model.config.vocab_size, (4, 48))
    attention = model(input_ids=ids, output_attentions=True).attentions[0].mean(0)  # [heads, S, S]
    for head, offset in enumerate((-1, 1, -2, 2)):
        fraction = torch.diagonal(attention[head], offset).mean()
        assert fraction > 6 / 48 and fraction > 3 * torch.diagonal(attention[head], -offset).mean()
