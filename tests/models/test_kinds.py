"""Models of another kind, or that cannot be read right, are refused by name in one line that says what to do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, GROUPED, SIZES, make_family
from tiny import VOCAB, make_model, make_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    BertConfig,
)

from distill.config.settings import StudentConfig
from distill.models.check import check_model, check_packing
from distill.models.kind import (
    CAUSAL,
    CLASSES,
    MASKED,
    ModelKind,
    are_anonymous,
    output_names,
    refuse_other_kind,
)
from distill.models.load import load_pretrained
from distill.models.student import make_student
from distill.runtime.errors import SettingError

KNOWN = {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}


def make(auto: Any, family: str, **fields: Any) -> Any:
    """With weights that make every part of it show."""
    torch.manual_seed(1)
    model = auto.from_config(AutoConfig.for_model(family, **{**KNOWN, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def refusal(error: pytest.ExceptionInfo[SettingError], *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def refused_folder(folder: Path, model: Any, kind: ModelKind, *words: str) -> None:
    model.save_pretrained(folder)
    with pytest.raises(SettingError) as error:
        load_pretrained("teacher.path", str(folder), kind)
    refusal(error, f"teacher.path={folder}", *words)


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}


@pytest.mark.parametrize(
    ("family", "kind"), [("gpt2", MASKED), ("llama", MASKED), ("bert", CAUSAL), ("modernbert", CAUSAL)]
)
def test_models_of_the_other_kind(family: str, kind: ModelKind, tmp_path: Path) -> None:
    """Also where transformers has a class of each kind: what is made of the weights is looked at."""
    cure = "objective=distilgpt2" if kind is MASKED else "objective=distilbert"
    refused_folder(tmp_path, make_family(family), kind, kind.noun, cure)


@pytest.mark.parametrize("kind", [MASKED, CAUSAL])
def test_sequence_to_sequence_models(kind: ModelKind, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    refused_folder(tmp_path, make(AutoModelForSeq2SeqLM, "t5", **T5), kind, "t5", "sequence-to-sequence", kind.noun)
    with pytest.raises(SettingError) as error:
        make_student(StudentConfig(init="random", architecture="t5"), None, make_tokenizer(), 12, kind)
    refusal(error, "student.architecture=t5", "sequence-to-sequence")


def test_the_discriminator_of_electra_has_no_trained_head(tmp_path: Path) -> None:
    fields = FAMILIES["electra"]
    refused_folder(tmp_path, make(AutoModelForPreTraining, "electra", **fields), MASKED, "lacks weights", "generator_")


def test_models_of_images_and_text() -> None:
    text = GROUPED | {"vocab_size": VOCAB, "head_dim": 8}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision |= {"image_size": 16, "patch_size": 4}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    with pytest.raises(SettingError) as error:
        check_model(AutoModelForCausalLM.from_config(config).eval(), "teacher.path=x", CAUSAL)
    refusal(error, "teacher.path=x", "Gemma3ForConditionalGeneration", "of text only")


# What is trained would be another function than these compute, or no hidden states can be read of them.
NOT_READ: dict[str, tuple[ModelKind, dict[str, Any]]] = {
    "mobilebert": (
        MASKED,
        SIZES | {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    "esm": (MASKED, SIZES | {"mask_token_id": 4}),
    "opt": (CAUSAL, {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}),
    "mamba": (CAUSAL, {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}


@pytest.mark.parametrize("family", NOT_READ)
def test_models_that_are_not_read_right(family: str) -> None:
    kind, fields = NOT_READ[family]
    model = make(kind.auto_class, family, **fields)
    with pytest.raises(SettingError) as error:
        check_model(model, "teacher.path=x", kind)
    refusal(error, "teacher.path=x", type(model).__name__, "docs/how-to/extend.md")
    assert "AssertionError" not in str(error.value) and "(-1)" not in str(error.value)


def test_a_model_that_looks_the_other_way() -> None:
    with pytest.raises(SettingError) as error:
        check_model(make_family("gpt2"), "student", MASKED)
    refusal(error, "student: GPT2LMHeadModel", "attends only to earlier tokens", "objective=distilgpt2")
    with pytest.raises(SettingError) as error:
        check_model(make_model("bert", 2), "student", CAUSAL)
    refusal(error, "student: BertForMaskedLM", "attends to later tokens", "objective=distilbert")
    # The class of BERT that transformers loads for causal models looks ahead unless its configuration forbids it.
    check_model(make(AutoModelForCausalLM, "bert", is_decoder=True, **SIZES), "student", CAUSAL)
    with pytest.raises(SettingError):
        check_model(make(AutoModelForCausalLM, "bert", **SIZES), "student", CAUSAL)


PACKED_TOGETHER: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": SIZES | {"num_kv_heads": 4, "new_decoder_architecture": False},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
}


@pytest.mark.parametrize("family", PACKED_TOGETHER)
def test_models_that_do_not_keep_documents_apart(family: str) -> None:
    model = make(AutoModelForCausalLM, family, **PACKED_TOGETHER[family])
    check_model(model, "teacher", CAUSAL)  # one document in a row is read right
    with pytest.raises(SettingError) as error:
        check_packing(model, "teacher")
    refusal(error, f"teacher: {type(model).__name__}", "corpus.cross_documents=false")
    assert model.training is False


TWO_CLASSES = replace(CLASSES, fields={"id2label": {0: "no", 1: "yes"}})


def classifier(**fields: Any) -> Any:
    """The configuration of a saved one."""
    return BertConfig(architectures=["BertForSequenceClassification"], **fields)


def test_the_classes_of_a_model_go_by_their_numbers() -> None:
    """A file may list them in any order, such as 10 before 2."""
    config = classifier(id2label={1: "yes", 0: "no"})
    assert output_names(config) == ["no", "yes"] and not are_anonymous(["no", "yes"])
    refuse_other_kind("teacher.path=x", config, TWO_CLASSES)
    assert are_anonymous(output_names(classifier()))


def test_a_model_of_several_classes_for_a_text_is_refused() -> None:
    config = classifier(id2label={0: "no", 1: "yes"}, problem_type="multi_label_classification")
    with pytest.raises(SettingError) as error:
        refuse_other_kind("teacher.path=x", config, TWO_CLASSES)
    refusal(error, "teacher.path=x gives several classes for a text", "multi_label_classification")
    refuse_other_kind("model=x", config, CLASSES)  # as where it is only asked
