"""Models by a callable of the user's: read, saved with what loads them, and refused by name where that cannot be."""

from pathlib import Path
from typing import Any

import own_models
import pytest
import torch
from tiny import VOCAB, make_rows, make_tokenizer

from distill.config.component import Component
from distill.config.settings import TeacherConfig
from distill.models.blocks import depth_of
from distill.models.check import check_model
from distill.models.export_folder import export
from distill.models.kind import MASKED
from distill.models.language_model import LAST, LanguageModel, OutputSpec, hidden_widths
from distill.models.load import load_pretrained
from distill.models.loaded import custom_model, load_weights, model_digest
from distill.models.teacher import load_teacher
from distill.report.use import use_of_student
from distill.runs.describe import call_of, origin_of
from distill.runtime.errors import SettingError

IDS = torch.from_numpy(make_rows(3).astype("int64"))


def component(name: str, setting: str = "teacher", **arguments: Any) -> Component:
    return Component(setting, f"own_models.{name}", arguments, optional=("path",))


@pytest.fixture(params=["shifted_bert", "Convolutions"])
def name(request: Any) -> str:
    return str(request.param)


def saved(name: str, folder: Path) -> Any:
    """A student of the user's, saved as a run does; its card is README.md."""
    torch.manual_seed(4)
    model = custom_model(component(name, "student"), None).eval()
    made = component(name, "student")
    origin = origin_of(model, made.path, causal=False, call=call_of(made, 12, {}))
    export(model, make_tokenizer(), folder, use_of_student(origin, type(model).__name__).code)
    return model


def test_the_card_loads_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(name, tmp_path / "student")
    code = (tmp_path / "student" / "README.md").read_text()
    monkeypatch.chdir(tmp_path / "student")
    found: dict[str, Any] = {}
    exec(code, found)
    with torch.no_grad():
        own, again = (getattr(out, "logits", out) for out in (model(IDS), found["model"].eval()(IDS)))
    torch.testing.assert_close(again, own)
    assert found["tokenizer"].get_vocab() == make_tokenizer().get_vocab()


def test_it_is_the_next_teacher(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "student")
    settings = TeacherConfig(**{"_target_": f"own_models.{name}", "path": str(tmp_path)})
    teacher, tokenizer, title = load_teacher(settings, MASKED)
    assert title == f"own_models.{name}" and tokenizer is not None and not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert model_digest(teacher, tokenizer) == model_digest(model, tokenizer)


def test_without_its_callable_it_is_refused(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "student")
    with pytest.raises(SettingError) as error:
        load_pretrained("teacher.path", str(tmp_path))
    assert "teacher=custom" in str(error.value) and "teacher._target_=" in str(error.value)


def test_weights_of_another_module_are_refused(tmp_path: Path) -> None:
    saved("Convolutions", tmp_path)
    with pytest.raises(SettingError, match=f"student.path={tmp_path}.*does not fit a Convolutions"):
        load_weights(own_models.Convolutions(width=8), "student.path", str(tmp_path))
    with pytest.raises(SettingError, match=r"student\.path=/nowhere"):
        load_weights(own_models.Convolutions(), "student.path", "/nowhere")


def test_a_plain_module_is_read_like_any_other() -> None:
    model = own_models.Convolutions(depth=3).eval()
    assert depth_of(model) == 3 and hidden_widths(model, (1, LAST)) == [24, 24]
    positions = torch.tensor([0, 5, 14])
    with torch.no_grad():
        outputs = LanguageModel(model)({"input_ids": IDS}, None, OutputSpec(True, positions, (0, LAST)))
        logits = LanguageModel(model).logits(outputs.head_rows, VOCAB)
    torch.testing.assert_close(logits, model(IDS).flatten(0, 1)[positions])
    torch.testing.assert_close(outputs.hidden[LAST], model.base_model(IDS))


def test_what_is_no_language_model_is_refused() -> None:
    model = own_models.Blind()
    model.weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(SettingError, match=r"base_model, get_output_embeddings.*docs/how-to/extend\.md"):
        check_model(model, "student")
