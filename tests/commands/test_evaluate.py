"""`distill evaluate`: the scores of a run again, models side by side, other tasks, and what is refused."""

import json
import math
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from job import Shelf, book, distill, results, save_model
from omegaconf import OmegaConf
from prediction_models import save_fine_tuned
from test_fine_tuning import squad, table
from transformers import AutoModelForSequenceClassification, BloomConfig, BloomForCausalLM
from vocabularies import vocabulary_of

from distill.commands.cli import main
from distill.commands.evaluate import REFERENCE, evaluate_models, settings_of
from distill.runs.located import locate
from distill.runtime.errors import SettingError


def evaluate(*arguments: str) -> int:
    """`distill evaluate ARGUMENTS` in this process; gives the exit status."""
    return main(["evaluate", *arguments])


def refused(models: list[str], *settings: str) -> str:
    with pytest.raises(SettingError) as error:
        evaluate_models(models, list(settings))
    assert "\n" not in str(error.value)
    return str(error.value)


def own_text(folder: Path) -> list[str]:
    """The settings of a text of the user's as the set `mine`."""
    (folder / "mine.txt").write_text("".join(book(number).split("***")[2] for number in range(20, 23)))
    return [f"+evaluate.sources.mine={{kind: text, path: {folder}/mine.txt}}"]


def test_the_scores_of_a_run_are_found_again(done: Path, shelf: Shelf) -> None:
    """To the digit, from its settings alone; its teacher's too, and how alike the two are."""
    content = results(done)
    scores = evaluate_models([done], [f"teacher={shelf.teacher}"])
    student, teacher = scores[str(done)], scores["the teacher"]
    for measure in ("perplexity", "pseudo_perplexity"):
        assert student.scores[measure] == content["student"][measure]
        assert teacher.scores[measure] == content["teacher"][measure]
    assert student.agreement == content["agreement"] and teacher.agreement is None
    assert student.parameters == content["student"]["parameters"]
    (vocabulary,) = scores.vocabularies
    assert {name: data.model_dump() for name, data in vocabulary.sets.items()} == content["evaluation"]


def test_models_side_by_side(done: Path, shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, models = tmp_path / "out", [f"model={done / 'student'}", f"model={shelf.teacher}"]
    settings = [
        *own_text(tmp_path),
        "evaluate.sets=[mine]",
        "evaluate.max_sequences=12",
        "evaluate.pseudo_perplexity.fraction=0",
    ]
    for _ in range(2):
        assert evaluate(*models, f"output={folder}", *settings) == 0
    said = capsys.readouterr().out
    assert "Perplexity, mine" in said and "scores.md" in said
    assert {path.name for path in folder.iterdir()} == {
        f"{before}scores.{kind}" for before in ("", "earlier-") for kind in ("json", "md")
    }
    content = json.loads((folder / "scores.json").read_text())
    own, other = content["models"]
    assert own["name"] == str(done / "student") and "pseudo_perplexity" not in own["scores"]
    (compared,) = content["comparisons"]
    ratio = other["scores"]["perplexity"]["mine"] / own["scores"]["perplexity"]["mine"]
    assert compared["bootstrap"]["ratio"] == pytest.approx(ratio, rel=1e-6) and compared["against"] == own["name"]
    assert compared["bootstrap"]["low"] < compared["bootstrap"]["ratio"] < compared["bootstrap"]["high"]
    page = (folder / "scores.md").read_text()
    assert "distill evaluate model=" in page and "Koehn" in page
    command = shlex.split(content["command"])  # as a shell reads it, whatever the settings hold
    assert command == ["cd", os.getcwd(), "&&", "distill", "evaluate", *models, f"output={folder}", *settings]


def test_causal_models_of_two_vocabularies(shelf: Shelf, tmp_path: Path) -> None:
    first, small = save_model(tmp_path / "gpt2"), save_model(tmp_path / "small", layers=2)
    other = save_model(tmp_path / "llama", "llama")
    scores = evaluate_models([first, other, small], [*shelf.corpus[:-2], "evaluate.max_sequences=12"])
    assert scores.task == "clm" and set(scores.measures) == {"perplexity", "bits_per_byte"}
    assert [each.models for each in scores.vocabularies] == [(str(first), str(small)), (str(other),)]
    (compared,) = scores.comparisons
    perplexities = [scores[str(each)].scores["perplexity"]["heldout"] for each in (small, first)]
    assert (compared.model, compared.against) == (str(small), str(first)) and perplexities[0] != perplexities[1]
    assert compared.bootstrap.ratio == pytest.approx(perplexities[0] / perplexities[1], rel=1e-9)
    assert all(math.isfinite(each.scores["bits_per_byte"]["heldout"]) for each in scores.models)
    assert "different vocabularies" in scores.notes[0] and scores.notes[0] in str(scores)
    assert "compare bits per byte" in scores.notes[0]


def test_answers_and_classes(shelf: Shelf, tmp_path: Path) -> None:
    small = ["corpus.sequence_length=32", "train.batch_size=8", "train.steps=2", "train.epochs=null", "precision=fp32"]
    answers, classes = tmp_path / "answers", tmp_path / "classes"
    questions = [f"corpus.path={squad(tmp_path / 'squad')}", "corpus.stride=12", "corpus.max_query=8"]
    reviews = [f"corpus.path={table(tmp_path / 'reviews')}", "corpus.text=review", "corpus.label=stars"]
    start = [f"student.path={shelf.teacher}", *small]
    assert distill("+recipe=squad", *start, *questions, f"hydra.run.dir={answers}") == 0
    assert distill("+recipe=table", *start, *reviews, f"hydra.run.dir={classes}") == 0
    for folder in (answers, classes):
        student = results(folder)["student"]
        (found,) = evaluate_models([folder]).models
        assert found.scores and all(student[measure] == by_set for measure, by_set in found.scores.items())
    elsewhere = shutil.copytree(answers / "student", tmp_path / "elsewhere")
    (found,) = evaluate_models([elsewhere], [*questions, "corpus.sequence_length=32", "precision=fp32"]).models
    assert found.scores["f1"] == results(answers)["student"]["f1"]
    shutil.copytree(classes / "student", tmp_path / "classifier")
    assert "+recipe=table" in refused([str(tmp_path / "classifier")])


@pytest.mark.parametrize("other", ["no", "yes"])
def test_a_classifier_is_scored_where_one_of_its_classes_does_not_occur(other: str, tmp_path: Path) -> None:
    names = {2: "yes", 0: "maybe", 1: "no"}
    model = save_fine_tuned(tmp_path / "model", AutoModelForSequenceClassification, id2label=names)
    (tmp_path / "dev.csv").write_text(f"text,label\nthe old ship,yes\na quiet road,{other}\n")
    given = ["+recipe=table", f"corpus.path={tmp_path / 'dev.csv'}", "corpus.sequence_length=32", "precision=fp32"]
    (found,) = evaluate_models([model], given).models
    assert found.scores["accuracy"]["dev"] in (0, 50, 100)


def test_bad_input_is_one_line(done: Path, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    run = str(done)
    assert refused([]).startswith("model is missing")
    assert "named twice" in refused([run, run])
    assert "no such file or folder" in refused([str(tmp_path / "nowhere")])
    assert refused([run], "train.steps=3").startswith("train.steps is not read where models are only scored")
    assert "is not known" in refused([run], "evaluate.by_set.heldoutt.max_sequences=3")
    assert "evaluate.by_set.heldout.max_sequences=0" in refused([run], "evaluate.by_set.heldout.max_sequences=0")
    assert "for causal models" in refused([run], "evaluate.stride=4")
    assert "one process" in refused([run], "backend=ddp")
    assert "exceeds the" in refused([run], "corpus.sequence_length=4096")
    assert "two commands" in refused([run, str(save_model(tmp_path / "gpt2"))])
    assert "none of the sets" in refused([str(shutil.copytree(done / "student", tmp_path / "plain"))])
    assert "not read with teacher.path=null" in refused([run], "teacher.tokenizer=x")
    assert "beside teacher.members" in refused([run], "teacher=bundled_small", "teacher.members.a.path=x")
    text = tmp_path / "chinese.txt"
    text.write_text("\u8fd9\u662f\u4e00\u6761\u6cb3\u3002" * 300 + "\n", encoding="utf-8")
    said = refused([run], f"+evaluate.sources.mine={{kind: text, path: {text}}}", "evaluate.sets=[mine]")
    assert said.startswith("evaluate.sets: mine: 100.0% of its tokens are not in the vocabulary")
    assert evaluate() == 2


def test_an_output_that_cannot_be_is_refused_before_the_scoring(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.commands.evaluate._score", None)  # a call of it would be a TypeError
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file" / "scores", "/proc/scores"):
        with pytest.raises(SettingError, match=f"^output={output}: no folder can be made there"):
            evaluate_models([done], [], output)
    with pytest.raises(SettingError, match=r"^output=: is empty"):
        evaluate_models([done], [], "")


def test_a_refused_scoring_leaves_no_folder(done: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path):
        with pytest.raises(SettingError, match=r"^evaluate\.sets"):
            evaluate_models([str(done)], ["evaluate.sets=[nothing]"], folder)
    assert tmp_path.is_dir() and not any(tmp_path.iterdir())


def test_models_and_teachers_are_checked_as_in_a_run(shelf: Shelf, tmp_path: Path) -> None:
    """Too short for the sequences, smaller than the tokenizer, or mixing up the documents of a sequence."""
    first, tokens = str(save_model(tmp_path / "gpt2")), len(vocabulary_of("gpt2"))
    short = save_model(tmp_path / "short", max_position_embeddings=16)
    said = refused([first], *shelf.corpus, f"teacher={short}")
    assert said == "corpus.sequence_length=32 exceeds the 16 positions of teacher: lower it"
    poor = save_model(tmp_path / "poor", vocab_size=tokens - 1)
    sizes = f"its vocabulary has {tokens - 1} tokens, but the tokenizer of {poor} has {tokens}"
    assert refused([first], *shelf.corpus, f"teacher={poor}").startswith(f"teacher ({poor}): {sizes}")
    said = refused([str(poor)], *shelf.corpus, f"data.cache={tmp_path / 'cache'}")
    assert said.startswith(f"model={poor}: {sizes}") and not (tmp_path / "cache").exists(), "before text is prepared"
    mixing, packed = tmp_path / "bloom", [*shelf.corpus, "corpus.cross_documents=true"]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = BloomConfig(vocab_size=tokens, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2)
        BloomForCausalLM(config).save_pretrained(mixing)
    vocabulary_of("gpt2").save_pretrained(mixing)
    for setting, model, teacher in ((f"model={mixing}", mixing, []), ("teacher", first, [f"teacher={mixing}"])):
        said = refused([str(model)], *packed, *teacher)
        assert said.startswith(f"{setting}: BloomForCausalLM") and "set corpus.cross_documents=false" in said


@pytest.mark.parametrize(
    ("settings", "message", "given"),
    [
        ({"evaluate": {"measures": {"mine": {"_target_": "os.getcwd"}}}},
         "name code (evaluate.measures.mine._target_=os.getcwd)", "evaluate.measures.mine._target_=own_metrics.Hits"),
        ({"corpus": {"path": "${oc.env:HOME}/books"}},
         "read the environment (corpus.path=${oc.env:HOME}/books)", "corpus.path=BOOKS"),
        ({"data": {"tokens": "s3://other/tokens"}},
         "write prepared sequences elsewhere (data.tokens=s3://other/tokens)", "data.tokens=null"),
    ],
    ids=["code", "environment", "store"],
)  # fmt: skip
def test_the_settings_of_a_run_reach_no_further_than_its_user_says(
    settings: dict[str, Any], message: str, given: str, done: Path, shelf: Shelf, tmp_path: Path
) -> None:
    """A folder may be a stranger's: what its settings name there, the command has to name too."""
    run = tmp_path / "run"
    shutil.copytree(done / "student", run / "student")
    own = OmegaConf.merge(OmegaConf.load(done / "config.yaml"), settings)
    own.evaluate.sources.mine = {"kind": "text", "path": "${corpus.path}"}
    OmegaConf.save(own, run / "config.yaml")
    said = refused([str(run)])
    assert message in said and "evaluate=local" in said
    config, _ = settings_of(locate([str(run)]), [given.replace("BOOKS", str(shelf.books))])
    assert config.evaluate.sources["mine"].path == config.corpus.path == str(shelf.books)
    assert [each.path for each in config.evaluate.own_measures.values()] == ["own_metrics.Hits"] * ("Hits" in given)


def test_another_text_is_cut_as_that_of_the_run(done: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    settings = ["corpus=text", f"corpus.path={tmp_path / 'text.txt'}", "evaluate.sets=[heldout]"]
    config, _ = settings_of(locate([str(done)]), settings)
    assert config.corpus.sequence_length == 32 and config.corpus.kind == "text"
    config, _ = settings_of(locate([str(done)]), ["evaluate=heldout"])
    assert config.evaluate.max_sequences == 8 and config.corpus.path is not None


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("${oc.env:HOME}", True),
        ("s3://${corpus.path}/${a:b}", True),
        ("${corpus.${oc.env:X}}", True),
        ("${${corpus.field}:HOME}", True),
        ("${oc.${corpus.field}:HOME}", True),
        ("${corpus.path}", False),
        ("s3://${corpus.path}/a:b", False),
        ("${..path}", False),
    ],
)
def test_a_resolver_is_told_from_another_setting(text: str, calls: bool) -> None:
    assert ("${" in REFERENCE.sub("", text)) == calls
