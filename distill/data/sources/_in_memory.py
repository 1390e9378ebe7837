"""Rows of a `datasets.Dataset` that a program holds, as a source of texts, conversations or sequences of token ids."""

from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from distill.config.component import Component
from distill.config.settings import SourceConfig
from distill.data.chat_template import COLUMNS, LIST, holds_messages
from distill.data.lines import Record
from distill.data.sources import Part, Source
from distill.data.sources._files import Content, FileSource
from distill.data.sources.chat import Chat
from distill.data.sources.hub import Hub
from distill.data.token_ids import INSIDE, ids_around
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"  # the usual columns of what a tokenizer gave
UNCOUNTED = -100  # label of a token that is no target, in transformers


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
    def text_files(self) -> list[Path]:
        return []

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
    """A column of token ids, each row a document; as text they are numbers, which `Source.token_ids` announces.

    Ids that stand around a document are dropped at the ends of a row, as the format of sequences sets them itself.
    Those inside, such as an end-of-text token between two documents of a row, stay. Padding is dropped anywhere. What
    `labels` mark by -100 is a prompt, as in transformers.
    """

    around: frozenset[int] = frozenset()  # of the tokenizer
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
        """Raises SettingError where `labels` are other ids than the tokens themselves."""
        others = (getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "bos", "eos"))
        pad = None if tokenizer.pad_token_id in others else tokenizer.pad_token_id
        source = replace(self, around=ids_around(tokenizer), padding=pad)
        if LABELS not in self.rows.column_names:
            return source
        columns = self.rows.select_columns([self.field, LABELS]).with_format("arrow")[:]
        if columns[self.field].equals(columns[LABELS]):  # the usual copy, which needs no look at each row
            return source
        rows = self.rows.select_columns([name for name in (self.field, MASK, LABELS) if name in self.rows.column_names])
        count = [all(counts for _, counts in source._words(row)) for row in rows]  # of all rows, which are checked so
        return replace(source, has_prompts=not all(count))

    def content(self, record: Record, name: str) -> Content:
        """The ids, in parts where some of them do not count; nothing where none does."""
        words = self._words(record)
        if all(counts for _, counts in words):
            return " ".join(word for word, _ in words)
        if not any(counts for _, counts in words):
            return ()
        stretches = [(counts, " ".join(word for word, _ in of)) for counts, of in groupby(words, key=itemgetter(1))]
        return tuple(Part(f" {text}" if number else text, counts) for number, (counts, text) in enumerate(stretches))

    def _words(self, record: Record) -> list[tuple[str, bool]]:
        """The ids of a row where `attention_mask`, if there is one, is not 0, each with whether it counts.

        What the tokenizer of numbers drops counts as the id beside it does, so that it makes no parts.
        """
        ids = self._checked(record)
        labels, mask = record.get(LABELS), record.get(MASK) or [1] * len(ids)
        labels = labels if isinstance(labels, list) else ids
        read = [(number, label) for number, label, is_read in zip(ids, labels, mask, strict=True) if is_read]
        inside = [place for place, (number, _) in enumerate(read) if number not in self.around]
        words: list[tuple[str, bool]] = []
        for place, (number, label) in enumerate(read):
            if not inside:
                words.append((str(number), True))
            elif not inside[0] <= place <= inside[-1] or number == self.padding:
                words.append((str(number), words[-1][1] if words else read[inside[0]][1] != UNCOUNTED))
            else:
                words.append((f"{INSIDE if number in self.around else ''}{number}", label != UNCOUNTED))
        return words

    def _checked(self, record: Record) -> list[int]:
        ids, labels, where = record.get(self.field), record.get(LABELS), f"{self.setting}.field={self.field}"
        if not isinstance(ids, list) or not all(isinstance(number, int) for number in ids):
            raise SettingError(f"{where}: a row of {self.settings.hub} holds no list of token ids")
        if (mask := record.get(MASK)) and len(mask) != len(ids):
            raise SettingError(
                f"{where}: a row of {self.settings.hub} has {len(ids):,} ids and {len(mask):,} numbers in {MASK}: give "
                "one for each"
            )
        if isinstance(labels, list) and labels != ids:
            pairs = zip(labels, ids, strict=False)
            if len(labels) != len(ids) or any(label not in (number, UNCOUNTED) for label, number in pairs):
                raise SettingError(
                    f"{where}: {self.settings.hub} has other ids in its column {LABELS}, and what a run predicts is "
                    f"the tokens themselves: remove that column, or mark prompts in it by {UNCOUNTED}"
                )
        return ids

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
