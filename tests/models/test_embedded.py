"""The teachers that ship with the package: they load offline, read alike, and are as small as promised."""

from pathlib import Path

import pytest
import torch

from distill.config import CONF, TeacherConfig
from distill.config_teacher import EMBEDDED
from distill.models.teacher import TITLES, embedded_folder, load_teacher

LAYERS = {"embedded": 4, "embedded_deep": 10}
LARGEST = 12_000_000  # bytes of weights: what an installation carries


@pytest.mark.parametrize("kind", EMBEDDED)
def test_it_ships_with_its_record(kind: str) -> None:
    folder = Path(embedded_folder(kind))
    assert (folder / "model.safetensors").stat().st_size < LARGEST
    card = (folder / "README.md").read_text()
    assert "How it was trained" in card and "python -m distill +recipe=bert_pretrain" in card
    assert (CONF / "teacher" / f"{kind}.yaml").is_file() and kind in TITLES


@pytest.mark.parametrize("kind", EMBEDDED)
def test_it_knows_some_english(kind: str) -> None:
    model, tokenizer, title = load_teacher(TeacherConfig(kind))
    assert tokenizer is not None and model is not None and title == TITLES[kind]
    assert model.config.num_hidden_layers == LAYERS[kind]
    text = f"he looked at her and said nothing, and she {tokenizer.mask_token} at him."
    ids = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = model(**ids).logits[0, ids["input_ids"][0].tolist().index(tokenizer.mask_token_id)]
    assert "looked" in tokenizer.convert_ids_to_tokens(logits.topk(5).indices)


def test_they_read_the_same_tokens() -> None:
    first, *others = ((Path(embedded_folder(kind)) / "tokenizer.json").read_bytes() for kind in EMBEDDED)
    assert all(other == first for other in others)
