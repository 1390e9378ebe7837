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
from labelled import squad, table
from omegaconf import OmegaConf
from transformers import BloomConfig, BloomForCausalLM
from vocabularies import vocabulary_of

from distill.commands.cli import main
from distill.commands.evaluate import REFERENCE, evaluate_models, settings_of
from distill.runs.located import locate
from distill.runtime.errors import SettingError


def refused(models: list[Any], *settings: str, output: Any = None) -> str:
    with pytest.raises(SettingError) as error:
        evaluate_models(models, list(settings), output)
    assert "\n" not in str(error.value)
    return str(error.value)


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


def test_models_side_by_side(done: Path, shelf: Shelf, tmp_path: Path, capsys: Any) -> None:
    folder, models = tmp_path / "out", [f"model={done / 'student'}", f"model={shelf.teacher}"]
    (tmp_path / "mine.txt").write_text("".join(book(number).split("***")[2] for number in range(20, 23)))
    settings = [f"+evaluate.sources.mine={{kind: text, path: {tmp_path}/mine.txt}}", "evaluate.sets=[mine]"]
    settings += ["evaluate.max_sequences=12", "evaluate.pseudo_perplexity.fraction=0"]
    for _ in range(2):
        assert main(["evaluate", *models, f"output={folder}", *settings]) == 0
    assert "Perplexity, mine" in capsys.readouterr().out
    files = {"scores.json", "scores.md"}
    assert {path.name for path in folder.iterdir()} == files | {f"earlier-{name}" for name in files}
    content = json.loads((folder / "scores.json").read_text())
    own, other = content["models"]
    assert own["name"] == str(done / "student") and "pseudo_perplexity" not in own["scores"]
    (compared,) = content["comparisons"]
    ratio = other["scores"]["perplexity"]["mine"] / own["scores"]["perplexity"]["mine"]
    found = compared["conclusion"]
    assert found["difference"] == pytest.approx(ratio, rel=1e-6) and compared["against"] == own["name"]
    assert found["low"] < found["difference"] < found["high"]
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
    assert compared.conclusion.difference == pytest.approx(perplexities[0] / perplexities[1], rel=1e-9)
    assert all(math.isfinite(each.scores["bits_per_byte"]["heldout"]) for each in scores.models)
    assert "compare bits per byte" in scores.notes[0] and scores.notes[0] in str(scores)


def test_answers_and_classes(shelf: Shelf, tmp_path: Path) -> None:
    small = ["corpus.sequence_length=32", "train.batch_size=8", "train.steps=2", "train.epochs=null", "precision=fp32"]
    small += ["train.snapshots=[1]", "optimizer.lr=1e-2"]
    answers, classes = tmp_path / "answers", tmp_path / "classes"
    questions = [f"corpus.path={squad(tmp_path / 'squad')}", "corpus.stride=12", "corpus.max_query=8"]
    reviews = [f"corpus.path={table(tmp_path / 'reviews')}", "corpus.text=review", "corpus.label=stars"]
    for recipe, folder, data in (("squad", answers, questions), ("table", classes, reviews)):
        assert (
            distill(f"+recipe={recipe}", f"student.path={shelf.teacher}", *small, *data, f"hydra.run.dir={folder}") == 0
        )
        student = results(folder)["student"]
        scores = evaluate_models([folder, folder / "snapshots" / "step-1"])
        found, before = scores.models
        assert found.scores and all(student[measure] == by_set for measure, by_set in found.scores.items())
        assert {compared.measure for compared in scores.comparisons} == found.scores.keys()
        for compared in scores.comparisons:
            gains = before.scores[compared.measure]["dev"] - found.scores[compared.measure]["dev"]
            conclusion = compared.conclusion
            assert conclusion.difference == pytest.approx(gains, abs=1e-9) and conclusion.n in (12, 20)
    elsewhere = shutil.copytree(answers / "student", tmp_path / "elsewhere")
    (found,) = evaluate_models([elsewhere], [*questions, "corpus.sequence_length=32", "precision=fp32"]).models
    assert found.scores["f1"] == results(answers)["student"]["f1"]
    words = "evaluate.sources.dev.stride=0: give a number"
    assert words in refused([elsewhere], *questions, "corpus.sequence_length=32", "evaluate.sources.dev.stride=0")
    assert "+recipe=table" in refused([shutil.copytree(classes / "student", tmp_path / "classifier")])


def test_bad_input_is_one_line(done: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    (tmp_path / "chinese.txt").write_text("这是一条河。" * 300 + "\n", encoding="utf-8")
    chinese = "+evaluate.sources.mine={kind: text, path: chinese.txt}"
    for settings, words in (
        (["train.steps=3"], "train.steps is not read where models are only scored"),
        (["evaluate.by_set.heldoutt.max_sequences=3"], "is not known"),
        (["evaluate.by_set.heldout.max_sequences=0"], "evaluate.by_set.heldout.max_sequences=0"),
        (["evaluate.stride=4"], "for causal models"),
        (["backend=ddp"], "one process"),
        (["corpus.sequence_length=4096"], "exceeds the"),
        (["teacher.tokenizer=x"], "not read with teacher.path=null"),
        (["teacher=bundled_small", "teacher.members.a.path=x"], "beside teacher.members"),
        (["evaluate.max_sequences=many"], "evaluate.max_sequences"),
        (["evaluate.rowz=1"], "rowz"),
        (["teacher=served", "teacher.url=http://a/v1", "teacher.model=m", "teacher.tokenizer=t"], "is not scored"),
        ([chinese, "evaluate.sets=[mine]"], "evaluate.sets: mine: 100.0% of its tokens are not in the vocabulary"),
    ):
        assert words in refused([done], *settings)
    plain = shutil.copytree(done / "student", tmp_path / "plain")
    for models, words in (
        ([], "model is missing"),
        ([done, done], "named twice"),
        ([tmp_path / "nowhere"], "no such file or folder"),
        ([done, save_model(tmp_path / "gpt2")], "two commands"),
        ([plain], "none of the sets"),
    ):
        assert words in refused(models)
    before = {*tmp_path.rglob("*")}
    for folder in (tmp_path / "new", tmp_path):
        assert refused([done], "evaluate.sets=[nothing]", output=folder).startswith("evaluate.sets")
    assert {*tmp_path.rglob("*")} == before
    monkeypatch.setattr("distill.commands.evaluate._score", None)  # a call of it would be a TypeError
    for output in (tmp_path / "chinese.txt" / "scores", "/proc/scores"):
        assert refused([done], output=output).startswith(f"output={output}: no folder can be made there")
    assert refused([done], output="").startswith("output=: is empty")


def test_models_and_teachers_are_checked_as_in_a_run(shelf: Shelf, tmp_path: Path) -> None:
    """Too short for the sequences, smaller than the tokenizer, or mixing up the documents of a sequence."""
    first, tokens = save_model(tmp_path / "gpt2"), len(vocabulary_of("gpt2"))
    short = save_model(tmp_path / "short", max_position_embeddings=16)
    assert "32 exceeds the 16 positions of teacher" in refused([first], *shelf.corpus, f"teacher={short}")
    poor = save_model(tmp_path / "poor", vocab_size=tokens - 1)
    sizes = f"its vocabulary has {tokens - 1} tokens, but the tokenizer of {poor} has {tokens}"
    assert refused([first], *shelf.corpus, f"teacher={poor}").startswith(f"teacher ({poor}): {sizes}")
    said = refused([poor], *shelf.corpus, f"data.cache={tmp_path / 'cache'}")
    assert said.startswith(f"model={poor}: {sizes}") and not (tmp_path / "cache").exists(), "before text is prepared"
    mixing, packed = tmp_path / "bloom", [*shelf.corpus, "corpus.cross_documents=true"]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = BloomConfig(vocab_size=tokens, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2)
        BloomForCausalLM(config).save_pretrained(mixing)
    vocabulary_of("gpt2").save_pretrained(mixing)
    for setting, model, teacher in ((f"model={mixing}", mixing, []), ("teacher", first, [f"teacher={mixing}"])):
        said = refused([model], *packed, *teacher)
        assert said.startswith(f"{setting}: BloomForCausalLM") and "set corpus.cross_documents=false" in said


@pytest.mark.parametrize(
    ("setting", "value", "given"),
    [
        ("evaluate.measures.mine._target_", "os.getcwd", "own_metrics.Hits"),
        ("corpus.path", "${oc.env:HOME}/books", "BOOKS"),
        ("data.tokens", "s3://other/tokens", "null"),
    ],
    ids=["code", "environment", "store"],
)
def test_the_settings_of_a_run_reach_no_further_than_its_user_says(
    setting: str, value: str, given: str, done: Path, shelf: Shelf, tmp_path: Path
) -> None:
    """A folder may be a stranger's: what its settings name there, the command has to name too."""
    run = tmp_path / "run"
    shutil.copytree(done / "student", run / "student")
    own = OmegaConf.load(done / "config.yaml")
    OmegaConf.update(own, setting, value, force_add=True)
    own.evaluate.sources.mine = {"kind": "text", "path": "${corpus.path}"}
    OmegaConf.save(own, run / "config.yaml")
    said = refused([run])
    assert f"({setting}={value})" in said and "evaluate=local" in said
    config, _ = settings_of(locate([str(run)]), [f"{setting}={given.replace('BOOKS', str(shelf.books))}"])
    assert config.evaluate.sources["mine"].path == config.corpus.path == str(shelf.books)
    assert [each.path for each in config.evaluate.own_measures.values()] == ["own_metrics.Hits"] * ("Hits" in given)


def test_another_text_is_cut_as_that_of_the_run(done: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    settings = ["corpus=text", f"corpus.path={tmp_path / 'text.txt'}", "evaluate.sets=[heldout]"]
    config, _ = settings_of(locate([str(done)]), settings)
    assert config.corpus.sequence_length == 32 and config.corpus.kind == "text"
    config, _ = settings_of(locate([str(done)]), ["evaluate=heldout"])
    assert config.evaluate.max_sequences == 8 and config.corpus.path is not None


def test_a_resolver_is_told_from_another_setting() -> None:
    calls = ["${oc.env:HOME}", "s3://${corpus.path}/${a:b}", "${corpus.${oc.env:X}}", "${${corpus.field}:HOME}"]
    settings = ["${corpus.path}", "s3://${corpus.path}/a:b", "${..path}"]
    texts = [*calls, "${oc.${corpus.field}:HOME}", *settings]
    assert ["${" in REFERENCE.sub("", text) for text in texts] == [True] * 5 + [False] * 3
