"""Rows of a `datasets.Dataset` that a program holds, as a source of texts, conversations or sequences of token ids."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from distill.config.component import Component
from distill.config.settings import SourceConfig
from distill.data.chat_template import COLUMNS, LIST, holds_messages
from distill.data.readers import Record
from distill.data.sources import Document, Source
from distill.data.sources._files import Content, FileSource
from distill.data.sources.chat import Chat
from distill.data.sources.hub import Hub
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"  # the usual columns of what a tokenizer gave
NO_TARGET = -100  # label of a token that is no target, in transformers


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
    def text_files(self) -> list[str]:
        return []

    @property
    def identity(self) -> Any:
        """Any column may have been used, so all of them count."""
        return [type(self).__name__, self.digest, self.field, self.settings.fraction, *self.written]

    @property
    def data_set(self) -> Any:
        return self.rows


@dataclass(frozen=True)
class TextsInMemory(RowsInMemory, Hub):
    """A column of texts, which may stand behind prompts."""


@dataclass(frozen=True)
class ChatsInMemory(RowsInMemory, Chat):
    """A column of conversations."""


@dataclass(frozen=True)
class IdsInMemory(RowsInMemory, Hub):
    """A column of token ids, each row a document.

    Ids that stand around a document are dropped at the ends of a row, as the format of sequences sets them itself.
    Those inside, such as an end-of-text token between two documents of a row, stay. Padding is dropped anywhere. What
    `labels` mark by -100 is a prompt, as in transformers.
    """

    around: frozenset[int] = frozenset()  # of the tokenizer: the ids that the format of sequences sets itself
    padding: int | None = None  # the id that pads, and does nothing else
    has_prompts: bool = False

    token_ids = True
    usual_field = IDS

    @property
    def prompts(self) -> bool:  # type: ignore[override]
        return self.has_prompts

    @property
    def nothing(self) -> str:
        return "no token in it counts as a target"

    def for_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> Self:
        """Raises SettingError where ids are beyond the vocabulary, or `labels` other than the tokens themselves."""
        import pyarrow.compute

        columns, are_ids = {self.field, LABELS} & {*self.rows.column_names}, True
        for part in self.rows.with_format("arrow").select_columns(columns).iter(10_000):
            ends = pyarrow.compute.min_max(pyarrow.compute.list_flatten(part[self.field])).as_py()
            if ends["max"] is not None and (ends["min"] < 0 or ends["max"] >= len(tokenizer)):
                raise SettingError(
                    f"{self.setting}.field={self.field}: {self.settings.hub} has ids from {ends['min']} to "
                    f"{ends['max']}, but the tokenizer has {len(tokenizer):,} tokens: give ids of this tokenizer, or "
                    "texts"
                )
            are_ids = are_ids and (LABELS not in columns or part[self.field].equals(part[LABELS]))
        pad = tokenizer.pad_token_id
        others = {getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "bos", "eos")}
        around = frozenset(number for number in {pad, *others} if number is not None)
        source = replace(self, around=around, padding=None if pad in others else pad)
        if are_ids:  # the usual copy
            return source
        rows = self.rows.select_columns([name for name in (self.field, MASK, LABELS) if name in self.rows.column_names])
        are_whole = [bool(source._tokens(row)[1].all()) for row in rows]  # of all rows, which are checked so
        return replace(source, has_prompts=not all(are_whole))

    def content(self, record: Record, name: str) -> Content:
        """The ids and their loss mask; nothing where none is a target, or there is none."""
        ids, loss_mask = self._tokens(record)
        if len(ids) and not loss_mask.any():
            return ()
        return (
            Document(name, "", ids=ids, loss_mask=None if loss_mask.all() else loss_mask) if record[self.field] else ""
        )

    def _tokens(self, record: Record) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a row between those around it, without padding, and which of them are targets."""
        ids, labels, is_read = (record.get(name) for name in (self.field, LABELS, MASK))
        where, rows = f"{self.setting}.field={self.field}", self.settings.hub
        if not isinstance(ids, list) or not all(isinstance(number, int) for number in ids):
            raise SettingError(f"{where}: a row of {rows} holds no list of token ids")
        is_read = np.array(is_read or [1] * len(ids), bool)
        if len(is_read) != len(ids):
            raise SettingError(
                f"{where}: a row of {rows} has {len(ids):,} ids and {len(is_read):,} numbers in {MASK}: give "
                "one for each"
            )
        labels, ids = np.array(labels if isinstance(labels, list) else ids, np.int64), np.array(ids, np.int64)
        if len(labels) != len(ids) or ((labels != ids) & (labels != NO_TARGET)).any():
            raise SettingError(
                f"{where}: {rows} has other ids in its column {LABELS}, and what a run predicts is the tokens "
                f"themselves: remove that column, or mark prompts in it by {NO_TARGET}"
            )
        ids, is_target = ids[is_read], labels[is_read] != NO_TARGET
        inside = np.flatnonzero(~np.isin(ids, [*self.around]))
        kept = slice(inside[0], inside[-1] + 1) if len(inside) else slice(0)
        ids, is_target = ids[kept], is_target[kept]
        return ids[ids != self.padding], is_target[ids != self.padding]


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
    first: Any = next((row[field] for row in rows.select_columns([field]) if row[field]), "")
    if isinstance(first, str) and not (holds_messages(first) or (field in COLUMNS and LIST.match(first))):
        return TextsInMemory(settings.changed(field=field), setting, rows=rows, digest=digest)
    if isinstance(first, list) and isinstance(first[0], int):
        return IdsInMemory(settings.changed(field=field), setting, rows=rows, digest=digest)
    return ChatsInMemory(settings.changed(field=field, kind="chat"), setting, rows=rows, digest=digest)


def settings_in_memory(source: SourceConfig) -> SourceConfig:
    """The settings of conversations in memory, as those of files have them; any other source as it is."""
    if (make := source.made_by) is not None and make.in_memory is not None:
        made = make()
        return made.settings if isinstance(made, ChatsInMemory) else source
    return source
