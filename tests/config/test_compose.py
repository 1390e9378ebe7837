"""What the command line makes of `student.config`: a dict replaces another architecture's, entries add to it."""

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


def test_a_dict_replaces_the_whole_of_it() -> None:
    found = composed("student=bert", "student.architecture=gpt2", "student.config={n_embd: 64}").student
    assert found.config == {"n_embd": 64} and found.architecture == "gpt2"
    assert config_of("+recipe=bert_pretrain", "student.config={hidden_size:32}") == {"hidden_size": 32}
    assert config_of("student=bert", "student.config={}") == {}


def test_entries_hold_in_their_order_after_it() -> None:
    after = config_of("student=bert", "student.config={n_embd: 64}", "+student.config.n_layer=2")
    assert after == {"n_embd": 64, "n_layer": 2}
    changed = config_of("student=bert", "student.config={n_embd: 64, n_layer: 3}", "student.config.n_embd=32")
    assert changed == {"n_embd": 32, "n_layer": 3}
    last = config_of("student=bert", "student.config={n_embd: 64}", "student.config={n_embd: 8}")
    assert last == {"n_embd": 8}


def test_other_dicts_are_merged() -> None:
    found = composed("+recipe=distilbert_gutenberg", "objective.masking={mlm_probability: 0.5}").objective.masking
    assert found.mlm_probability == 0.5 and found.smoothing == 0.0  # of the scale


def test_a_wrong_entry_is_refused_when_the_student_is_made() -> None:
    config = composed("student=bert", "student.architecture=gpt2", "student.config={hidden_size: 64}", "teacher=none")
    with pytest.raises(SettingError, match=r"^student\.architecture=gpt2"):
        make_student(config.student, None, make_tokenizer(), 12)


def test_a_key_that_is_no_setting() -> None:
    with pytest.raises(SettingError, match="stray: no setting of Distill"):
        check(composed("+stray={a: 1}"))
