"""The model card: its title says what the run was, and its lines run as they stand in the student's folder."""

import re
from pathlib import Path
from typing import Any

import own_models
import pytest
import transformers
import yaml
from families import CAUSAL, make_family, tokenizer_of
from tiny import HIDDEN, PAD, VOCAB, make_tokenizer
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
)

from distill.models.export_folder import export, tokenizer_class
from distill.models.loaded import load_model
from distill.report.model_card import model_card, title_of_run
from distill.report.use import use_of_student
from distill.runs.describe import origin_of
from distill.runs.facts import Student
from distill.runs.record import Record

SQUAD = "87,599 questions of train-v1.1.json (v1.1); 2 left out: no answer in its context"
MRPC = "3,667 examples of MRPC (train); 1 left out: no label"


def run(name: str, teacher: str | None = None, start: dict[str, Any] | None = None, corpus: str = "146 books") -> Any:
    return {
        "recipe": "mine",
        "corpus": {"name": corpus, "sequence_length": 128},
        "student": {"name": name, "start": start or {"init": "random", "from": None}},
        "teacher": {"name": teacher} if teacher else None,
    }


LAYERS = {"init": "layers", "from": "/home/me/runs/big/student", "layers": [0, 2]}
SAVED = {"init": "pretrained", "from": "runs/albert_pretrain"}


@pytest.mark.parametrize(
    ("content", "title"),
    [
        (
            run("DistilBertForMaskedLM", "the deep bundled teacher", LAYERS),
            "DistilBert distilled from the deep bundled teacher",
        ),
        (run("GPT2LMHeadModel", "/a/runs/big", LAYERS), "GPT2 distilled from big"),
        (run("GPT2LMHeadModel", "runs/x/snapshots/step-2000", LAYERS), "GPT2 distilled from x after step 2,000"),
        (run("Qwen3ForCausalLM", "Qwen/Qwen3-0.6B", LAYERS), "Qwen3 distilled from Qwen/Qwen3-0.6B"),
        (run("DistilBertForMaskedLM", None, LAYERS), "DistilBert, a baseline without a teacher, from layers of big"),
        (run("BertForMaskedLM"), "Bert pre-trained from scratch"),
        (run("AlbertForPreTraining", None, SAVED), "Albert trained further from runs/albert_pretrain"),
        (run("AlbertForQuestionAnswering", None, SAVED, SQUAD), "Albert fine-tuned on SQuAD v1.1"),
        (run("AlbertForSequenceClassification", None, SAVED, MRPC), "Albert fine-tuned on MRPC (train)"),
        (
            run("AlbertForSequenceClassification", "runs/glue", SAVED, MRPC),
            "Albert fine-tuned on MRPC (train), learning from runs/glue too",
        ),
        ({**run("BertForMaskedLM"), "snapshot": 2000}, "Bert pre-trained from scratch, after step 2,000"),
        ({**run("BertForMaskedLM"), "student": {"name": "BertForMaskedLM"}}, "BertForMaskedLM"),  # of an older release
        ({}, "Student"),
    ],
)
def test_it_is_titled_by_what_the_run_was(content: dict[str, Any], title: str) -> None:
    assert title_of_run(Record.from_json(content)) == title
    card = model_card(Record.from_json(content))
    assert yaml.safe_load(card.split("---\n")[1])["model_name"] == title
    assert f"\n# {title}\n" in card


def test_whose_licence_applies() -> None:
    baseline, own = (model_card(Record.from_json(run("BertForMaskedLM", None, start))) for start in (LAYERS, None))
    assert "weights of big, whose licence applies" in baseline and "licence applies" not in own
    distilled = model_card(Record.from_json(run("BertForMaskedLM", "runs/big", {**LAYERS, "from": "runs/big"})))
    assert "the teacher's licence applies to it" in distilled and "weights of" not in distilled


def student(kind: str) -> tuple[Any, Any]:
    """A small student of a kind, and its tokenizer."""
    sizes = {**HIDDEN, "num_hidden_layers": 2, "vocab_size": VOCAB, "pad_token_id": PAD}
    made = {
        "spans": lambda: BertForQuestionAnswering(BertConfig(**sizes)),
        "classes": lambda: BertForSequenceClassification(BertConfig(**sizes, id2label={0: "no", 1: "yes"})),
        "order": lambda: AlbertForPreTraining(AlbertConfig(**sizes, embedding_size=16)),
        "own": own_models.shifted_bert,
    }
    return (made[kind](), make_tokenizer()) if kind in made else (make_family(kind), tokenizer_of(kind))


@pytest.mark.parametrize("kind", ["distilbert", "gpt2", "llama", "spans", "classes", "order", "own"])
def test_its_lines_run_as_they_stand(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each block of Python in the card, one after the other in the student's folder; nothing is sent anywhere."""
    model, tokenizer = student(kind)
    folder, content = tmp_path / "student", run(type(model).__name__)
    made_by = "own_models.shifted_bert" if kind == "own" else None
    content["student"]["origin"] = origin_of(model, made_by, kind in CAUSAL).model_dump()
    export(model, tokenizer, folder, model_card(Record.from_json(content)))
    sent: list[tuple[str, str]] = []
    for sender in (transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase):
        monkeypatch.setattr(sender, "push_to_hub", lambda self, name: sent.append((type(self).__name__, name)))
    monkeypatch.chdir(folder)
    card, found = Path("README.md").read_text(), dict[str, Any]()
    blocks = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, found)
    assert capsys.readouterr().out or kind == "own"  # what the example prints
    loaded = {"order": "AlbertForMaskedLM"}.get(kind, type(model).__name__)
    assert type(found["model"]).__name__ == loaded
    assert [name for _, name in sent] == ["YOUR_NAME/mine"] * 2 and sent[0][0] == loaded
    assert "hf upload YOUR_NAME/mine ." in card
    assert ("distill export model=FOLDER" in card) == (kind != "own")
    if kind != "own":
        assert type(load_model(".", "cpu").model).__name__ == loaded


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_the_lines_under_use_give_the_students_tokenizer_back(
    family: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoTokenizer prefers Qwen 2's own class, which makes other tokens of the same file."""
    student = make_family(family)
    origin = origin_of(student, None, True).changed(tokenizer=tokenizer_class(tokenizer, student))
    assert (origin.tokenizer is None) == (family == "gpt2")
    use = use_of_student(origin, type(student).__name__)
    export(student, tokenizer, tmp_path, "", auto_class=use.auto_class)
    record = Record(student=Student(name=type(student).__name__, origin=origin))
    assert use.code in model_card(record) and "distill export" in model_card(record)
    monkeypatch.chdir(tmp_path)
    loaded: dict[str, Any] = {}
    exec(use.code.partition("\ngenerate")[0], loaded)
    assert loaded["tokenizer"]("the of and").input_ids == tokenizer("the of and").input_ids
    assert loaded["tokenizer"].get_vocab() == tokenizer.get_vocab()
