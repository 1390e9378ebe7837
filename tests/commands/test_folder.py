"""A student's folder gives back, through the Auto classes and a pipeline, what the student itself computes."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import IDS, TEXTS, look
from families import CAUSAL, FAMILIES, make_family, tokenizer_of
from safetensors.torch import load_file
from tiny import make_tokenizer

from distill import StudentConfig, load_pair
from distill.models.export_folder import export


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


def test_a_soft_cap_is_kept(tmp_path: Path) -> None:
    """Which transformers 5.17 has by SDPA: it leaves the cap out."""
    pair = load_pair((make_family("gemma2"), tokenizer_of("gemma2")), StudentConfig(layers=[0]), device="cpu")
    assert pair.student.model.config._attn_implementation == "eager"
    assert pair.save(tmp_path / "student").is_dir()


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
