"""Texts, conversations, labelled rows and token ids that a program holds, as sources of a run."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distill.config.component import InMemory
from distill.config.settings import SourceConfig
from distill.data.build_tokens import FEW_BYTES
from distill.data.sources import Source
from distill.data.sources._in_memory import IDS, source_in_memory
from distill.data.tables.table import TableInMemory
from distill.runtime.errors import SettingError, first_line

if TYPE_CHECKING:
    import datasets

TRAIN = "train"
TAKEN = "give a datasets.Dataset or DatasetDict, a list of texts or of token ids, or the path of files"


def splits_of(data: Any, setting: str) -> "Mapping[str, datasets.Dataset]":
    """The data sets of an object by split; one that has no splits is `train` alone.

    Args:
        data: a datasets.Dataset or DatasetDict; a DataFrame of pandas; an iterable of texts or of rows; a data set of
            torch that holds token ids.
        setting: what error lines call it: data or evaluation.

    Raises:
        SettingError: it is something else, or what it gives has no order that a resumed run could find again.
    """
    import datasets

    streams = datasets.IterableDataset | datasets.IterableDatasetDict
    if isinstance(data, streams | torch.utils.data.IterableDataset | torch.utils.data.DataLoader):
        problem = f"a {type(data).__name__}, of which a resumed run could not find its place again"
        cure = "give a list or a data set with numbers, such as loader.dataset; a stream of the Hub is "
        raise SettingError(
            problem, setting=setting, cure=f"{cure}corpus={{'kind': 'hub', 'hub': N, 'streaming': True}}"
        )
    if isinstance(data, datasets.DatasetDict):
        return dict(data)
    if isinstance(data, datasets.Dataset):
        return {TRAIN: data}
    if type(data).__name__ == "DataFrame" and type(data).__module__.startswith("pandas"):
        return {TRAIN: datasets.Dataset.from_pandas(data, preserve_index=False)}
    rows: Any = data
    if isinstance(data, torch.utils.data.Dataset):
        rows = (data[number] for number in range(len(data)))  # type: ignore[arg-type]
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise SettingError(f"a {type(data).__name__}", setting=setting, cure=TAKEN)
    return {TRAIN: _from_rows(rows, setting)}


def _from_rows(rows: Iterable[Any], setting: str) -> "datasets.Dataset":
    """A data set of texts, of mappings, or of token ids."""
    import datasets
    import pyarrow

    held = [_row(row, setting) for row in rows]
    if not held:
        raise SettingError("empty", setting=setting, cure=TAKEN)
    names = dict.fromkeys(name for row in held for name in row)  # `datasets` would take those of the first row alone
    try:
        return datasets.Dataset.from_list([{name: row.get(name) for name in names} for row in held])
    except (pyarrow.ArrowException, TypeError) as error:
        reason = f"its rows make no columns ({first_line(error)})"
        raise SettingError(reason, setting=setting, cure="give every column values of one type") from error


def _row(row: Any, setting: str) -> dict[str, Any]:
    if isinstance(row, str):
        return {"text": row}
    if isinstance(row, Mapping):
        return {name: _value(value) for name, value in row.items()}
    if isinstance(row, list | tuple) and row and isinstance(row[0], torch.Tensor):  # of a TensorDataset
        row = row[0]
    ids = _value(row)
    if isinstance(ids, list | tuple) and all(isinstance(number, int) for number in ids):
        return {IDS: list(ids)}
    raise SettingError(f"it holds a {type(row).__name__}", setting=setting, cure=TAKEN)


def _value(value: Any) -> Any:
    """A list of an array; messages and tools as JSON text, which sources read too, as no column has texts and parts."""
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return json.dumps(value)
    return value.tolist() if hasattr(value, "tolist") else value


def in_memory(rows: Any, setting: str, labelled: bool, files: Path) -> InMemory:
    """The rows as what `_target_` names, for a source of text or, where they are labelled, for a table.

    Args:
        setting: what error lines call the settings beside it, such as `corpus`.
        files: a folder for rows that are too many to be sent to the processes that prepare them.
    """
    import datasets

    if rows.format["type"] == "custom":
        problem, cure = "a data set with a transform, which a run does not keep", "apply it by map()"
        raise SettingError(problem, setting=setting, cure=cure)
    rows = rows.with_format(None)  # a format for training hides columns, and makes tensors of numbers
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    if not rows.cache_files and rows.data.nbytes > FEW_BYTES:
        datasets.disable_progress_bars()
        rows.save_to_disk(str(files / digest.hexdigest()[:16]))  # from where other processes open them themselves
        rows = datasets.load_from_disk(str(files / digest.hexdigest()[:16]))
    title = f"{type(rows).__name__} in memory"
    make: Callable[..., Any] = partial(TableInMemory, hub=title, held=rows)
    if not labelled:
        make = _source(rows, digest.hexdigest(), title, setting)
    return InMemory(f"{type(rows).__name__} of {len(rows):,} rows", digest.hexdigest(), make)


def _source(rows: Any, digest: str, title: str, setting: str) -> Callable[..., Source]:
    def source(
        field: str | None = None,
        prompt: str | None = None,
        template: str | None = None,
        fraction: float = 1.0,
    ) -> Source:
        settings = SourceConfig(kind="hub", field=field, prompt=prompt, template=template, fraction=fraction)
        return source_in_memory(rows, digest, title, settings, setting)

    return source
