"""What students from layers take of teachers whose layers are of several kinds, and of how they generate."""

from typing import Any

import pytest
import torch
from families import make_family
from tiny import make_tokenizer
from transformers import (
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
)

from distill.config.settings import StudentConfig
from distill.models.check import max_positions
from distill.models.kind import CAUSAL
from distill.models.student import make_student
from distill.runtime.errors import SettingError


def from_layers(teacher: Any, layers: list[Any]) -> Any:
    return make_student(StudentConfig(layers=layers), teacher, make_tokenizer(), 16, CAUSAL)


def hybrid() -> Lfm2ForCausalLM:
    """Layers of attention and of convolutions in turns."""
    kinds = ["conv", "full_attention"] * 2
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Lfm2ForCausalLM(Lfm2Config(vocab_size=64, num_hidden_layers=4, layer_types=kinds, **sizes))


def test_layers_of_two_kinds_have_no_mean() -> None:
    with pytest.raises(
        SettingError, match=r"student\.layers=.*layers \[0, 1\] are of different kinds and have no mean"
    ):
        from_layers(hybrid(), [[0, 1], [2, 3]])
    student = from_layers(hybrid(), [1, 2])
    assert student.config.layer_types == ["full_attention", "conv"]


def test_a_student_ends_its_answers_as_its_teacher_does() -> None:
    teacher = make_family("llama")
    teacher.generation_config.eos_token_id = [1, 7]
    student = from_layers(teacher, [0])
    assert student.generation_config.eos_token_id == [1, 7]
    assert student.generation_config is not teacher.generation_config


def test_gpt_neos_kinds_of_layers_are_counted_as_they_are() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 32}
    teacher = GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 2]]))
    student = from_layers(teacher, [1, 2])
    assert student.config.attention_layers == ["local", "global"]
    assert student.config.attention_types == [[["local"], 1], [["global"], 1]]


def test_relative_positions_alone_have_no_limit() -> None:
    """As in DeBERTa v3, which has no table of positions."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    settings = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    for biased, limit in ((False, None), (True, 16)):
        config = DebertaV2Config(**sizes, **settings, max_position_embeddings=16, position_biased_input=biased)
        model = DebertaV2ForMaskedLM(config).eval()
        assert max_positions(model) == limit
    with torch.no_grad():
        assert (
            DebertaV2ForMaskedLM(
                DebertaV2Config(**sizes, **settings, max_position_embeddings=16, position_biased_input=False)
            )(torch.ones(1, 40, dtype=torch.long))
            .logits.isfinite()
            .all()
        )
