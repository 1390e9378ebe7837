"""Decoders as classifiers: fine-tuned, distilled, scored and asked, with the logits of transformers' own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from job import distill, results, save_model
from labelled import table
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from distill.commands.prediction import predict
from distill.data.collate.tables import Labelled
from distill.data.tables import LabelledTexts
from distill.data.text_pairs import class_sequences
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.loaded import load_model

SMALL = ["corpus.sequence_length=32", "train.batch_size=8", "train.steps=2", "train.epochs=null", "precision=fp32"]
TEXTS = ["the old ship", "a", "the man and the end of the ship and the old man", ""]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_decoder_learns_classes(family: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", family, 2)
    tokenizer = AutoTokenizer.from_pretrained(base)
    data = [f"corpus.path={table(tmp_path / 'reviews')}", "corpus.text=review", "corpus.label=stars"]
    recipe, first, second = ["+recipe=table", *data, *SMALL], tmp_path / "first", tmp_path / "second"
    assert distill(*recipe, f"student.path={base}", f"hydra.run.dir={first}") == 0
    pair = ["objective=distil_classes", "teacher=pretrained", f"teacher.path={first}", "student=layers"]
    assert distill(*recipe, *pair, "student.path=null", "student.layers=[1]", f"hydra.run.dir={second}") == 0
    assert results(second)["teacher"]["accuracy"] == results(first)["student"]["accuracy"]
    for run in (first, second):
        plain = AutoModelForSequenceClassification.from_pretrained(run / "student").eval()
        own = AutoTokenizer.from_pretrained(run / "student")
        assert own.pad_token_id == plain.config.pad_token_id == (tokenizer.pad_token_id or tokenizer.eos_token_id)
        probabilities = [answer["probabilities"] for answer in predict(run, TEXTS[:3], device="cpu")]
        with torch.no_grad():
            expected = plain(**own(TEXTS[:3], padding=True, return_tensors="pt")).logits.softmax(-1)
        names = [plain.config.id2label[number] for number in range(2)]
        given = torch.tensor([[answer[name] for name in names] for answer in probabilities])
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@torch.no_grad()
def test_padding_is_no_part_of_a_text(family: str, tmp_path: Path) -> None:
    """Where it is the token that ends texts, or begins them, and also for no text at all."""
    base = save_model(tmp_path / "base", family, 2)
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=3).save_pretrained(base)
    model = load_model(base, "cpu")
    texts = LabelledTexts("texts", TEXTS, None, np.zeros(len(TEXTS), np.int64), ("no", "yes"))
    rows = class_sequences(texts, model.tokenizer, 40, "corpus.sequence_length")
    batch = Labelled(rows).collate(rows.sequences.astype(np.int64), np.arange(4), np.arange(4))
    together = LanguageModel(model.model)(batch.inputs, batch.documents, OutputSpec(extra=("class",))).extra["class"]
    assert torch.isfinite(together).all()
    for text, logits in zip(TEXTS[:3], together, strict=False):
        alone = model.model(**model.tokenizer(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-6)
