"""What the command line makes of `student.config`: dicts are merged, as Hydra merges them."""

import pytest
from job import composed
from tiny import make_tokenizer

from distill.models.student import make_student
from distill.runs.check import check
from distill.runtime.errors import SettingError

LAYERS = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768}


def config_of(*overrides: str) -> dict[str, object]:
    return composed(*overrides).student.config


def test_without_one_the_groups_own_is_kept() -> None:
    assert config_of("student=bert") == LAYERS
    assert config_of("student=bert", "student.config.hidden_size=64") == LAYERS | {"hidden_size": 64}
    assert config_of("student=bert", "+student.config.type_vocab_size=1") == LAYERS | {"type_vocab_size": 1}


def test_dicts_are_merged() -> None:
    assert config_of("+recipe=bert_pretrain", "student.config={hidden_size:32}") == LAYERS | {"hidden_size": 32}
    last = config_of("student=new", "student.architecture=gpt2", "student.config={n_embd: 64, n_layer: 3}")
    assert last == {"n_embd": 64, "n_layer": 3}
    found = composed("+recipe=distilbert_gutenberg", "objective.masking={mlm_probability: 0.5}").objective.masking
    assert found.mlm_probability == 0.5 and found.smoothing == 0.0  # of the scale


def test_a_wrong_entry_is_refused_when_the_student_is_made() -> None:
    config = composed("student=bert", "student.architecture=gpt2", "teacher=none")
    with pytest.raises(SettingError, match=r"^student\.architecture=gpt2"):
        make_student(config.student, None, make_tokenizer(), 12)


def test_a_key_that_is_no_setting() -> None:
    with pytest.raises(SettingError, match="stray: not known"):
        check(composed("+stray={a: 1}"))
