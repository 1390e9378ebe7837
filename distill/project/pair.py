"""The models of a run without their weights: what its settings say that they are, on the device meta."""

from typing import Any

import torch
from transformers import AutoConfig

from distill.config import Config, StudentConfig, TeacherConfig
from distill.errors import SettingError, first_line
from distill.models.kind import ModelKind, refuse_other_kind
from distill.models.load import model_folder
from distill.models.student import make_student, tokenizer_of
from distill.models.teacher import teacher_path
from distill.objective.terms import Term
from distill.tasks import find_task
from distill.teacher.members import errors_of, settings_by_member

CURE = "a folder with its config.json is enough, such as one that `config.save_pretrained(FOLDER)` writes"
# What ids stand for changes no cost; RoBERTa counts positions from the one after its padding.
SPECIAL = ("pad", "cls", "sep", "bos", "eos")


class Vocabulary:
    """Stands in for a tokenizer of so many pieces, which a student's configuration takes its sizes from."""

    def __init__(self, size: int, pad: int) -> None:
        self._size = size
        for number, name in enumerate(SPECIAL):
            setattr(self, f"{name}_token_id", pad if name == "pad" else min(number, size - 1))

    def __len__(self) -> int:
        return self._size


def empty_models(config: Config, terms: dict[str, Term]) -> tuple[dict[str, Any], Any]:
    """The teachers by name, and the student, all without memory for weights.

    Raises:
        SettingError: a model whose configuration cannot be read, or that no run could have.
    """
    task = find_task(config.objective.task, terms.values())
    teachers = {}
    for name, own in settings_by_member(config).items():
        with errors_of(name):
            teachers[name] = _teacher(own.teacher, task.teacher_kind(config.student.kind))
    first = next(iter(teachers.values()), None)
    return teachers, _student(config, first, task.kind)


def _teacher(settings: TeacherConfig, kind: ModelKind) -> Any:
    if settings.kind == "custom":
        raise SettingError(
            "teacher.kind=custom: what a callable of yours builds is not known without building it; project the run "
            f"with a model of its size, teacher=pretrained teacher.path=FOLDER ({CURE})"
        )
    return _from_config("teacher.path", teacher_path(settings), kind, settings.revision, settings.trust_remote_code)


def _from_config(setting: str, path: str, kind: ModelKind, revision: str | None = None, trusted: bool = False) -> Any:
    folder = model_folder(path)
    try:
        config = AutoConfig.from_pretrained(folder, revision=revision or "main", trust_remote_code=trusted)
        refuse_other_kind(f"{setting}={path}", config, kind)
        for name, value in kind.fields.items():
            setattr(config, name, value)
        with torch.device("meta"):
            return kind.auto_class.from_config(config, dtype=torch.float32, trust_remote_code=trusted).eval()
    except SettingError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise SettingError(f"{setting}={path} has no configuration to read ({first_line(error)}): {CURE}") from error


def _student(config: Config, teacher: Any | None, kind: ModelKind) -> Any:
    settings = config.student
    if settings.kind == "custom":
        raise SettingError(
            "student.kind=custom: what a callable of yours builds is not known without building it; project the run "
            "with a model of its size, student=pretrained or student=layers"
        )
    if settings.kind == "pretrained":
        if settings.path is None:
            raise SettingError("student.path=null with student.kind=pretrained: give a folder or a name on the Hub")
        return _from_config("student.path", settings.path, kind, trusted=settings.trust_remote_code)
    length, vocabulary = config.corpus.tokens.sequence_length, _vocabulary(config, teacher, kind)
    with torch.device("meta"):
        # Weights that start from the words beside are as many as random ones.
        plain: StudentConfig = settings.changed(start="random")
        return make_student(plain, teacher, vocabulary, length, kind, mapped=True).eval()


def _vocabulary(config: Config, teacher: Any | None, kind: ModelKind) -> Any:
    """The student's own tokenizer, or what is as large as that of the run: the teacher's, or a new one's."""
    own = config.student.tokenizer
    if own not in (None, "corpus"):
        return tokenizer_of(config.student, kind)
    if teacher is None or own == "corpus":
        return Vocabulary(config.corpus.tokens.vocab_size, 0)
    return Vocabulary(int(teacher.config.vocab_size), getattr(teacher.config, "pad_token_id", None) or 0)
