"""Predictions of models of every kind, against transformers' own pipelines and plain forward passes."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import Shelf, save_model
from prediction_models import save_fine_tuned
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, pipeline

from distill.commands.prediction import predict
from distill.models.loaded import LoadedModel, load_model
from distill.runtime.errors import SettingError


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
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
    writer: LoadedModel, monkeypatch: pytest.MonkeyPatch
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
    assert found["input_class"] == "another" and found["class"] in ("bad", "good", "fair") and found["id"] == 3


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
        ("classifier", "a", {"batch_size": 0}, "^batch_size=0: should be greater than or equal to 1"),
        ("classifier", "a", {"topk": 1}, r"^topk: .*did you mean top_k"),
        ("classifier", {"text": "\ud800"}, {}, "^input 1 is not UTF-8"),
        ("writer", "a", {"temperature": 0.7}, r"^temperature=0.7: it is for sampling; set sample=true"),
        ("writer", "a", {"sample": True, "top_p": 1.5}, "^top_p=1.5: should be less than or equal to 1"),
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
