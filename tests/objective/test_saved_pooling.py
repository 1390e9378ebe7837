"""Sentence encoders are pooled as their folder says: modules.json and 1_Pooling of sentence-transformers."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model, make_objective, only

from distill.models.export_folder import is_of_export
from distill.models.pooling import OF_EXPORT, SAVED_AS, SavedPooling, pooled, save_pooling, saved_pooling
from distill.report.use import VECTORS
from distill.runtime.errors import SettingError


def encoder(folder: Path, fields: dict[str, Any] | None, *further: str) -> Any:
    """A BERT whose folder has these modules; no file for None."""
    model = make_model("bert", 2)
    model.save_pretrained(folder)
    model.config._name_or_path = str(folder)
    if fields is not None:
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *((f"2_{name}", name) for name in further)]
        listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    return model


def bound(teacher: Any, student: Any = None, **settings: Any) -> tuple[str, str]:
    """How both models are pooled."""
    student = student or make_model("bert", 1)
    term = make_objective(only(pooled={"weight": 1.0, **settings}), student, teacher).terms["pooled"]
    return *term.student_reads.pooled, *term.teacher_reads.pooled


@pytest.mark.parametrize("kind", SAVED_AS)
def test_the_kind_is_the_folders(kind: str, tmp_path: Path) -> None:
    """A student without such a file is pooled as its teacher."""
    flags = {f"pooling_mode_{name}": other == kind for other, name in SAVED_AS.items()}
    forms: list[dict[str, Any]] = [flags, {"pooling_mode": kind}, {"pooling_mode": [SAVED_AS[kind]]}]
    for number, fields in enumerate(forms):
        teacher = encoder(tmp_path / str(number), {"word_embedding_dimension": 32, **fields}, "Normalize")
        assert bound(teacher) == (kind, kind)


def test_each_model_is_pooled_as_its_own_folder_says_and_else_by_the_mean(tmp_path: Path) -> None:
    teacher = encoder(tmp_path / "teacher", {"pooling_mode_cls_token": True})
    student = encoder(tmp_path / "student", {"pooling_mode_max_tokens": True})
    assert bound(teacher, student) == ("max", "cls")
    assert bound(encoder(tmp_path / "plain", None)) == ("mean", "mean")


@pytest.mark.parametrize(
    ("modes", "further", "named"),
    [(["cls_token"], ["Dense"], "2_Dense"), (["cls_token", "max_tokens"], [], "1_Pooling"), ([], [], "1_Pooling")],
)
def test_other_vectors_are_refused_or_taken_with_a_warning(
    modes: list[str], further: list[str], named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = encoder(tmp_path / "encoder", {f"pooling_mode_{name}": True for name in modes}, *further)
    with pytest.raises(SettingError, match=r"objective\.pooled\.pooling=auto: .*" + named):
        bound(teacher)
    with caplog.at_level(logging.WARNING):
        assert bound(teacher, pooling="mean")[1] == "mean"
    assert named in caplog.text


@pytest.mark.parametrize("kind", SAVED_AS)
def test_an_export_says_how_its_vectors_are_made_and_its_card_computes_them(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "student"
    model = encoder(folder, None)
    save_pooling(folder, SavedPooling("", kind, normalizes=kind == "cls"), 32)
    assert saved_pooling(model) == SavedPooling(str(folder), kind, normalizes=kind == "cls")
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert all(is_of_export(place) for place in written) and set(OF_EXPORT) <= written
    states, documents = torch.randn(2, 5, 3), torch.tensor([[0, 0, 0, -1, -1], [0, 0, 0, 0, 0]])
    found, mask = pooled(kind, states, documents), (documents >= 0).long().unsqueeze(-1)
    torch.testing.assert_close(found, torch.cat([pooled(kind, states[:1, :3], None), pooled(kind, states[1:], None)]))
    torch.testing.assert_close(eval(VECTORS[kind], {"states": states, "mask": mask}), found)
