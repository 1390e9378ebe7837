"""Conversations: lists of messages, each with a role and a content, of which those of the assistant are predicted."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from distill.config.settings import DataConfig, SourceConfig
from distill.data import readers
from distill.data.chat_template import (
    ASSISTANT,
    COLUMNS,
    DEFAULT,
    TOOLS,
    ChatTemplate,
    conversation_of,
    plain_text,
    without_nulls,
)
from distill.data.document import Part
from distill.data.readers import Numbered, Record
from distill.data.sources import LeftOut
from distill.data.sources._files import Content, FileSource, Found
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Chat(FileSource):
    """Conversations as a chat template writes them: that of the settings, else the tokenizer's, else `DEFAULT`.

    A column `tools` goes to the template; where `prompt` names a column of messages, none of these counts.
    """

    template: ChatTemplate | None = None  # until the tokenizer is known

    word = "conversation"
    suffixes = (".jsonl", ".parquet")
    format = "jsonl"
    by_split = True
    takes = ("prompt", "template", "encoding")
    usual_field = COLUMNS[0]
    prompts = True

    @classmethod
    def find(cls, settings: SourceConfig, setting: str, data: DataConfig) -> Self | None:
        text_of(settings, setting)
        return super().find(settings, setting, data)

    def for_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> Self:
        return replace(self, template=template_for(self.settings, self.setting, tokenizer))

    @property
    def counted(self) -> str:
        template = self.template
        is_tokenizers = self.settings.template is None and template is not None and template.text != DEFAULT
        return ", of which the assistant's messages count" + ", by the chat template of the tokenizer" * is_tokenizers

    @property
    def written(self) -> list[Any]:
        template = self.template
        how = [] if template is None else [template.text, sorted(template.tokenizer.special_tokens_map.items())]
        return [*how, self.settings.prompt]

    @property
    def nothing(self) -> str:
        return "no message of the assistant in it counts"

    def columns(self, names: list[str]) -> dict[str, str]:
        columns = super().columns(names) | {f"{self.setting}.field": self._column(names)}
        return columns | ({"column": TOOLS} if TOOLS in names else {})

    def of_columns(self, row: Record) -> Record:
        return {name: without_nulls(value) for name, value in row.items()}

    def contents(self, records: Numbered, place: str, start: int = 0) -> Iterator[Found]:
        """As of all sources; tools that the template has no place for are named as left out."""
        lost = 0

        def watched() -> Numbered:
            nonlocal lost
            for number, record in records:
                lost += bool(record.get(TOOLS))
                yield number, record

        is_lost = self.template is None or not self.template.writes_tools
        for content in super().contents(watched() if is_lost else records, place, start):
            yield content
            for _ in range(lost):
                yield LeftOut(place, f"the column {TOOLS} of conversations, for which their template has no place")
            lost = 0

    def content(self, record: Record, name: str) -> Content:
        """The document of a conversation; none where no token of it is a target."""
        column, prompt = self._column(record), self.settings.prompt
        for setting, field in (("field", column), ("prompt", prompt)):
            if field is not None and field not in record:
                raise readers.no_field(field, list(record), f"{self.setting}.{setting}")
        try:
            conversation = conversation_of(record, column, prompt)
        except ValueError as error:
            raise SettingError(f"column {error}", setting=f"{self.setting}.field", value=column) from error
        if not any(message["role"] == ASSISTANT for message in conversation.messages[conversation.given :]):
            return ()
        if self.template is None:
            return (Part(plain_text(conversation)),)
        document = self.template.document(conversation, name)
        assert document.loss_mask is not None
        return document if document.loss_mask.any() else ()

    def _column(self, columns: Iterable[str]) -> str:
        """The column of the conversations, among these of a record or a file."""
        columns = [*columns]
        return self.settings.field or next((column for column in COLUMNS if column in columns), self.field)


def text_of(settings: SourceConfig, setting: str) -> str | None:
    """The chat template that the settings name, from its file where it is one; None: they name none.

    Raises:
        SettingError: the file cannot be read, or the text has no loop over messages.
    """
    text = template = settings.template
    if template is None:
        return None
    if template.endswith(".jinja"):
        try:
            text = Path(template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SettingError(f"{setting}.template={template} cannot be read ({error}): give a Jinja file") from error
    if text is None or "{%" not in text:
        raise SettingError(
            f"{setting}.template={template} has no loop over messages ({{% for %}}): give a chat template in Jinja, "
            "best as FILE.jinja"
        )
    return text


def template_for(settings: SourceConfig, setting: str, tokenizer: "PreTrainedTokenizerBase") -> ChatTemplate:
    """The chat template of conversations for a tokenizer. Raises SettingError where none can be chosen."""
    text = text_of(settings, setting)
    given = f"null: the chat template of {tokenizer.name_or_path or 'the tokenizer'}" if text is None else text
    name = f"{setting}.template={settings.template or given}"[:100]
    found = ChatTemplate.of(tokenizer, name, f"{setting}.template", text)
    found = found or ChatTemplate.of(tokenizer, f"{setting}.template=null", f"{setting}.template", DEFAULT)
    assert found is not None
    return found


def chat_template(sources: Iterable[SourceConfig], tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """How conversations of a corpus are written, in Jinja, as tokenizers of transformers keep it.

    Returns:
        None where there are no conversations, or some are written in another way than others.
    """
    chats = [source for source in sources if source.made_by is None and source.kind == "chat"]
    ways = {template_for(source, "corpus", tokenizer).text for source in chats}
    return ways.pop() if len(ways) == 1 else None
