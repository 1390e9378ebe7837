"""The teachers that ship with the package: they load offline, read alike, and are as small as promised."""

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from tiny import make_batches

from distill.config.models import BUNDLED
from distill.config.settings import CONF, BackendConfig, MaskingConfig, StudentConfig, TeacherConfig
from distill.data.collate.mlm import masked_lm
from distill.distributed.single import Single
from distill.models.kind import MASKED
from distill.models.teacher import STARTS, TITLES, bundled_folder, load_teacher
from distill.runs.layer_search import Prediction, find_layers

LAYERS = {"bundled_small": 4, "bundled_deep": 10}
LARGEST = 12_000_000  # bytes of weights: what an installation carries


@pytest.mark.parametrize("kind", BUNDLED)
def test_it_ships_with_its_record(kind: str) -> None:
    folder = Path(bundled_folder(kind))
    assert (folder / "model.safetensors").stat().st_size < LARGEST
    card = (folder / "README.md").read_text()
    assert "How it was trained" in card and "python -m distill +recipe=bert_pretrain" in card
    assert (CONF / "teacher" / f"{kind}.yaml").is_file() and kind in TITLES


@pytest.mark.parametrize("kind", BUNDLED)
def test_it_knows_some_english(kind: str) -> None:
    model, tokenizer, title = load_teacher(TeacherConfig(path=kind))
    assert tokenizer is not None and model is not None and title == TITLES[kind]
    assert model.config.num_hidden_layers == LAYERS[kind]
    text = f"he looked at her and said nothing, and she {tokenizer.mask_token} at him."
    ids = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = model(**ids).logits[0, ids["input_ids"][0].tolist().index(tokenizer.mask_token_id)]
    assert "looked" in tokenizer.convert_ids_to_tokens(logits.topk(5).indices)


def test_they_read_the_same_tokens() -> None:
    first, *others = ((Path(bundled_folder(kind)) / "tokenizer.json").read_bytes() for kind in BUNDLED)
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("kind", "count"), [("bundled_small", 2), pytest.param("bundled_deep", 3, marks=pytest.mark.slow)]
)
def test_its_lower_layers_are_where_a_student_starts_best(kind: str, count: int) -> None:
    """By a long way: what is above them refines what they predict, and every second layer breaks it."""
    teacher, tokenizer, _ = load_teacher(TeacherConfig(path=kind))
    assert teacher is not None and tokenizer is not None
    ids = tokenizer(" ".join(topics.values())[:60_000], add_special_tokens=False)["input_ids"]
    rows = np.array(ids[: 64 * 32]).reshape(64, 32).astype(np.uint16)
    masks = masked_lm(MaskingConfig(smoothing=0.0), tokenizer, np.ones(len(tokenizer), np.int64))
    settings = StudentConfig(architecture="distilbert", layers="auto", num_layers=count)
    with Single(BackendConfig(device="cpu"), alone=True) as ranks:
        batches = make_batches(rows, masks, batch_size=16, accumulate=1, seed=0)
        prediction = Prediction(MASKED, "mlm", len(tokenizer), "fp32")
        found = find_layers(settings, teacher, prediction, batches, ranks)
    loss = {rule: each["loss"] for each in found["by_rule"] for rule in each["rules"]}
    assert found["layers"] == STARTS[kind] == list(range(count))
    assert found["teacher"] < loss["first"] < loss["every_second"] - 0.5
