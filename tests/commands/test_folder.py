"""A student's folder gives back, through the Auto classes and a pipeline, what the student itself computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import CAUSAL, FAMILIES, make_family, tokenizer_of

from distill import StudentConfig, load_pair
from distill.models.export_folder import export

TEXTS = ["the of and to in", "he was not so [MASK] the one, and she said that it was all the longest"]
IDS = [[2, 9, 10, 11, 17, 12, 13, 14, 20, 25, 15, 16, 17, 18, 30, 19, 20, 21, 22, 3]]


def look(folder: Path) -> dict[str, Any]:
    """What the Auto classes and a pipeline make of a folder: logits, inputs, special tokens and an answer."""
    config = transformers.AutoConfig.from_pretrained(folder)
    causal = config.architectures[0].endswith(("CausalLM", "LMHeadModel"))
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    capped = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model, loading = kind.from_pretrained(folder, output_loading_info=True, **capped)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    task = "text-generation" if causal else "fill-mask"
    ask = transformers.pipeline(task, model=str(folder), tokenizer=str(folder), device="cpu", model_kwargs=capped)
    generated = ask(TEXTS[0], max_new_tokens=5, do_sample=False) if causal else ask(TEXTS[1])
    with torch.no_grad():
        logits = model.eval()(torch.tensor(IDS)).logits[0]
    return {
        "class": type(model).__name__,
        "missing": loading["missing_keys"],
        "logits": logits.tolist(),
        "inputs": dict(tokenizer(TEXTS, padding=True)),
        "special": tokenizer.all_special_tokens,
        "longest": tokenizer.model_max_length,
        "answer": generated[0]["generated_text"] if causal else [found["token"] for found in generated],
    }


def written(folder: Path, family: str, **fields: Any) -> tuple[Any, Any]:
    """A student and its tokenizer, in a folder."""
    student, tokenizer = make_family(family, **fields), tokenizer_of(family)
    export(student, tokenizer, folder, "# The card\n")
    return student, tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_gives_the_student_back(tmp_path: Path, family: str) -> None:
    student, tokenizer = written(tmp_path / "student", family)
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
