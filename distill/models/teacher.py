"""Load the frozen teacher: an bundled one, a saved model, or one by the user's callable."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.config.folders import HERE
from distill.config.settings import TeacherConfig
from distill.config.teacher import BUNDLED
from distill.models.check import check_model
from distill.models.custom import custom_model
from distill.models.kind import MASKED, ModelKind
from distill.models.load import HubOptions, load_pretrained, load_tokenizer
from distill.runtime.errors import SettingError

TITLES = {"bundled": "the bundled teacher", "bundled_deep": "the deep bundled teacher"}


def bundled_folder(kind: str) -> str:
    """Where a teacher that ships with this package lies, one of `config_teacher.BUNDLED`."""
    return str(HERE / "teacher" / kind)


def teacher_path(settings: TeacherConfig) -> str:
    """The folder or Hub name of a teacher. Raises SettingError where none is given."""
    path = bundled_folder(settings.kind) if settings.kind in BUNDLED else settings.path
    if path is None:
        raise SettingError("teacher.path=null: give a model folder, a run folder or a name on the Hub")
    return path


def load_teacher(
    settings: TeacherConfig, kind: ModelKind = MASKED, mapped: bool = False
) -> tuple[Any, PreTrainedTokenizerBase | None, str]:
    """The frozen teacher in evaluation mode, its tokenizer and its name for the report; None, None, "" for none.

    Args:
        mapped: as `load_pretrained` has it; a model of the user's lies in memory, but is not checked yet either.
    """
    if settings.kind == "none":
        return None, None, ""
    if settings.kind == "custom":
        assert settings.custom is not None
        tokenizer = teacher_tokenizer(settings, kind)
        model = custom_model(settings.custom, settings.path, tokenizer=tokenizer)
        if not mapped:
            check_model(model, "teacher", kind)
        return model.requires_grad_(False).eval(), tokenizer, settings.custom.path
    path = teacher_path(settings)
    if settings.kind in BUNDLED and kind is not MASKED:
        raise SettingError(
            f"teacher.kind={settings.kind} is a {MASKED.noun}, and this objective learns from a {kind.noun}: give one "
            "as teacher=pretrained teacher.path=FOLDER" + (" (gpt2_pretrain makes one)" if kind.causal else "")
        )
    hub = HubOptions(settings.revision, settings.trust_remote_code)
    model = load_pretrained("teacher.path", path, kind, hub, mapped=mapped)
    model.requires_grad_(False).eval()
    name = TITLES.get(settings.kind, path)
    return model, teacher_tokenizer(settings, kind), name


def teacher_tokenizer(settings: TeacherConfig, kind: ModelKind = MASKED) -> PreTrainedTokenizerBase:
    """The tokenizer of a teacher, whose weights are not read. Raises SettingError where there is none."""
    path = settings.path if settings.kind == "custom" else teacher_path(settings)
    hub = HubOptions(settings.revision, settings.trust_remote_code)
    return load_tokenizer(*_tokenizer_path(settings, path), kind, hub)


def _tokenizer_path(settings: TeacherConfig, path: str | None) -> tuple[str, str]:
    """The setting that says where a teacher's tokenizer lies, and its value."""
    if settings.tokenizer is not None:
        return "teacher.tokenizer", settings.tokenizer
    if path is None:
        raise SettingError("teacher.tokenizer=null: give the folder or Hub name of the tokenizer of your teacher")
    return "teacher.path", path
