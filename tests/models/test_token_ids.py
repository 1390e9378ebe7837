"""Ids that a tokenizer gives and a model has no embedding for are refused by the names of both, before any is used."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from job import distill, library
from tiny import VOCAB, make_model, make_tokenizer

from distill.commands import export
from distill.commands.api.pair import load_pair
from distill.commands.prediction import predict
from distill.evaluation.text_scores import score
from distill.models.load import load_tokenizer
from distill.models.loaded import LoadedModel, load_model
from distill.runtime.errors import SettingError

TOO_LARGE = f"its vocabulary has {VOCAB - 1} tokens, but the tokenizer of"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an embedding for the last token of the tokenizer beside it, which no test's text has."""
    folder = tmp_path_factory.mktemp("models") / "small"
    make_model("bert", 2, vocab=VOCAB - 1).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def refusal(door: Callable[[], object]) -> str:
    with pytest.raises(SettingError) as raised:
        door()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def with_ids(folder: Path, **ids: int) -> Path:
    """A folder with a tokenizer in which these tokens have other ids."""
    make_tokenizer().save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= ids
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("number", [VOCAB, 70_000, 800_000_000, 2**31, 2**32 - 1])
def test_an_id_beyond_the_number_of_tokens(number: int, tmp_path: Path) -> None:
    """Counts by id would take 6 GB for the third of these, and ids of 16 bits hold none of the last four."""
    folder = with_ids(tmp_path / "tokenizer", less=number)
    content = json.loads((folder / "tokenizer.json").read_text())
    del content["model"]["vocab"]["##less"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    line = refusal(lambda: load_tokenizer("teacher.tokenizer", str(folder)))
    assert line.startswith(f"teacher.tokenizer={folder}: its tokenizer has {VOCAB} tokens, but the id of less is")
    assert f"{number:,}" in line


def test_an_id_that_is_put_around_a_text(tmp_path: Path) -> None:
    folder = with_ids(tmp_path / "tokenizer")
    content = json.loads((folder / "tokenizer.json").read_text())
    around = {"id": "[CLS]", "ids": [99_999], "tokens": ["[CLS]"]}
    pieces = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": [*pieces, pieces[1]]}
    content["post_processor"]["special_tokens"] = {"[CLS]": around}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    line = refusal(lambda: load_tokenizer("model", str(folder)))
    assert line.startswith(f"model={folder}") and "the id 99,999" in line and "post_processor" in line


def test_a_tokenizer_larger_than_its_model(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(small)
    monkeypatch.setattr(export, "need_packages", lambda: None)
    for door in (
        lambda: load_model(path, "cpu"),
        lambda: predict(path, "the [MASK] of", device="cpu"),
        lambda: score("the of", path, device="cpu"),
        lambda: export.export(export.ExportArguments(model=path)),
        lambda: load_pair(path, device="cpu"),
        lambda: LoadedModel.of(make_model("bert", 2, vocab=VOCAB - 1), make_tokenizer()),
    ):
        line = refusal(door)
        assert f"its vocabulary has {VOCAB - 1} tokens, but the tokenizer" in line and f"has {VOCAB}" in line
    assert refusal(lambda: load_model(path, "cpu")).startswith(f"model={path}: {TOO_LARGE} {path} has {VOCAB}: choose")


def test_a_larger_one_beside_the_models_of_a_command(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    books = [f"corpus.path={library(tmp_path / 'books', 2)}", f"data.cache={tmp_path / 'cache'}"]
    books += ["corpus.sequence_length=24", "data.workers=1"]
    run = ["+recipe=distilbert_gutenberg", *books, f"hydra.run.dir={tmp_path / 'run'}"]
    sets = ["evaluate.sets=[heldout]", "corpus.max_unknown=1"]
    teacher = ["teacher=pretrained", f"teacher.path={small}"]
    for arguments, start in (
        ([*run, *teacher, "student.layers=[0]"], f"teacher ({small}): {TOO_LARGE} {small}"),
        (
            [*run, "teacher=none", "objective=mlm", "student=pretrained", f"student.path={small}"],
            f"student: {TOO_LARGE} {small}",
        ),
        (["predict", f"model={small}", "text=the [MASK] of"], f"model={small}: {TOO_LARGE} {small}"),
        (["evaluate", f"model={small}", *books, *sets], f"model={small}: {TOO_LARGE} {small}"),
    ):
        capsys.readouterr()
        assert distill(*arguments) == 2
        shown = capsys.readouterr().err.splitlines()
        assert shown[-1].startswith(f"distill: {start}"), shown[-3:]
