"""The models of a pair that a program holds or names: what they are, and the tokenizer that they share."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.config.errors import parse
from distill.config.settings import BundledTeacherConfig, OneTeacherConfig, SavedTeacherConfig, StudentConfig
from distill.config.teacher import BUNDLED
from distill.models.check import check_model
from distill.models.kind import CAUSAL, MASKED, ModelKind
from distill.models.loaded import LoadedModel, kind_of, without_bars
from distill.models.student import check_student, tokenizer_of
from distill.models.teacher import load_teacher, teacher_path
from distill.models.ties import settle_ties
from distill.runs.tokenizers import how_they_differ, refuse_layers
from distill.runtime.errors import SettingError


def trainable_student(student: LoadedModel, teacher: Any, length: int, kind: ModelKind) -> tuple[Any, str]:
    """A student in memory, which is trained itself, and where it was loaded from."""
    model = student.model
    if model is teacher:
        raise SettingError("student is the very model of the teacher: give a copy of it, as copy.deepcopy makes one")
    settle_ties(model)
    check_student(model, length, kind)
    is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
    if student.path and is_frozen:  # by `load_model`, whatever the model is for
        model.requires_grad_(True)
    elif is_frozen:
        raise SettingError(
            "student: requires_grad is off in all of its weights, so nothing would be trained: call "
            "requires_grad_(True) on it"
        )
    return model.float().train(), student.path


def student_tokenizer(student: LoadedModel | StudentConfig, teacher: LoadedModel) -> PreTrainedTokenizerBase:
    """The student's own tokenizer where it has one that differs from the teacher's; else the teacher's.

    Raises:
        SettingError: a student from the teacher's layers has another one, or it is to be trained on a corpus.
    """
    if isinstance(student, LoadedModel):
        tokenizer = student.tokenizer
    elif student.tokenizer == "corpus":
        raise SettingError("student.tokenizer=corpus: no corpus is here to train a tokenizer on: name a folder of one")
    else:
        tokenizer = tokenizer_of(student, teacher.kind) or teacher.tokenizer
    if tokenizer.get_vocab() == teacher.tokenizer.get_vocab():
        return teacher.tokenizer
    if not isinstance(student, LoadedModel):
        named = f"student.tokenizer={student.tokenizer}"
        refuse_layers(student, how_they_differ(named, tokenizer, teacher.tokenizer))
    return tokenizer


def frozen_teacher(teacher: str | Path | LoadedModel) -> LoadedModel:
    """A frozen masked or causal teacher. Raises SettingError where there is none."""
    if isinstance(teacher, LoadedModel):
        kind, settings = teacher.kind, None
    else:
        settings = _settings_of(str(teacher))
        kind = kind_of("teacher", teacher_path(settings))
    if kind not in (MASKED, CAUSAL):
        raise SettingError(f"teacher={teacher} is a {kind.noun}: choose a masked or a causal language model")
    if isinstance(teacher, LoadedModel):
        teacher.model.requires_grad_(False).float().eval()
        settle_ties(teacher.model)
        check_model(teacher.model, "teacher", kind)
        return teacher
    assert settings is not None
    with without_bars():
        model, tokenizer, _ = load_teacher(settings, kind)
    return LoadedModel(model, tokenizer, kind, teacher_path(settings))


def _settings_of(teacher: str) -> OneTeacherConfig:
    if teacher in BUNDLED:
        return parse(BundledTeacherConfig, {"kind": teacher}, "teacher")
    return SavedTeacherConfig(path=teacher)
