"""Conversations: lists of messages, each with a role and a content, of which those of one role are to be predicted."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Self

from distill.config.settings import DataConfig, SourceConfig
from distill.data import readers
from distill.data.chat_template import (
    ASSISTANT,
    COLUMNS,
    TOOLS,
    ChatTemplate,
    Conversation,
    conversation_of,
    is_jinja,
    without_nulls,
)
from distill.data.lines import InvalidRecord, LeftOut, Record
from distill.data.sources import Part
from distill.data.sources._files import Content, FileSource, Found
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = "<|{role}|>\n{content}\n"
ROLE_MARK = "\0role\0"  # stands for a role while a template is filled in
NAMED_ROLE = "message['role']"  # in a template of Jinja


@dataclass(frozen=True)
class Chat(FileSource):
    """Conversations by the chat template of the tokenizer, or each message by `template` with {role} and {content}.

    What such a `template` puts before a content is read only, and so are other roles. What it puts behind the content
    of a message that counts, counts too: by it a model marks that it has finished. The names of special tokens stand
    for these tokens in the template, and for nothing but text in a content. A column `tools` goes to the template of
    the tokenizer; where `prompt` names a column of messages, none of these counts.
    """

    jinja: ChatTemplate | None = None  # of the tokenizer, or of `template` for it; None: {role} and {content}

    word = "conversation"
    suffixes = (".jsonl", ".jsonl.gz", ".parquet")
    by_split = True
    takes = ("prompt", "template", "target_role", "encoding")
    usual_field = COLUMNS[0]
    prompts = True
    read = FileSource.from_jsonl

    @classmethod
    def find(cls, settings: SourceConfig, setting: str, data: DataConfig) -> Self | None:
        template_of(settings, setting)
        return super().find(settings, setting, data)

    def for_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> Self:
        jinja = jinja_of(self.settings, self.setting, tokenizer)
        return self if jinja is None else replace(self, jinja=jinja)

    @property
    def target_role(self) -> str:
        return self.settings.target_role or ASSISTANT

    @property
    def counted(self) -> str:
        of_tokenizer = ", by the chat template of the tokenizer" if self.settings.template is None else ""
        return f", of which the messages of {self.target_role} count" + of_tokenizer * (self.jinja is not None)

    @property
    def written(self) -> list[Any]:
        if self.jinja is None:
            how: list[Any] = [None, template_of(self.settings, self.setting), self.settings.target_role]
        else:
            how = [self.jinja.text, sorted(self.jinja.variables.items()), self.jinja.special]
        return how if self.settings.prompt is None else [*how, self.settings.prompt]

    @property
    def nothing(self) -> str:
        return f"no message in it is of {self.setting}.target_role={self.target_role}"

    @property
    def columns(self) -> dict[str, str]:
        """Those that the settings name; others are looked for in each file, or record."""
        named = {"field": self.settings.field, "prompt": self.settings.prompt}
        return {f"{self.setting}.{name}": column for name, column in named.items() if column is not None}

    def parquet_columns(self, path: Path) -> dict[str, str]:
        names = readers.column_names(path)
        columns = {f"{self.setting}.field": self._column(names), **self.columns}
        return columns | ({"column": TOOLS} if TOOLS in names else {})

    def of_columns(self, row: Record | InvalidRecord) -> Record | InvalidRecord:
        return row if isinstance(row, InvalidRecord) else {name: without_nulls(value) for name, value in row.items()}

    def contents(self, records: Iterable[Record | InvalidRecord], place: str, start: int = 0) -> Iterator[Found]:
        """As of all sources; tools that the template has no place for are named as left out."""
        lost = 0

        def watched() -> Iterator[Record | InvalidRecord]:
            nonlocal lost
            for record in records:
                lost += not isinstance(record, InvalidRecord) and bool(record.get(TOOLS))
                yield record

        writes_tools = self.jinja is not None and self.jinja.writes_tools
        for content in super().contents(records if writes_tools else watched(), place, start):
            yield content
            for _ in range(lost):
                yield LeftOut(place, f"the column {TOOLS} of conversations, for which their template has no place")
            lost = 0

    def content(self, record: Record, name: str) -> Content:
        """The parts of a conversation; none where nothing in it counts."""
        conversation = self._conversation(record, name)
        answers = conversation.messages[conversation.given :]
        if not any(message["role"] == self.target_role for message in answers):
            return ()
        parts = self._parts(conversation) if self.jinja is None else self.jinja.parts(conversation)
        return parts if any(part.counts for part in parts) else ()

    def _parts(self, conversation: Conversation) -> tuple[Part, ...]:
        """Its messages by a template with {role} and {content}."""
        template = template_of(self.settings, self.setting)
        parts: list[Part] = []
        for number, message in enumerate(conversation.messages):
            before, after = _around_content(template, message["role"])
            counts = message["role"] == self.target_role and number >= conversation.given
            parts += [Part(before, False, True), Part(message["content"], counts), Part(after, counts, True)]
        return tuple(parts)

    def _column(self, columns: Iterable[str]) -> str:
        """The column of the conversations, among these of a record or a file."""
        columns = [*columns]
        return self.settings.field or next((column for column in COLUMNS if column in columns), self.field)

    def _conversation(self, record: Record, name: str) -> Conversation:
        column, prompt = self._column(record), self.settings.prompt
        for setting, field in (("field", column), ("prompt", prompt)):
            if field is not None and field not in record:
                raise readers.no_field(field, list(record), name, f"{self.setting}.{setting}")
        try:
            return conversation_of(record, column, prompt)
        except ValueError as error:
            raise SettingError(f"in {name}, column {error}", setting=f"{self.setting}.field", value=column) from error


def _around_content(template: str, role: str) -> tuple[str, str]:
    """What a template puts before a content and behind it."""
    around = [""]
    for literal, name, _, _ in Formatter().parse(template):
        around[-1] += literal
        if name == "content":
            around.append("")
        elif name == "role":
            around[-1] += role
    return around[0], around[1]


def template_of(settings: SourceConfig, setting: str) -> str:
    """How a message is written, with {role} and {content}; as by default where the setting is a template in Jinja.

    Raises:
        SettingError: the settings lack that, or name a file that cannot be read.
    """
    text = _text_of(settings, setting)
    if text is None or is_jinja(text):
        return TEMPLATE
    try:
        fields = [
            name + (form or "") + (how or "") for _, name, form, how in Formatter().parse(text) if name is not None
        ]
    except ValueError:
        fields = []
    if fields.count("content") != 1 or set(fields) - {"content", "role"}:
        raise SettingError(
            f"{setting}.template={text!r} has to name {{content}} once and may name {{role}}, nothing else; write a "
            "brace that is no field twice, or give a chat template in Jinja as FILE.jinja"
        )
    return text


def jinja_of(settings: SourceConfig, setting: str, tokenizer: "PreTrainedTokenizerBase") -> ChatTemplate | None:
    """The chat template of conversations for a tokenizer: that of the settings, else its own; None: of neither.

    Raises:
        SettingError: it is no Jinja, or another role than the assistant's is to count, which it does not mark.
    """
    text = _text_of(settings, setting)
    if text is not None and not is_jinja(text):
        return None
    whose = f"null: the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    if text is not None:
        whose = f"{settings.template}: it" if settings.template == text else f"{settings.template}"
    template = ChatTemplate.of(tokenizer, f"{setting}.template={whose[:80]}", f"{setting}.template", text)
    if template is not None and settings.target_role not in (None, ASSISTANT):
        raise SettingError(
            f"{setting}.target_role={settings.target_role}: a chat template marks only what the assistant writes; set "
            f"{setting}.template to one with {{role}} and {{content}}, such as {TEMPLATE!r}"
        )
    return template


def _text_of(settings: SourceConfig, setting: str) -> str | None:
    """The template that the settings name, from its file where it is one; None: they name none."""
    template = settings.template
    if template is None or not template.endswith(".jinja"):
        # A command line has no good way to write the end of a line.
        return template if template is None or is_jinja(template) else template.replace("\\n", "\n")
    try:
        text = Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingError(f"{setting}.template={template} cannot be read ({error}): give a file in Jinja") from error
    if not is_jinja(text):
        raise SettingError(
            f"{setting}.template={template} has no loop over messages ({{% for %}}): give a chat template"
        )
    return text


def chat_template(
    sources: Iterable[SourceConfig], start: str | None, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> str | None:
    """How conversations are written, in Jinja, as tokenizers of transformers keep it; a prompt ends with a turn begun.

    Args:
        sources: of a corpus; those of other kinds do not count.
        start: the token that a document begins with; None: it begins with none.
        tokenizer: of the student; None: one without a chat template.

    Returns:
        None where there are no conversations, or some are written in another way than others.
    """
    chats = [source for source in sources if source.made_by is None and source.kind == "chat"]
    ways = {_as_jinja(source, start, tokenizer) for source in chats}
    return ways.pop() if len(ways) == 1 else None


def _as_jinja(settings: SourceConfig, start: str | None, tokenizer: "PreTrainedTokenizerBase | None") -> str:
    if tokenizer is not None and (jinja := jinja_of(settings, "corpus", tokenizer)) is not None:
        return jinja.text
    role = settings.target_role or ASSISTANT
    before, after = _around_content(template_of(settings, "corpus"), ROLE_MARK)
    turn = _expression(before, NAMED_ROLE) + "{{ message['content'] or '' }}" + _expression(after, NAMED_ROLE)
    prompt = "{% if add_generation_prompt %}" + _expression(before, _quoted(role)) + "{% endif %}"
    return _expression(start or "", NAMED_ROLE) + "{% for message in messages %}" + turn + "{% endfor %}" + prompt


def _expression(text: str, role: str) -> str:
    """A text as an expression of Jinja, so that it stands as it is, ends of lines too; `role` in place of its mark."""
    return "{{ " + f" ~ {role} ~ ".join(map(_quoted, text.split(ROLE_MARK))) + " }}" if text else ""


def _quoted(text: str) -> str:
    """A text as Jinja reads it between quotation marks, which is as JSON writes it but for pairs of surrogates."""
    return json.dumps(text, ensure_ascii=False)
