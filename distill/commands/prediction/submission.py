"""The files that GLUE's server takes: the prediction for every example of a test set, by its index.

The names of the files and the way labels are written are those of the server's instructions: names of classes for MNLI,
QNLI and RTE, numbers of classes for the others, values for STS-B.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from distill.commands.prediction.records import files_read
from distill.commands.prediction.settings import PredictConfig
from distill.commands.prediction.text_classes import class_names, class_outputs
from distill.data.lines import Record
from distill.data.tables._rows import SUFFIXES, kind_of, read_files
from distill.data.tables.glue import TASKS, GlueTask
from distill.models.kind import CLASSES
from distill.models.loaded import LoadedModel
from distill.runtime.errors import SettingError, choose
from distill.runtime.files import atomic, refuse_overwriting

BY_NAME = ("mnli", "qnli", "rte")  # whose labels are written as names
LARGEST = 5.0  # value of STS-B; the least is 0


def write_submissions(
    model: LoadedModel, task: str | None, path: str, output: str, settings: PredictConfig, overwrite: bool = False
) -> list[tuple[Path, int]]:
    """Write the predictions for the test set of a task of GLUE.

    Args:
        task: one of GLUE's here; None: that of the run that trained the model.
        path: the file of a test set, or the folder of a task or of all tasks, whose files called `test*` are taken.
        output: a file `*.tsv`, or a folder, in which files get the names that the server requires.
        overwrite: whether those may replace files that are there.

    Returns:
        The files that were written, and how many predictions each has.

    Raises:
        SettingError: another kind of model, an unknown task, a test set that cannot be read, or a file in the way.
    """
    name = task or (str(model.corpus.get("task")) if model.corpus.get("kind") == "glue" else None)
    if name is None:
        raise SettingError("task=null: output=*.tsv is GLUE's form of predictions; name the task, such as task=sst2")
    choose("task", name, TASKS)
    if model.kind is not CLASSES:
        raise SettingError(f"model={model.path} is a {model.kind.noun}: a task of GLUE needs a {CLASSES.noun}")
    folder, files = Path(output).expanduser(), test_files(path, TASKS[name])
    if not folder.is_dir() and len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise SettingError(f"output={output}: {path} has several test sets ({names}); give an existing folder")
    order = class_order(model, name)
    targets = [folder / submission_name(name, file) if folder.is_dir() else folder for file in files]
    if twice := next((target for number, target in enumerate(targets) if target in targets[:number]), None):
        names = ", ".join(file.name for file, target in zip(files, targets, strict=True) if target == twice)
        raise SettingError(
            f"input={path}: the predictions of {names} would all be {twice.name}: name one of them as input=FILE"
        )
    for target in targets:
        if not target.absolute().parent.is_dir():
            raise SettingError(f"output={target}: the folder {target.parent} does not exist; create it first")
        refuse_overwriting(target, f"output={output}", files_read(model.path, files), overwrite)
    return [
        (target, _write(model, name, file, target, order, settings))
        for file, target in zip(files, targets, strict=True)
    ]


def test_files(path: str, task: GlueTask) -> list[Path]:
    """The test sets of a task at this path, sorted by name. Raises SettingError where there is none."""
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    folder = root / task.folder if (root / task.folder).is_dir() else root
    files = sorted(folder.glob("test*")) if folder.is_dir() else []
    files = [file for file in files if file.name.lower().endswith(SUFFIXES)]
    if not files:
        raise SettingError(f"input={path}: it has no test set of {task.folder} (test*.tsv); correct the path")
    return files


def submission_name(task: str, file: Path) -> str:
    """The file name that the server requires for the predictions of a test set."""
    if task != "mnli":
        return f"{TASKS[task].folder}.tsv"
    if "diagnostic" in file.name.lower() or file.name.lower().startswith("ax"):
        return "AX.tsv"
    return "MNLI-mm.tsv" if "mismatched" in file.name.lower() else "MNLI-m.tsv"


def class_order(model: LoadedModel, task: str) -> list[int]:
    """The task's class for each class of the model, by their names; as they stand where the model's have no names.

    Raises:
        SettingError: the model has other classes, or gives values where the task has classes.
    """
    names, expected = [name.lower() for name in class_names(model)], list(TASKS[task].classes)
    if names and all(name.startswith("label_") for name in names) and len(names) == len(expected):
        return list(range(len(names)))
    if sorted(names) != sorted(expected):
        names_shown, needed = ", ".join(names) or "values", ", ".join(expected) or "values"
        raise SettingError(
            f"model={model.path} gives {names_shown}, and task={task} has {needed}: choose another model"
        )
    return [expected.index(name) for name in names]


def _write(model: LoadedModel, task: str, file: Path, target: Path, order: list[int], settings: PredictConfig) -> int:
    rows = list(_rows(file, TASKS[task]))
    outputs = class_outputs(model, [record for _, record in rows], settings)
    if order:
        numbers = np.array(order)[outputs.argmax(-1)]
        labels = [TASKS[task].classes[n] if task in BY_NAME else str(n) for n in numbers.tolist()]
    else:
        labels = [f"{value:.3f}" for value in np.clip(outputs[:, 0], 0.0, LARGEST)]
    with atomic(target) as new, new.open("w", encoding="utf-8") as stream:
        stream.write("index\tprediction\n")
        stream.writelines(f"{index}\t{label}\n" for (index, _), label in zip(rows, labels, strict=True))
    return len(rows)


def _rows(file: Path, task: GlueTask) -> Iterator[tuple[Any, Record]]:
    """Index and texts of every example of a test set.

    Raises:
        SettingError: an example without them, since the server requires a prediction for each.
    """
    plain = kind_of(file) in ("tsv", "txt")
    texts = (task.tsv_texts or task.texts) if plain else task.texts
    fields = {f"input={file}: {name}": name for name in texts}
    for number, row in enumerate(read_files([file], "input", fields)):
        if row.values is None:
            raise SettingError(f"input={file}: {row.place} has another number of fields than the header; correct it")
        values = [row.values[name] for name in texts]
        if not all(isinstance(value, str) for value in values):
            raise SettingError(
                f"input={file}: {row.place} has no text; add it, as the server requires a prediction for every example"
            )
        index = next((row.values[name] for name in ("index", "id", "idx") if name in row.values), number)
        yield index, dict(zip(("text", "second"), values, strict=False))
