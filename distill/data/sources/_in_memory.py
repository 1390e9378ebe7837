"""Rows of a `datasets.Dataset` that a program holds, as a source of texts, conversations or sequences of token ids."""

from dataclasses import dataclass
from typing import Any, Self

from distill.config.component import Component
from distill.config.settings import SourceConfig
from distill.data.chat_template import COLUMNS
from distill.data.lines import Record
from distill.data.sources import Source
from distill.data.sources._files import Content, FileSource
from distill.data.sources.chat import Chat
from distill.data.sources.hub import Hub
from distill.runtime.errors import SettingError

IDS = "input_ids"  # the usual column of what a tokenizer gave


@dataclass(frozen=True)
class RowsInMemory(FileSource):
    """What sources of rows have in common; `settings.hub` is what names the rows in messages."""

    rows: Any = None  # a datasets.Dataset
    digest: str = ""  # sha256 of its content

    def made_by(self, settings: Component) -> Self:
        return self

    def describe(self) -> str:
        return f"{self.settings.hub}{self.counted}"

    @property
    def identity(self) -> Any:
        """Any column may have been used, so all of them count."""
        return [type(self).__name__, self.digest, self.field, self.settings.fraction, *self.written]

    def _hub_rows(self) -> Any:
        return self.rows


@dataclass(frozen=True)
class TextsInMemory(RowsInMemory, Hub):
    """A column of texts, which may stand behind prompts."""


@dataclass(frozen=True)
class ChatsInMemory(RowsInMemory, Chat):
    """A column of conversations."""


@dataclass(frozen=True)
class IdsInMemory(RowsInMemory, Hub):
    """A column of token ids, each row a document; as text they are numbers, which `Source.token_ids` announces."""

    token_ids = True
    usual_field = IDS

    def content(self, record: Record, name: str) -> Content:
        """The ids where `attention_mask`, if there is one, is not 0."""
        ids, mask = record.get(self.field), record.get("attention_mask")
        if not isinstance(ids, list) or not all(isinstance(number, int) for number in ids):
            raise SettingError(f"{self.setting}.field={self.field}: a row of {name} holds no list of token ids")
        return " ".join(str(number) for number, read in zip(ids, mask or [1] * len(ids), strict=True) if read)

    def check_ids(self, vocabulary: int) -> None:
        import pyarrow.compute

        columns = self.rows.select_columns([self.field]).with_format("arrow")
        for batch in columns.iter(10_000):
            ids = pyarrow.compute.list_flatten(batch[self.field])
            ends = pyarrow.compute.min_max(ids).as_py()
            if len(ids) and (ends["min"] < 0 or ends["max"] >= vocabulary):
                raise SettingError(
                    f"{self.setting}.field={self.field}: {self.settings.hub} has ids from {ends['min']} to "
                    f"{ends['max']}, but the tokenizer has {vocabulary:,} tokens: give ids of this tokenizer, or texts"
                )


def source_in_memory(rows: Any, digest: str, name: str, settings: SourceConfig, setting: str) -> Source:
    """The source of a data set's rows, by what its column holds: texts, conversations or token ids.

    Raises:
        SettingError: it has no such column.
    """
    settings = settings.changed(hub=name, path=None)
    usual = next((column for column in ("text", *COLUMNS, IDS) if column in rows.column_names), None)
    if (field := settings.field or usual) not in rows.column_names:
        wanted = "text, messages or input_ids" if field is None else field
        raise SettingError(
            f"{setting}: {name} has no column {wanted}; it has {', '.join(rows.column_names)}: name the column as "
            f"{setting}.field, and one of prompts as {setting}.prompt"
        )
    first = rows[0][field] if len(rows) else ""
    if not isinstance(first, list) or not first:
        return TextsInMemory(settings.changed(field=field), setting, rows=rows, digest=digest)
    if isinstance(first[0], int):
        return IdsInMemory(settings.changed(field=field), setting, rows=rows, digest=digest)
    return ChatsInMemory(settings.changed(field=field, kind="chat"), setting, rows=rows, digest=digest)


def settings_in_memory(source: SourceConfig | Component) -> SourceConfig | Component:
    """The settings of conversations in memory, as those of files have them; any other source as it is."""
    if isinstance(source, Component) and source.in_memory is not None:
        made = source()
        return made.settings if isinstance(made, ChatsInMemory) else source
    return source
