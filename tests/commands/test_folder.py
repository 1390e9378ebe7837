"""A student's folder gives back, through the Auto classes and a pipeline, what the student itself computes."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import IDS, TEXTS, look
from families import CAUSAL, FAMILIES, WINDOWS, make_family, tokenizer_of
from safetensors.torch import load_file
from tiny import make_tokenizer

from distill import StudentConfig, load_pair
from distill.models.export_folder import export, fields_for_both


def written(folder: Path, family: str, **fields: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A student, its tokenizer and the content of config.json of its folder."""
    student, tokenizer = make_family(family, **fields), tokenizer_of(family)
    export(student, tokenizer, folder, "# The card\n")
    return student, tokenizer, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_gives_the_student_back(tmp_path: Path, family: str) -> None:
    student, tokenizer, _ = written(tmp_path / "student", family)
    seen = look(tmp_path / "student")
    with torch.no_grad():
        torch.testing.assert_close(
            torch.tensor(seen["logits"]), student(torch.tensor(IDS)).logits[0], rtol=0, atol=1e-6
        )
    assert seen["class"] == type(student).__name__ and not seen["missing"]
    assert seen["inputs"]["input_ids"] == tokenizer(TEXTS, padding=True).input_ids
    assert seen["longest"] == tokenizer.model_max_length == 64 and "[MASK]" in seen["special"]
    assert seen["answer"].startswith(TEXTS[0]) if family in CAUSAL else len(seen["answer"]) == 5
    assert (tmp_path / "student" / "README.md").read_text() == "# The card\n"


@pytest.mark.parametrize("student", [StudentConfig(layers=[0]), None])
def test_a_soft_cap_is_kept(tmp_path: Path, student: StudentConfig | None) -> None:
    """Of layers and of a model in memory, which transformers 5.17 has by SDPA: it leaves the cap out."""
    teacher, tokenizer = make_family("gemma2"), tokenizer_of("gemma2")
    own = (make_family("gemma2"), tokenizer) if student is None else student
    pair = load_pair((teacher, tokenizer), own, sequence_length=16, device="cpu")
    assert pair.student.model.config._attn_implementation == "eager"
    assert pair.save(tmp_path / "student").is_dir()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_is_one_that_version_4_knows(tmp_path: Path, family: str) -> None:
    written(tmp_path / "student", family)
    fields = json.loads((tmp_path / "student" / "tokenizer_config.json").read_text())
    assert fields["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert fields["model_input_names"] == ["input_ids", "attention_mask"]
    assert "backend" not in fields and not isinstance(fields.get("extra_special_tokens"), list)
    assert fields.get("additional_special_tokens") == (["[MASK]"] if family in CAUSAL else None)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen2", {"rope_theta": 500.0}),
        ("qwen3", {"rope_theta": 700.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("modernbert", {"global_rope_theta": 300.0, "local_rope_theta": 50.0, "global_attn_every_n_layers": 2}),
        ("gpt_neox", {"rotary_emb_base": 500.0, "rotary_pct": 0.5}),
        (
            "gemma3_text",
            {
                "rope_theta": 300.0,
                "rope_local_base_freq": 50.0,
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
        ),
    ],
)
def test_what_version_4_reads_of_rotary_embeddings(tmp_path: Path, family: str, expected: dict[str, Any]) -> None:
    _, _, config = written(tmp_path / "student", family)
    assert {name: config[name] for name in expected} == expected
    assert config["rope_parameters"]  # what version 5 reads
    assert ("rope_scaling" in config) == ("rope_scaling" in expected)


@pytest.mark.parametrize(
    ("layer_types", "expected"),
    [(WINDOWS[::-1], 2), (["full_attention"] * 2, 1), (WINDOWS, None), (["sliding_attention"] * 2, None)],
)
def test_layers_of_modernbert_that_version_4_cannot_express(
    tmp_path: Path, layer_types: list[str], expected: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It then refuses the configuration, since it computes with that number; it would else take every third layer."""
    _, _, config = written(tmp_path / "student", "modernbert", layer_types=layer_types)
    assert config["global_attn_every_n_layers"] == expected
    assert ("the student loads only in transformers 5" in caplog.text) == (expected is None)


def test_rotary_fields_as_version_4_wants_them_of_some_families() -> None:
    """OLMo 3 has its base by kinds of layers; of Phi-3's scaling version 4 takes three fields alone."""
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0}
    nested = {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    config = fields_for_both({"model_type": "olmo3", "rope_parameters": nested})
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == {"rope_type": "yarn", "factor": 8.0}
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, **factors}
    config = fields_for_both({"model_type": "phi3", "rope_parameters": rope})
    assert config["rope_scaling"] == {"type": "longrope", **factors} and config["rope_parameters"] == rope


def test_segments_go_on_being_given_where_the_student_has_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("bert")
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    export(make_family("bert"), tokenizer, tmp_path / "bert", "")
    export(make_family("distilbert"), tokenizer, tmp_path / "distilbert", "")
    assert look(tmp_path / "bert")["inputs"].keys() == {"input_ids", "token_type_ids", "attention_mask"}
    assert look(tmp_path / "distilbert")["inputs"].keys() == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_has_one_bias_for_all_versions(tmp_path: Path, tied: bool) -> None:
    student, _, _ = written(tmp_path / "student", "bert", tie_word_embeddings=tied)
    found = load_file(tmp_path / "student" / "model.safetensors")
    biases = [found[name] for name in ("cls.predictions.bias", "cls.predictions.decoder.bias") if name in found]
    assert len(biases) == (1 if tied else 2) and all(
        torch.equal(bias, student.cls.predictions.decoder.bias) for bias in biases
    )
    assert tied or not torch.equal(student.cls.predictions.bias, biases[0])


def test_a_tokenizer_that_will_not_come_back_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers takes Qwen 2's own way to split a text for every Qwen 2, whatever its tokenizer is."""
    with caplog.at_level(logging.WARNING, "distill"):
        export(make_family("llama"), make_tokenizer(), tmp_path / "llama", "")
        assert not caplog.records
        export(make_family("qwen2"), make_tokenizer(), tmp_path / "qwen2", "")
    assert "PreTrainedTokenizerFast.from_pretrained" in caplog.text and "qwen2" in caplog.text
