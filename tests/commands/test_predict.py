"""Predictions of models of every kind, against transformers' own pipelines and plain forward passes; the command."""

import copy
import gzip
import io
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from job import Shelf, refused_line, save_model
from prediction_models import save_fine_tuned
from tiny import make_model, make_rows, make_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, pipeline

from distill import score
from distill.commands.cli import main as command
from distill.commands.prediction import predict
from distill.data.batch import Batch
from distill.models.language_model import LanguageModel
from distill.models.loaded import LoadedModel, load_model
from distill.runtime.errors import SettingError
from distill.teacher.live import RetokenizedTeacher


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, LoadedModel]:
    """A model of each kind."""
    root = tmp_path_factory.mktemp("models")
    names = {0: "bad", 1: "good", 2: "fair"}
    folders = [
        save_fine_tuned(root / "classifier", AutoModelForSequenceClassification, id2label=names),
        save_fine_tuned(root / "answerer", AutoModelForQuestionAnswering),
        save_model(root / "filler", "bert", 2),
        save_model(root / "writer", "gpt2", 2),
    ]
    return {folder.name: load_model(folder, "cpu") for folder in folders}


@pytest.fixture(scope="module")
def classifier(models: dict[str, LoadedModel]) -> LoadedModel:
    return models["classifier"]


@pytest.fixture(scope="module")
def writer(models: dict[str, LoadedModel]) -> LoadedModel:
    return models["writer"]


def test_masks_as_the_pipeline_fills_them_one_by_one(shelf: Shelf) -> None:
    found = load_model(shelf.teacher, "cpu")
    texts = ["The old river found the [MASK] by the sea.", "The [MASK].", "A quiet [MASK] kept the letter."]
    fill = pipeline("fill-mask", model=found.model, tokenizer=found.tokenizer, top_k=3)
    for text, each in zip(texts, predict(found, texts, top_k=3, batch_size=2), strict=True):
        expected = fill(text)
        (given,) = each["masks"]
        assert [one["token"] for one in given] == [one["token_str"].strip() for one in expected]
        assert [one["probability"] for one in given] == pytest.approx([one["score"] for one in expected], abs=1e-5)
        assert each["filled"] == text.replace("[MASK]", given[0]["token"]) and each["text"] == text
    both = predict(found, {"text": "The <mask> found [MASK].", "id": 7})  # another model's mask counts, too
    words = [mask[0]["token"] for mask in both["masks"]]
    assert [len(mask) for mask in both["masks"]] == [5, 5] and both["id"] == 7
    assert both["filled"] == f"The {words[0]} found {words[1]}."


def greedy(writer: LoadedModel, ids: list[int], count: int) -> tuple[str, bool]:
    """What the model writes, one most probable token after the other."""
    new: list[int] = []
    while len(new) < count and new[-1:] != [writer.tokenizer.eos_token_id]:
        with torch.no_grad():
            new.append(int(writer.model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    return writer.tokenizer.decode(new, skip_special_tokens=True), new[-1] == writer.tokenizer.eos_token_id


def test_continuations_do_not_depend_on_their_batch_nor_on_the_saved_settings(
    writer: LoadedModel, monkeypatch: Any
) -> None:
    asked = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "suppress_tokens": [5, 6], "token_healing": True}
    for name, value in {**asked, "return_dict_in_generate": True, "output_scores": True}.items():
        monkeypatch.setattr(writer.model.generation_config, name, value)
    texts = ["the cat", "an owl and the", "", "t"]
    for text, each in zip(texts, predict(writer, texts, max_new_tokens=6), strict=True):
        ids = writer.tokenizer(text)["input_ids"] or [writer.tokenizer.eos_token_id]
        assert (each["continuation"], each["ended"]) == greedy(writer, ids, 6)
    assert predict(writer, []) == [] and writer.model.generation_config.repetition_penalty == 5.0


@pytest.mark.parametrize("single", ["[CLS] $A [SEP]", "$A [SEP]", "$A [SEP] [SEP]", "[CLS] $A"])
def test_what_a_tokenizer_puts_behind_a_text_is_no_part_of_a_prompt(single: str, writer: LoadedModel) -> None:
    tokenizer: Any = copy.deepcopy(writer.tokenizer)
    ids = {"[CLS]": 2, "[SEP]": 3}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[*ids.items()])
    for text in ("the cat", "an owl and the"):
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        before = [ids["[CLS]"]] if single.startswith("[CLS]") else []
        assert tokenizer(text)["input_ids"] != plain
        found = predict((writer.model, tokenizer), text, max_new_tokens=6)
        assert found["continuation"] == greedy(writer, [*before, *plain], 6)[0]


def test_drawn_continuations_follow_the_seed(writer: LoadedModel) -> None:
    before = torch.get_rng_state()

    def draw(seed: int, **more: Any) -> str:
        return str(predict(writer, "the cat", sample=True, max_new_tokens=12, seed=seed, **more)["continuation"])

    assert draw(1) == draw(1) and len({draw(seed) for seed in range(4)}) > 1
    likely = predict(writer, "the cat", max_new_tokens=12)["continuation"]
    assert draw(3, top_k=1) == likely and draw(3, temperature=1e-4) == likely and draw(3, top_p=1e-6) == likely
    assert torch.equal(torch.get_rng_state(), before)


def test_classes_as_the_pipeline_gives_them(classifier: LoadedModel) -> None:
    texts = ["the cat", "owls and the cat and the owl", "of"]
    classify = pipeline("text-classification", model=classifier.model, tokenizer=classifier.tokenizer, top_k=None)
    pair = ("the cat", "an owl")
    *singles, both = predict(classifier, [*texts, pair])
    for text, each in zip(texts, singles, strict=True):
        scores = {one["label"]: one["score"] for one in classify([text])[0]}
        assert each["probabilities"] == pytest.approx(scores, abs=1e-5)
        assert each["class"] == max(scores, key=lambda name: scores[name]) == next(iter(each["probabilities"]))
        assert each["probability"] == pytest.approx(max(scores.values()), abs=1e-5)
    with torch.no_grad():
        logits = classifier.model(**classifier.tokenizer(*pair, return_tensors="pt")).logits[0]
    assert both["probability"] == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)
    assert both["class"] == classifier.model.config.id2label[int(logits.argmax())]
    assert len(predict(classifier, pair, top_k=1)["probabilities"]) == 1
    text = classifier.tokenizer("the [SEP] cat", split_special_tokens=True, return_tensors="pt")  # as in training
    assert text["input_ids"].shape != classifier.tokenizer("the [SEP] cat", return_tensors="pt")["input_ids"].shape
    with torch.no_grad():
        expected = float(classifier.model(**text).logits.softmax(-1).max())
    assert predict(classifier, "the [SEP] cat")["probability"] == pytest.approx(expected, abs=1e-5)
    found = predict(classifier, {"text": "the cat", "class": "another", "id": 3})
    assert list(found) == ["text", "input_class", "id", "class", "probability", "probabilities"]


def test_values_and_several_classes_at_once(tmp_path: Path) -> None:
    found = load_model(save_fine_tuned(tmp_path / "value", AutoModelForSequenceClassification, num_labels=1), "cpu")
    with torch.no_grad():
        expected = float(found.model(**found.tokenizer("the cat", return_tensors="pt")).logits)
    outcome = {"text": "the cat", "id": "x", "value": pytest.approx(expected, abs=1e-5)}
    assert predict(found, [{"text": "the cat", "id": "x"}]) == [outcome]
    kinds = {"problem_type": "multi_label_classification", "num_labels": 3}
    found = load_model(save_fine_tuned(tmp_path / "several", AutoModelForSequenceClassification, **kinds), "cpu")
    with torch.no_grad():
        each = found.model(**found.tokenizer("the cat", return_tensors="pt")).logits[0].sigmoid()
    assert list(predict(found, "the cat")["probabilities"].values()) == pytest.approx(sorted(each.tolist())[::-1])


def naive_answer(found: LoadedModel, question: str, context: str, most: int) -> tuple[float, str, float]:
    """The best pair of positions of one window by trying all of them; and the score of having no answer."""
    encoded = found.tokenizer(question, context, return_offsets_mapping=True)
    with torch.no_grad():
        output = found.model(**{name: torch.tensor([encoded[name]]) for name in ("input_ids", "token_type_ids")})
    start, end = (logits[0].double().numpy() for logits in (output.start_logits, output.end_logits))
    inside = [place for place, part in enumerate(encoded.sequence_ids()) if part == 1]
    pairs = [(start[i] + end[j], i, j) for i in inside for j in inside if i <= j < i + most]
    best, i, j = max(pairs)
    offsets = encoded["offset_mapping"]
    return float(best), context[offsets[i][0] : offsets[j][1]], float(start[0] + end[0])


def test_answers_are_the_best_spans(models: dict[str, LoadedModel]) -> None:
    answerer = models["answerer"]
    record = {"question": "what", "context": "the cat sat on an owl and ran.", "id": "q1"}
    score, text, null = naive_answer(answerer, record["question"], record["context"], 5)
    found = predict(answerer, record, max_answer_tokens=5, top_k=3)
    assert (found["answer"], found["id"]) == (text, "q1")
    assert found["score"] == pytest.approx(score, abs=1e-4)
    assert found["no_answer_score"] == pytest.approx(null - score, abs=1e-4)
    assert record["context"][found["start"] : found["end"]] == text
    scores = np.array([each["score"] for each in found["answers"]])
    assert len(scores) == 3 and (np.diff(scores) <= 0).all() and found["answers"][0]["answer"] == text
    assert 0 < sum(each["probability"] for each in found["answers"]) <= 1
    may_lack = predict(answerer, record, max_answer_tokens=5, no_answer=True)
    assert may_lack["answer"] == ("" if null > score else text)
    long = record | {"context": "the cat sat. " * 40}  # which is read in windows
    one, other = predict(answerer, [long, record | {"context": "of the"}])
    assert one["answer"] in long["context"] and other["end"] <= 6


@pytest.mark.parametrize(
    ("model", "given", "options", "line"),
    [
        ("classifier", "a", {"temperature": 2.0}, r"^temperature=2.0: a model for classes of texts does not read it"),
        ("classifier", "a", {"sequence_length": 999}, r"^sequence_length=999: model=.* reads 5 to 64 tokens"),
        ("classifier", {"text": "\ud800"}, {}, "^input 1 is not UTF-8"),
        ("writer", "a", {"temperature": 0.7}, r"^temperature=0.7: it is for sampling; set sample=true"),
        ("writer", "a", {"max_new_tokens": 64}, r"^input 1 has .* and max_new_tokens=64, and model=.* reads 64"),
        ("writer", {"role": "user"}, {}, r'^input 1 has no text that is text: .* needs text, or \{"messages": \['),
        ("writer", {"text": "a", "second": "b"}, {}, "^input 1 has a second text"),
        ("answerer", "who?", {}, "^input 1 has no question that is text: .* needs question and context"),
        ("answerer", {"question": "a"}, {}, "^input 1 has no context that is text"),
        ("filler", ["A [MASK].", "none"], {}, r"^input 2 has no mask to fill: write \[MASK\]"),
        ("filler", ["a " * 99 + "[MASK]"], {}, r"^input 1 has 102 tokens, and model=.* reads 64: shorten it"),
    ],
)
def test_inputs_and_options_that_a_model_does_not_read(
    model: str, given: Any, options: dict[str, Any], line: str, models: dict[str, LoadedModel]
) -> None:
    with pytest.raises(SettingError, match=line):
        predict(models[model], given, **options)


def main(arguments: list[str]) -> int:
    """`distill predict` in this process; gives the exit status."""
    return command(["predict", *arguments])


@pytest.fixture(scope="module")
def sentiment(tmp_path_factory: Any) -> Path:
    """A run folder, as far as predictions look at it, of a model for classes."""
    folder = tmp_path_factory.mktemp("sst2")
    save_fine_tuned(folder / "student", AutoModelForSequenceClassification, id2label={0: "positive", 1: "negative"})
    settings = {"corpus": {"kind": "glue", "task": "sst2", "sequence_length": 16, "text": None, "second": None}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text("")
    return folder


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_texts_on_the_command_line(shelf: Shelf, capsys: Any) -> None:
    texts = ["The old [MASK].", "A [MASK] = letter."]
    assert main([f"model={shelf.teacher}", *(f"text={text}" for text in texts), "top_k=2"]) == 0
    assert lines(capsys.readouterr().out) == predict(shelf.teacher, texts, top_k=2)


def test_files_and_pipes(sentiment: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    texts = ["the cat", '"NA," of the owl', "of the"]
    expected = predict(sentiment, texts)
    objects = "".join(json.dumps({"id": n, "text": text}) + "\n\n" for n, text in enumerate(texts))
    (tmp_path / "in.txt").write_text("\n\n".join(texts))
    (tmp_path / "in.jsonl").write_text(objects)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(objects.encode()))
    rows = [{"id": n, "text": text} for n, text in enumerate(texts)]
    pd.DataFrame(rows).to_csv(tmp_path / "in.csv", index=False)
    pd.DataFrame(rows).to_parquet(tmp_path / "in.parquet")
    (tmp_path / "in.tsv").write_text("".join(f"{n}\t{text}\n" for n, text in [("id", "text"), *enumerate(texts)]))
    for name in ("in.txt", "in.jsonl", "packed.jsonl.gz", "in.csv", "in.tsv", "in.parquet"):
        given = [f"model={sentiment}", f"input={tmp_path / name}", f"output={tmp_path / 'out.jsonl'}"]
        assert main([*given, "overwrite=true"]) == 0
        found = lines((tmp_path / "out.jsonl").read_text())
        assert [(one["text"], one["class"]) for one in found] == [(one["text"], one["class"]) for one in expected]
        assert name == "in.txt" or [int(one["id"]) for one in found] == [0, 1, 2]
    assert "3 predictions in" in capsys.readouterr().err
    one = '{"text": "of"}\n'
    for piped in ("\n".join(['"NA," of the owl', *texts]), one + objects, f"\n\ufeff{one}{objects}"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        assert main([f"model={sentiment}"]) == 0
        assert [one["text"] for one in lines(capsys.readouterr().out)][1:] == texts


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_predictions_as_a_table(suffix: str, tmp_path: Path) -> None:
    """As others read it, and as an input again; numbers are numbers in Parquet, and no row lacks a column."""
    records: list[Any] = [
        {"id": 1, "text": 'an "owl",\tor\ntwo', "sure": True},
        {"id": 2, "text": "the cat", "more": [1, {"a": None}]},
        {"id": 2**70, "text": "of é", "sure": None, "late": 0.5},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    output, model = (
        tmp_path / f"OUT.{suffix.upper()}",
        save_fine_tuned(tmp_path / "m", AutoModelForSequenceClassification),
    )
    assert main([f"model={model}", f"input={tmp_path / 'in.jsonl'}", f"output={output}"]) == 0
    expected = predict(model, records)
    separator = "\t" if suffix == "tsv" else ","
    table = pd.read_parquet(output) if suffix == "parquet" else pd.read_csv(output, sep=separator)
    assert list(table) == ["id", "text", "sure", "class", "probability", "probabilities", "more", "late"]
    assert list(table["text"]) == [record["text"] for record in records]
    assert list(map(str, table["id"])) == ["1", "2", str(2**70)]
    assert list(table["class"]) == [each["class"] for each in expected]
    np.testing.assert_allclose(table["probability"], [each["probability"] for each in expected])
    assert json.loads(table["more"][1]) == [1, {"a": None}] and table["late"][2] == 0.5
    if suffix == "parquet":
        assert list(table["sure"]) == [True, None, None] and list(map(str, pq.read_schema(output).types))[2] == "bool"
    if suffix != "tsv":  # which is read without quotation marks
        assert main([f"model={model}", f"input={output}", f"output={tmp_path / 'again.jsonl'}"]) == 0
        again = lines((tmp_path / "again.jsonl").read_text())
        assert [(each["text"], each["class"]) for each in again] == [(each["text"], each["class"]) for each in expected]
        assert all(each["class"] == each["input_class"] for each in again)


def test_columns_are_called_as_in_training(sentiment: Path, tmp_path: Path, capsys: Any) -> None:
    folder = shutil.copytree(sentiment, tmp_path / "run")
    settings = {"corpus": {"kind": "table", "text": "review", "second": "reply", "sequence_length": 16}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "in.csv").write_text("text,review,reply\nof the,the cat,an owl\n")
    assert main([f"model={folder}", f"input={tmp_path / 'in.csv'}"]) == 0
    (found,) = lines(capsys.readouterr().out)
    assert found["probability"] == pytest.approx(predict(sentiment, ("the cat", "an owl"))["probability"])
    assert (found["text"], found["review"], found["reply"]) == ("of the", "the cat", "an owl") and "second" not in found


def test_answers_in_squads_form(tmp_path: Path, capsys: Any) -> None:
    model = save_fine_tuned(tmp_path / "model", AutoModelForQuestionAnswering)
    questions = [{"id": f"q{n}", "question": text, "answers": []} for n, text in enumerate(("what", "who is it"))]
    content = {"data": [{"paragraphs": [{"context": "the cat and an owl", "qas": questions}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(content))
    assert main([f"model={model}", f"input={tmp_path / 'dev.json'}", f"output={tmp_path / 'answers.json'}"]) == 0
    found = json.loads((tmp_path / "answers.json").read_text())
    records = [{"question": each["question"], "context": "the cat and an owl"} for each in questions]
    assert found == {f"q{n}": each["answer"] for n, each in enumerate(predict(model, records))}
    assert main([f"model={model}", "question=what", "context=the cat"]) == 0
    assert lines(capsys.readouterr().out.splitlines()[-1])[0]["answer"]


def test_seeds_and_texts_that_no_prediction_reads(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    model = f"model={save_model(tmp_path / 'model')}"
    for seed in (str(2**64), str(-1), "9" * 5000):
        assert "seed=" in refused_line(capsys, "predict", model, "text=a", "sample=true", f"seed={seed}")[:20]
    assert "UTF-8" in refused_line(capsys, "predict", model, "text=caf\udce9")
    for content, errors in (
        (b"caf\xe9\n", "strict"),
        (b"caf\xe9\n", "surrogateescape"),
        (b'{"text": "\\ud800"}\n', "strict"),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors))
        assert "convert it" in refused_line(capsys, "predict", model)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_of_a_text_that_is_too_long_transformers_logs_nothing(
    family: str, tmp_path: Path, capsys: Any, caplog: Any
) -> None:
    """Nor of sequences that a teacher with another tokenizer reads."""
    logging.getLogger("transformers").addHandler(caplog.handler)
    found = load_model(save_model(tmp_path / "long", family), "cpu")
    found.tokenizer.model_max_length = 16
    found.tokenizer.save_pretrained(tmp_path / "long")
    text = "the river house " * 300 + " [MASK]" * (family == "bert")
    with pytest.raises(SettingError):
        score(text, tmp_path / "long")
    refused_line(capsys, "predict", f"model={tmp_path / 'long'}", f"text={text}")
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 4
    teacher = RetokenizedTeacher(LanguageModel(make_model("bert", 1)), make_rows(2), tokenizer, tokenizer, None)
    teacher.read_ahead(Batch({}, None, {}, None, np.arange(2)))
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not [line for line in caplog.messages if "longer than" in line or "max_length" in line]
