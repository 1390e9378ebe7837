"""Refuses paths that lead nowhere, before anyone waits for a model or for the Hub."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from distill.config.folders import RECIPES
from distill.config.settings import Config, FrozenModelConfig, Missing, SourceConfig
from distill.runtime.errors import SettingError, did_you_mean

LISTED = 1000  # entries of a folder among which the nearest name is looked for


def check_paths(config: Config, corpus: bool = True) -> None:
    """Raises SettingError for a file or folder that is not there; `corpus`: whether that is read, too."""
    for setting, path in _models(config):
        if path is not None and looks_local(path):
            refuse_missing(setting, path)
    if config.resume not in ("auto", "strict", "never"):
        _check_resume(config.resume)
    for setting, path in _texts_to_read(config, corpus):
        if path is not None and not glob.has_magic(path) and "://" not in path:
            refuse_missing(setting, path)


def _check_resume(resume: str) -> None:
    """Refuse a value of `resume` that is neither one of its words nor a folder."""
    if not looks_local(resume) and not Path(resume).exists():
        nearest = did_you_mean(resume, ("auto", "strict", "never"))
        raise SettingError(
            f"not known{nearest}",
            setting="resume",
            value=resume,
            cure="give auto, strict, never, or a checkpoint folder",
        )
    refuse_missing("resume", resume)


def looks_local(path: str) -> bool:
    """Whether a value can be no name on the Hub, which is NAME or OWNER/NAME: it begins with . / or ~, or is deeper.

    What other folders lie beside it does not matter, so that a name means the same wherever a command is started.
    """
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def refuse_missing(setting: str, path: str) -> None:
    """Raises SettingError, with the nearest name of what is there, where there is no such file or folder."""
    wanted = Path(path).expanduser()
    try:
        if wanted.exists():
            return
        there = next(folder for folder in wanted.absolute().parents if folder.is_dir())
        part = wanted.absolute().relative_to(there).parts[0]
        entries = sorted(entry.name for entry, _ in zip(os.scandir(there), range(LISTED), strict=False))
    except OSError as error:
        raise SettingError(
            f"cannot be read: {error.strerror}", setting=setting, value=path, cure="correct the path"
        ) from error
    recipe = wanted.name if wanted.parent.name == "runs" and (RECIPES / f"{wanted.name}.yaml").is_file() else None
    first = "" if recipe is None else f", or run +recipe={recipe} first, which makes it"
    raise SettingError(
        f"no such file or folder, {there} has no {part}{did_you_mean(part, entries)}",
        setting=setting,
        value=path,
        cure=f"correct the path{first}",
    )


def _models(config: Config) -> Iterator[tuple[str, str | None]]:
    """The settings that name a model or a tokenizer, with their values; a callable of the user's reads its path."""
    teachers: list[FrozenModelConfig] = [config.teacher, *config.teacher.members.values()]
    for teacher in teachers:
        if teacher.saved:
            yield f"{teacher.group}.path", teacher.path
        yield f"{teacher.group}.tokenizer", teacher.tokenizer
    if config.student.is_saved:
        yield "student.path", config.student.path
    yield "student.tokenizer", config.student.tokenizer


def _texts_to_read(config: Config, corpus: bool) -> Iterator[tuple[str, str | None]]:
    """The settings that name files or folders of text or of an earlier run."""
    if corpus:
        yield "corpus.path", _path_of(config.corpus)
        for name, source in config.corpus.sources.items():
            yield f"corpus.sources.{name}.path", _path_of(source)
        yield "corpus.unlabelled", config.corpus.unlabelled
    yield "evaluate.baseline", config.evaluate.baseline
    if config.evaluate.missing is Missing.stop:
        for name in config.evaluate.sets:
            yield f"evaluate.sources.{name}.path", _path_of(config.evaluate.sources.get(name))


def _path_of(source: SourceConfig | None) -> str | None:
    """What a callable of the user's calls `path` is not known."""
    return None if source is None or source.target is not None else source.path
