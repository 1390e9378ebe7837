"""Tasks by name, settings that only another task would read, and decoders as classifiers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from job import composed, distill, refused_line, results, save_model
from labelled import table
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from vocabularies import vocabulary_of

from distill.commands.prediction import predict
from distill.data.collate.clm import CausalLM
from distill.data.collate.tables import Labelled
from distill.data.sequence_format import causal_format, masked_format
from distill.data.tables import LabelledTexts
from distill.data.text_pairs import class_sequences
from distill.models.kind import CAUSAL, MASKED
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.loaded import load_model
from distill.runs.check import check
from distill.runtime.errors import SettingError
from distill.tasks import find_task

MASKED_RUN = ["+recipe=distilbert_gutenberg"]
CAUSAL_RUN = ["+recipe=distilgpt2_gutenberg"]


def test_tasks_have_their_models_and_sequences() -> None:
    bert, gpt2 = vocabulary_of("bert"), vocabulary_of("gpt2")
    assert find_task("mlm").kind is MASKED and find_task("mlm").sequence_format(bert) == masked_format(bert)
    assert find_task("clm").kind is CAUSAL and find_task("clm").sequence_format(gpt2) == causal_format(gpt2)
    for packed in ("true", "false"):
        config = composed(*CAUSAL_RUN, f"corpus.cross_documents={packed}")
        task, expected = find_task("clm"), CausalLM(causal_format(gpt2), packed == "true")
        assert task.collator(config, gpt2, None) == task.scoring_collator(config, gpt2) == expected
    with pytest.raises(SettingError, match=r"^objective\.task=translation is not known: choose one of classes, clm"):
        find_task("translation")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*MASKED_RUN, "objective.task=translation"], ("objective.task=translation",)),
        ([*CAUSAL_RUN, "+objective.mlm.weight=1"], ("objective.mlm", "objective.task=mlm", "objective.mlm.weight=0")),
        ([*MASKED_RUN, "+objective.clm.weight=1"], ("objective.clm", "objective.task=clm", "objective.clm.weight=0")),
        ([*CAUSAL_RUN, "objective.masking.mlm_probability=0.3"], ("objective.masking", "leave it out")),
        (["+recipe=gpt2_pretrain", "student.init=neighbours"], ("student.init=neighbours", "objective.task=clm")),
        ([*MASKED_RUN, "evaluate.samples=2"], ("evaluate.samples=2", "causal models", "null")),
        ([*CAUSAL_RUN, "evaluate.stride=128"], ("evaluate.stride=128", "corpus.sequence_length=128")),
    ],
)
def test_what_only_another_task_would_read(overrides: list[str], words: tuple[str, ...]) -> None:
    Path("runs/gpt2_pretrain").mkdir(parents=True)  # that the recipe of a causal pair takes its teacher from
    with pytest.raises(SettingError) as error:
        check(composed(*overrides))
    assert all(word in str(error.value) for word in words), error.value


# --- decoders as classifiers

SMALL = ["corpus.sequence_length=32", "train.batch_size=8", "train.steps=2", "train.epochs=null", "precision=fp32"]
TEXTS = ["the old ship", "a", "the man and the end of the ship and the old man", ""]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_decoder_learns_classes(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then layers of it beside a teacher; the baseline has the same layers of the model before it was fine-tuned."""
    base = save_model(tmp_path / "base", family, 2)
    tokenizer = AutoTokenizer.from_pretrained(base)
    data = [f"corpus.path={table(tmp_path / 'reviews')}", "corpus.text=review", "corpus.label=stars"]
    recipe, first, second = ["+recipe=table", *data, *SMALL], tmp_path / "first", tmp_path / "second"
    assert distill(*recipe, f"student.path={base}", f"hydra.run.dir={first}") == 0
    pair = [*recipe, "student=layers", "student.path=null", "student.layers=[1]", "teacher=pretrained"]
    untuned, fair = [*pair, f"teacher.path={base}"], tmp_path / "fair"
    assert "it lacks weights of a model for classes" in refused_line(capsys, *untuned, "objective=distil_classes")
    assert distill(*untuned, "objective=classes", f"hydra.run.dir={fair}") == 0
    pair += ["objective=distil_classes", f"teacher.path={first}", f"evaluate.baseline={fair}"]
    assert distill(*pair, f"hydra.run.dir={second}") == 0
    found = results(second)
    assert found["teacher"]["accuracy"] == results(first)["student"]["accuracy"]
    baseline = found["baseline"]
    assert baseline["accuracy"] == results(fair)["student"]["accuracy"] and baseline["started_from"] == str(base)
    difference = found["student"]["accuracy"]["dev"] - baseline["accuracy"]["dev"]
    conclusion = baseline["conclusions"]["accuracy"]["dev"]
    assert conclusion["difference"] == pytest.approx(difference) and "baseline" not in conclusion["reason"]
    for run in (first, second):
        plain = AutoModelForSequenceClassification.from_pretrained(run / "student").eval()
        own = AutoTokenizer.from_pretrained(run / "student")
        assert own.pad_token_id == plain.config.pad_token_id == (tokenizer.pad_token_id or tokenizer.eos_token_id)
        with torch.no_grad():
            expected = plain(**own(TEXTS[:3], padding=True, return_tensors="pt")).logits.softmax(-1)
        names = [plain.config.id2label[number] for number in range(2)]
        answers = [answer["probabilities"] for answer in predict(run, TEXTS[:3], device="cpu")]
        given = torch.tensor([[answer[name] for name in names] for answer in answers])
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
