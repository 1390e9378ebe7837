"""Texts, conversations, labelled rows and token ids that a program holds, as sources of a run."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distill.config.in_memory import InMemory
from distill.config.settings import SourceConfig
from distill.data.shards.host import FEW_BYTES
from distill.data.sources import Source
from distill.data.sources._in_memory import IDS, source_in_memory
from distill.data.tables.table import TableInMemory
from distill.runtime.errors import SettingError, first_line

if TYPE_CHECKING:
    import datasets

Data = Any  # what `splits_of` takes
TRAIN = "train"
TAKEN = "give a datasets.Dataset or DatasetDict, a list of texts, a DataLoader over token ids, or the path of files"


def splits_of(data: Data, setting: str) -> "Mapping[str, datasets.Dataset]":
    """The data sets of an object by split; one that has no splits is `train` alone.

    Args:
        data: a datasets.Dataset or DatasetDict; a DataFrame of pandas; an iterable of texts or of rows; a DataLoader
            whose data set holds token ids.
        setting: what error lines call it: data or evaluation.

    Raises:
        SettingError: it is something else, or what it gives has no order that a resumed run could find again.
    """
    import datasets

    if isinstance(data, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise SettingError(
            f"{setting} is a streamed data set, of which no row can be found again after an interrupt: give a "
            "datasets.Dataset, or name it: corpus={'kind': 'hub', 'hub': NAME, 'streaming': True}"
        )
    if isinstance(data, datasets.DatasetDict):
        return dict(data)
    if isinstance(data, datasets.Dataset):
        return {TRAIN: data}
    if isinstance(data, torch.utils.data.DataLoader):
        return {TRAIN: _from_rows(_rows_of_loader(data, setting), setting)}
    if isinstance(data, torch.utils.data.IterableDataset):
        raise SettingError(f"{setting} {_no_order(type(data).__name__)}")
    if isinstance(data, torch.utils.data.Dataset):
        return {TRAIN: _from_rows(_by_number(data), setting)}
    if type(data).__name__ == "DataFrame" and type(data).__module__.startswith("pandas"):
        return {TRAIN: datasets.Dataset.from_pandas(data, preserve_index=False)}
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise SettingError(f"{setting} is a {type(data).__name__}: {TAKEN}")
    return {TRAIN: _from_rows(data, setting)}


def _rows_of_loader(loader: Any, setting: str) -> Iterator[Any]:
    """What a loader's data set holds, by number: the run has a seeded order of its own, which resumes."""
    samplers = torch.utils.data.SequentialSampler | torch.utils.data.RandomSampler
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise SettingError(f"{setting} is a DataLoader whose data set {_no_order(type(loader.dataset).__name__)}")
    if not isinstance(loader.sampler, samplers) or getattr(loader.sampler, "replacement", False):
        raise SettingError(
            f"{setting} is a DataLoader with a {type(loader.sampler).__name__}, whose order a resumed run could not "
            f"find again: give its data set, {setting}=loader.dataset, which is read in the run's own seeded order"
        )
    return _by_number(loader.dataset)


def _by_number(data: Any) -> Iterator[Any]:
    return (data[number] for number in range(len(data)))


def _no_order(name: str) -> str:
    return (
        f"is a {name}, whose rows have no numbers, so that a resumed run could not find its place again: give a list "
        "or a data set with numbers"
    )


def _from_rows(rows: Iterable[Any], setting: str) -> "datasets.Dataset":
    """A data set of texts, of mappings, or of token ids."""
    import datasets
    import pyarrow

    held = [_row(row, setting) for row in rows]
    if not held:
        raise SettingError(f"{setting} is empty: {TAKEN}")
    names = dict.fromkeys(name for row in held for name in row)  # `datasets` would take those of the first row alone
    held = [{name: row.get(name) for name in names} for row in held]
    try:
        return datasets.Dataset.from_list(held)
    except (pyarrow.ArrowException, TypeError):  # as of contents that are texts and parts: no column has both
        texts = [{name: _as_text(value) for name, value in row.items()} for row in held]
    try:
        return datasets.Dataset.from_list(texts)
    except (pyarrow.ArrowException, TypeError) as error:
        reason = f"its rows make no columns ({first_line(error)})"
        raise SettingError(reason, setting=setting, cure="give every column values of one type") from error


def _as_text(value: Any) -> Any:
    """A list of mappings, such as messages and tools, as JSON text, as which sources read them too."""
    is_list = isinstance(value, list) and any(isinstance(item, Mapping) for item in value)
    return json.dumps(value) if is_list else value


def _row(row: Any, setting: str) -> Mapping[str, Any]:
    if isinstance(row, str):
        return {"text": row}
    if isinstance(row, torch.Tensor):
        return {IDS: row.reshape(-1).tolist()}
    if isinstance(row, Mapping):
        return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
    if isinstance(row, list | tuple) and row and isinstance(row[0], torch.Tensor):  # of a TensorDataset
        return _row(row[0], setting)
    if hasattr(row, "tolist") or (isinstance(row, list | tuple) and all(isinstance(one, int) for one in row)):
        return {IDS: list(row.tolist() if hasattr(row, "tolist") else row)}
    raise SettingError(f"{setting} holds a {type(row).__name__}: {TAKEN}")


def in_memory(rows: Any, setting: str, labelled: bool, files: Path) -> InMemory:
    """The rows as what `_target_` names, for a source of text or, where they are labelled, for a table.

    Args:
        setting: what error lines call the settings beside it, such as `corpus`.
        files: a folder for rows that are too many to be sent to the processes that prepare them.
    """
    if rows.format["type"] == "custom":
        raise SettingError(f"{setting} holds a data set with a transform, which a run does not keep: apply it by map()")
    rows = rows.with_format(None)  # a format for training hides columns, and makes tensors of numbers
    digest = _digest(rows)
    if not rows.cache_files and rows.data.nbytes > FEW_BYTES:
        rows = _on_disk(rows, files / digest[:16])
    title = f"{type(rows).__name__} in memory"
    make = _table(rows, title) if labelled else _source(rows, digest, title, setting)
    return InMemory(f"{type(rows).__name__} of {len(rows):,} rows", digest, make)


def _source(rows: Any, digest: str, title: str, setting: str) -> Callable[..., Source]:
    def source(
        field: str | None = None,
        prompt: str | None = None,
        template: str | None = None,
        target_role: str | None = None,
        fraction: float = 1.0,
    ) -> Source:
        settings = SourceConfig(
            kind="hub", field=field, prompt=prompt, template=template, target_role=target_role, fraction=fraction
        )
        return source_in_memory(rows, digest, title, settings, setting)

    return source


def _table(rows: Any, title: str) -> Callable[..., TableInMemory]:
    def table(
        text: str = "text",
        second: str | None = None,
        label: str = "label",
        regression: bool = False,
        split: str = TRAIN,
        quotes: bool | None = None,
    ) -> TableInMemory:
        columns: Mapping[str, Any] = {
            "text": text,
            "second": second,
            "label": label,
            "regression": regression,
            "quotes": quotes,
        }
        return TableInMemory(hub=title, split=split, held=rows, **columns)

    return table


def _digest(rows: Any) -> str:
    """sha256 of the content of a data set, column by name, row by row."""
    digest = hashlib.sha256()
    for row in rows.with_format(None):
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _on_disk(rows: Any, folder: Path) -> Any:
    """The same rows from files, which other processes open themselves."""
    import datasets

    datasets.disable_progress_bars()
    rows.save_to_disk(str(folder))
    return datasets.load_from_disk(str(folder))
