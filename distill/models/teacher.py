"""Load the frozen teacher: a bundled one, a saved model, or one by the user's callable."""

from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from distill.config.settings import FrozenModelConfig
from distill.models.check import check_model
from distill.models.kind import MASKED, ModelKind, saved_class
from distill.models.load import (
    HubOptions,
    bundled_folder,
    has_one_format,
    load_pretrained,
    load_tokenizer,
    model_folder,
)
from distill.models.loaded import custom_model, tokenizer_in_memory
from distill.models.precision import in_fp32
from distill.runtime.errors import SettingError

TITLES = {"bundled_small": "the small bundled teacher", "bundled_deep": "the deep bundled teacher"}
# The layers that student.layers=auto takes of a bundled teacher, as a search has found them once for so many.
STARTS = {"bundled_small": [0, 1], "bundled_deep": [0, 1, 2]}


def teacher_path(settings: FrozenModelConfig, setting: str = "teacher") -> str:
    """The folder or Hub name of the teacher that `setting` names. Raises SettingError where none is given."""
    if settings.path is None:
        raise SettingError(f"{setting}.path=null: give a model folder, a run folder or a name on the Hub")
    return bundled_folder(settings.path) if settings.bundled else settings.path


def load_teacher(
    settings: FrozenModelConfig,
    kind: ModelKind = MASKED,
    mapped: bool = False,
    setting: str = "teacher",
    has_head: bool = True,
    gpu: torch.device | None = None,
) -> tuple[Any, PreTrainedTokenizerBase, str]:
    """The frozen teacher in evaluation mode, its tokenizer and its name for the report.

    Args:
        mapped: as `load_pretrained` has it; a model of the user's is in memory, but is not checked yet either.
        setting: what error lines call it.
        has_head: else its head, which nobody is to read, begins at random, the same one whenever it is loaded.
        gpu: where a saved one is from the start, in the format of its files, which the ranks of a host read once for
            all; `in_fp32` opens it for what is computed as published. None: each has it in fp32 on the host; so has
            one whose files have weights in several formats.
    """
    if (make := settings.custom) is not None:
        tokenizer = teacher_tokenizer(settings, kind, setting)
        model = custom_model(make, settings.path, kind, tokenizer=tokenizer)
        if not mapped:
            check_model(model, setting, kind)
        return model.requires_grad_(False).eval(), tokenizer, make.title
    path = teacher_path(settings, setting)
    if settings.bundled and kind is not MASKED:
        raise SettingError(
            f"{setting}.path={settings.path} is a {MASKED.noun}, and this objective learns from a {kind.noun}: give "
            f"one as {setting}.path=FOLDER" + (" (gpt2_pretrain makes one)" if kind.causal else "")
        )
    with nullcontext() if has_head else torch.random.fork_rng([]):
        if not has_head:
            torch.default_generator.manual_seed(0)
        model = load_pretrained(
            f"{setting}.path", path, kind, _hub(settings), new_heads=not has_head, mapped=mapped or gpu is not None
        )
    if gpu is not None and not mapped:
        if not has_one_format(path, _hub(settings)):
            return load_teacher(settings, kind, mapped, setting, has_head)
        model.to(gpu)  # before a file may be cut or written anew
        with in_fp32(model, gpu):
            check_model(model, f"{setting}.path={path}", kind)
    model.requires_grad_(False).eval()
    return model, teacher_tokenizer(settings, kind, setting), TITLES.get(settings.path or "", path)


def lacks_head(settings: FrozenModelConfig, kind: ModelKind) -> bool:
    """Whether a saved teacher was saved without the head of its kind, as its configuration tells; False without one.

    Over the vocabulary an encoder alone has none; that of a task has a model once it is fine-tuned.
    """
    if not settings.saved or settings.path is None or (kind.vocabulary and kind.heads):
        return False
    try:
        folder = model_folder(settings.path)
        config = AutoConfig.from_pretrained(folder, **_hub(settings).arguments(folder))
    except Exception:  # whatever a folder holds: the loading of the model says what is wrong with it
        return False
    saved = saved_class(config)
    if not kind.vocabulary:
        return saved not in ("", *kind.classes(config.model_type))
    return saved == MODEL_MAPPING_NAMES.get(config.model_type)


def teacher_tokenizer(
    settings: FrozenModelConfig, kind: ModelKind = MASKED, setting: str = "teacher"
) -> PreTrainedTokenizerBase:
    """The tokenizer of a teacher, whose weights are not read. Raises SettingError where there is none."""
    make = settings.custom
    if make is not None and (held := tokenizer_in_memory(make, kind)) is not None:
        return held
    path = teacher_path(settings, setting) if make is None and not settings.served else settings.path
    named, hub = f"{setting}.path", _hub(settings)
    if not settings.bundled and settings.tokenizer is not None:
        # teacher.revision is of the repository of teacher.path
        named, path, hub = f"{setting}.tokenizer", settings.tokenizer, hub._replace(revision=None)
    if path is None:
        raise SettingError(f"{setting}.tokenizer=null: give the folder or Hub name of the tokenizer of your teacher")
    return load_tokenizer(named, path, kind, hub)


def _hub(settings: FrozenModelConfig) -> HubOptions:
    return HubOptions() if settings.bundled else HubOptions(settings.revision, settings.trust_remote_code)
