"""A model that does not load is one line of Distill's own, without the tables of transformers."""

import json
from pathlib import Path

import pytest
from job import save_model

from distill.config.settings import TeacherConfig
from distill.models.kind import CLASSES, MASKED, SPANS, ModelKind
from distill.models.load import load_pretrained, load_tokenizer
from distill.models.teacher import teacher_tokenizer
from distill.runtime.errors import SettingError


def test_weights_of_other_shapes_are_named_as_such(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model", "bert", 2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    capfd.readouterr()
    with pytest.raises(SettingError, match=r"other shapes than its config\.json") as raised:
        load_pretrained("teacher.path", str(folder), MASKED)
    shown = capfd.readouterr()
    assert "MISMATCH" not in shown.out + shown.err and "report" not in str(raised.value)


def test_weights_that_a_model_has_besides_make_no_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model", "bert", 3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    capfd.readouterr()
    load_pretrained("teacher.path", str(folder), MASKED)
    shown = capfd.readouterr()
    assert "UNEXPECTED" not in shown.out + shown.err


@pytest.mark.parametrize(("kind", "words"), [(MASKED, "mask token"), (SPANS, "causal language model")])
def test_the_tokenizer_of_a_decoder_is_refused_for_what_it_lacks(kind: ModelKind, words: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "gpt2", 2)
    with pytest.raises(SettingError, match=words) as raised:
        load_tokenizer("student.path", str(folder), kind)
    assert raised.value.setting == "student.path" and raised.value.cure
    assert load_tokenizer("student.path", str(folder), CLASSES).pad_token_id is not None


def test_a_folder_without_a_tokenizer_is_named_with_a_setting_that_exists(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"or name where it lies as teacher\.tokenizer=FOLDER$"):
        load_tokenizer("teacher.path", str(tmp_path))
    with pytest.raises(SettingError, match=r"save the tokenizer beside the model$"):
        load_tokenizer("teacher.tokenizer", str(tmp_path))


def test_the_revision_of_a_teacher_is_not_that_of_another_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_model(tmp_path / "model", "bert", 2))
    revisions = []
    monkeypatch.setattr("distill.models.teacher.load_tokenizer", lambda *_: revisions.append(_[-1].revision))
    settings = TeacherConfig(path=folder, revision="a1b2")
    for changed in (settings, settings.changed(tokenizer=folder)):
        teacher_tokenizer(changed)
    assert revisions == ["a1b2", None]
