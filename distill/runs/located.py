"""Finds the models that are to be scored: run folders, snapshots, student folders, model folders, names on the Hub."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.config.models import BUNDLED
from distill.config.rules import looks_local, refuse_missing
from distill.models.kind import CAUSAL, CLASSES, ORDERED, SPANS, saved_class
from distill.models.load import bundled_folder, model_folder, refuse_custom_class, refuse_unfinished, saved_config
from distill.models.loaded import SETTING
from distill.runs.record import Record
from distill.runs.results_file import read_results
from distill.runtime.errors import SettingError, did_you_mean, first_line
from distill.runtime.files import read_yaml

WITH_PATHS = ("corpus", "data", "evaluate")  # groups of settings
PATHS = ("path", "cache", "tokens", "template")  # what paths are called in them
TASKS = ((CAUSAL, "clm"), (SPANS, "spans"), (CLASSES, "classes"))  # models of any other class predict masked tokens


@dataclass(frozen=True)
class Located:
    """A model that is there, before it is loaded."""

    name: str  # as it was given
    path: str  # of its folder, or its name on the Hub
    run: Path | None  # the folder of the run that made it, where its settings still lie
    model_class: str  # by its configuration; empty where that has none

    @property
    def has_order(self) -> bool:
        """Whether it was saved with a head for the order of two segments."""
        return any(self.model_class == name for name in ORDERED.mapping.values())

    @property
    def task(self) -> str:
        """What it predicts, as `objective.task` calls it: that of its run, else what models of its class are for."""
        recorded = None if self.run is None else settings_of_run(self.run).get("objective", {}).get("task")
        of_class = (task for kind, task in TASKS if self.model_class in kind.mapping.values())
        return str(recorded or next(of_class, "mlm"))


def locate(names: Sequence[str]) -> list[Located]:
    """The models of these names.

    Raises:
        SettingError: there is none, one is named twice, or one is not there or of a class of the user's own.
    """
    if not names or not all(name.strip() for name in names):
        raise SettingError("model is missing: give model=FOLDER or model=NAME, a run, a student or a name on the Hub")
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise SettingError(f"model={twice[0]} is named twice: name each model once")
    return [_locate(name) for name in names]


def _locate(name: str) -> Located:
    model_folder(name)  # which refuses the path of no folder
    folder, path, run, record = Path(name).expanduser(), name, None, Record()
    if name in BUNDLED and not folder.exists():
        path = bundled_folder(name)
    else:
        if looks_local(name):
            refuse_missing(SETTING, name)
        refuse_unfinished(SETTING, name)
        try:
            refuse_custom_class(SETTING, name)
        except SettingError as error:
            raise SettingError(
                f"model={name} holds the weights of a module of your own, and this command scores models of "
                "transformers: the report of its run has its scores"
            ) from error
        # It is the run itself, its student, or one of its snapshots.
        inner = [folder.parent] if folder.name == "student" else []
        inner += [folder.parent.parent] if folder.parent.name == "snapshots" else []
        run = next((path for path in [folder, *inner] if (path / "config.yaml").is_file()), None)
        record = Record() if run is None else _record_of(run)
    if record.student.origin is not None and record.student.origin.encodes is not None:
        raise SettingError(
            f"model={name}: no loss of its run trained the head that predicts tokens, and this command scores such "
            "predictions: see the losses in the report of the run"
        )
    try:
        return Located(name, path, run, saved_class(saved_config(SETTING, path)))
    except SettingError as error:
        if folder.exists():
            raise
        raise SettingError(f"{error}{did_you_mean(name, BUNDLED)}") from error


def settings_of_run(folder: Path) -> dict[str, Any]:
    """The settings that a run was made with, nested by the names of the command line.

    Relative paths are absolute ones, from the folder that the run was started in; without a record of that they stay as
    they are.

    Raises:
        SettingError: its config.yaml cannot be read.
    """
    try:
        content = read_yaml(folder / "config.yaml")
    except (OSError, ValueError) as error:
        raise SettingError(f"model={folder}: its config.yaml cannot be read: {first_line(error)}") from error
    settings = {str(name): value for name, value in content.items()} if isinstance(content, dict) else {}
    if (started_in := _record_of(folder).started_in) is not None:
        settings |= {name: _absolute(name, settings[name], started_in) for name in WITH_PATHS if name in settings}
    return settings


def _absolute(name: str, value: Any, started_in: str) -> Any:
    """A setting, or a group of them; a cache that is not there any more is one of now, too."""
    if isinstance(value, dict):
        return {inner: _absolute(str(inner), of, started_in) for inner, of in value.items()}
    if name not in PATHS or not isinstance(value, str) or not value or "://" in value or value[0] in "/~$":
        return value
    path = Path(started_in, value)
    is_text = name == "template" and not value.endswith(".jinja")
    return value if is_text or (name == "cache" and not path.exists()) else str(path)


def formats_of_run(folder: Path) -> dict[str, str]:
    """The number formats that a finished run has recorded, in which it was scored; none where there is no record."""
    return _record_of(folder).precision


def _record_of(run: Path) -> Record:
    """The record of the run in a folder; an empty one where it has none."""
    try:
        return read_results(run / "results.json")
    except (OSError, SettingError):
        return Record()
