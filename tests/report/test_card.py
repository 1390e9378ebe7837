"""The model card: its title says what the run was, its lines run as they stand, and the Hub reads what is true."""

import re
from pathlib import Path
from typing import Any

import own_models
import pytest
import transformers
import yaml
from families import CAUSAL, make_family, tokenizer_of
from huggingface_hub import ModelCard
from test_golden_pages import CASES
from tiny import HIDDEN, PAD, VOCAB, make_tokenizer
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
)

from distill.config.settings import CorpusConfig
from distill.models.export_folder import export, tokenizer_class
from distill.models.loaded import load_model
from distill.report.model_card import model_card, without_paths
from distill.report.use import use_of_student
from distill.runs import describe
from distill.runs.describe import hub_datasets, origin_of, published
from distill.runs.facts import Origin, Published, Student
from distill.runs.record import Record

QWEN = {"hub": "Qwen/Qwen3-0.6B", "license": "apache-2.0"}


def card_of(content: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A card, and its front matter as the Hub's own parser reads it and gives it back."""
    card = model_card(Record.from_json(content))
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert ModelCard(card).data.to_dict() == metadata
    return card, metadata


def own(**changes: Any) -> dict[str, Any]:
    return CASES["own"] | changes


def run(name: str, teacher: str | None = None, start: str = "random", corpus: str = "146 books") -> dict[str, Any]:
    student = {"name": name, "start": CASES["starts"][start]}
    corpora = {"name": corpus, "sequence_length": 128}
    return {"recipe": "mine", "corpus": corpora, "student": student, "teacher": teacher and {"name": teacher}}


@pytest.mark.parametrize(
    ("content", "title"),
    [
        *((run(*cells), title) for *cells, title in CASES["titles"]),
        ({**run("BertForMaskedLM"), "snapshot": 2000}, "Bert pre-trained from scratch, after step 2,000"),
        ({}, "Student"),
        (own(teacher={"name": "/srv/models/2024"}), "Small distilled from 2024"),
        (own(teacher={"name": "a/mine/snapshots/step-0100"}), "Small distilled from mine after step 100"),
    ],
)
def test_it_is_titled_by_what_the_run_was(content: dict[str, Any], title: str) -> None:
    card, metadata = card_of(content)
    assert metadata["model_name"] == title and f"\n# {title}\n" in card


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
def test_its_lines_run_as_they_stand(kind: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
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
    assert ("distill export model=FOLDER" in card) == (kind != "own")
    if kind != "own":
        assert type(load_model(".", "cpu").model).__name__ == loaded


def test_vectors_have_the_length_that_the_folder_gives_them() -> None:
    plain, unit = (use_of_student(Origin(encodes="mean", normalizes=each), "BertModel").code for each in (None, True))
    assert "torch." not in use_of_student(Origin(encodes="states", normalizes=True), "BertModel").code
    assert "import torch\n" in unit and "normalize((states * mask).sum(1) / mask.sum(1))" in unit
    assert "torch." not in plain and "print((states * mask)" in plain


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_the_lines_under_use_give_the_students_tokenizer_back(
    family: str, tmp_path: Path, tokenizer: Any, monkeypatch: Any
) -> None:
    """AutoTokenizer prefers Qwen 2's own class, which makes other tokens of the same file."""
    student = make_family(family)
    origin = origin_of(student, None, True).changed(tokenizer=tokenizer_class(tokenizer, student))
    assert (origin.tokenizer is None) == (family == "gpt2")
    use = use_of_student(origin, type(student).__name__)
    export(student, tokenizer, tmp_path, "", auto_class=use.auto_class)
    assert use.code in model_card(Record(student=Student(name=type(student).__name__, origin=origin)))
    monkeypatch.chdir(tmp_path)
    loaded: dict[str, Any] = {}
    exec(use.code.partition("\ngenerate")[0], loaded)
    assert loaded["tokenizer"]("the of and").input_ids == tokenizer("the of and").input_ids
    assert loaded["tokenizer"].get_vocab() == tokenizer.get_vocab()


def test_the_hub_reads_what_the_models_are(results: dict[str, Any]) -> None:
    results["teacher"] |= {"name": "Qwen/Qwen3-0.6B", "published": QWEN}
    results["student"]["start"] = {"init": "layers", "from": "Qwen/Qwen3-0.6B", "published": QWEN}
    results["corpus"]["hub"] = ["Salesforce/wikitext"]
    card, written = card_of(results)
    assert written["base_model"] == ["Qwen/Qwen3-0.6B"] and written["license"] == "apache-2.0"
    assert written["datasets"] == ["Salesforce/wikitext"] and written["metrics"] == ["perplexity"]
    assert written["library_name"] == "transformers" and written["pipeline_tag"] == "fill-mask"
    scores = ModelCard(card).data.eval_results or []
    values = {(score.dataset_type, score.metric_type): score.metric_value for score in scores}
    for measure in ("perplexity", "pseudo_perplexity"):
        assert values["heldout", measure] == results["student"][measure]["heldout"]
    assert not {"base_model", "license", "datasets", "metrics"} & card_of(own())[1].keys()


@pytest.mark.parametrize(
    ("start", "license", "says"),
    [
        ({"published": {"license": "mit"}}, None, "some of its source models state mit and apache-2.0"),
        ({"published": {}}, None, "some of its source models state apache-2.0"),
        ({"from": None}, "apache-2.0", "add its languages to the front matter"),
    ],
)
def test_licences_that_differ_are_named_and_none_is_chosen(start: Any, license: str | None, says: str) -> None:
    made = {"name": "Small", "start": {"init": "pretrained", "from": "/srv/models/small", **start}}
    card, metadata = card_of(own(teacher={"name": "big", "published": QWEN}, student=made))
    assert metadata.get("license") == license and says in card


@pytest.mark.parametrize(
    ("text", "stated"),
    [("license: MIT\n---\n# A model\n", "mit"), ("license: other\n---\n", None), ("license: [\n---\n", None)],
)
def test_the_licence_of_a_model(text: str, stated: str | None, tmp_path: Path, monkeypatch: Any) -> None:
    """Of a folder, and of a name on the Hub: without a card in the cache and a network none, and no error."""
    monkeypatch.setattr(describe, "is_hub_reached", lambda: False)
    assert published(str(tmp_path)) == published(None) == Published()
    assert published("someone/that-is-not-there") == Published(hub="someone/that-is-not-there")
    card = tmp_path / "README.md"
    card.write_text(f"---\n{text}")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(card))
    assert published(str(tmp_path)) == Published(license=stated)
    assert published("Qwen/Qwen3-0.6B") == Published(hub="Qwen/Qwen3-0.6B", license=stated)


def test_the_data_sets_of_a_corpus() -> None:
    hub, folder = {"kind": "hub", "hub": "a/b"}, {"kind": "gutenberg", "hub": "c/d", "path": "books"}
    mixed = {name: {**one, "weight": 1.0} for name, one in (("a", hub), ("b", folder), ("c", hub))}
    corpora: list[tuple[dict[str, Any], list[str]]] = [
        (hub, ["a/b"]),
        (folder, []),
        ({"kind": "mixture", "sources": mixed}, ["a/b"]),
        ({"kind": "glue", "task": "sst2"}, ["nyu-mll/glue"]),
        ({"kind": "squad", "version": "2.0"}, ["rajpurkar/squad_v2"]),
        ({"kind": "glue", "path": "a"}, []),
        ({"kind": "table"}, []),
        ({"kind": "glue", "task": "rte", "hub": "x/y"}, ["x/y"]),
    ]
    assert [hub_datasets(CorpusConfig(**corpus)) for corpus, _ in corpora] == [found for _, found in corpora]


def test_of_a_path_the_last_part_is_left() -> None:
    assert {text: without_paths(text) for text in CASES["paths"]} == CASES["paths"]
    card, _ = card_of(own())
    assert not [private for private in ("/home", "my files/", "/srv", "~/", "models/big") if private in card]
