"""Conversations: lists of messages, each with a role and a content, of which those of one role are to be predicted."""

import json
from collections.abc import Iterable
from string import Formatter
from typing import Any, Self

from distill.config.component import Component
from distill.config.settings import DataConfig, SourceConfig
from distill.data import readers
from distill.data.lines import Record
from distill.data.sources import Part
from distill.data.sources._files import Content, FileSource
from distill.runtime.errors import SettingError

TEMPLATE = "<|{role}|>\n{content}\n"
ROLE = "assistant"
ROLE_MARK = "\0role\0"  # stands for a role while a template is filled in
NAMED_ROLE = "message['role']"  # in a template of Jinja


class Chat(FileSource):
    """Each message is written by `template`; what it puts before a content is read only, and so are other roles.

    What the template puts behind the content of a message that counts, counts too: by it a model marks that it has
    finished. The names of special tokens stand for these tokens in the template, and for nothing but text in a content.
    """

    word = "conversation"
    suffixes = (".jsonl", ".jsonl.gz", ".parquet")
    takes = ("template", "target_role", "encoding")
    usual_field = "messages"
    prompts = True
    read = FileSource.from_jsonl

    @classmethod
    def find(cls, settings: SourceConfig, setting: str, data: DataConfig) -> Self | None:
        template_of(settings, setting)
        return super().find(settings, setting, data)

    @property
    def target_role(self) -> str:
        return self.settings.target_role or ROLE

    @property
    def counted(self) -> str:
        return f", of which the messages of {self.target_role} count"

    @property
    def nothing(self) -> str:
        return f"no message in it is of {self.setting}.target_role={self.target_role}"

    def content(self, record: Record, name: str) -> Content:
        """The parts of a conversation; none where no message is of the role."""
        messages = readers.value_of(record, self.field, name, f"{self.setting}.field", list)
        template = template_of(self.settings, self.setting)
        parts: list[Part] = []
        for message in messages:
            role, content = self._role_and_content(message, name)
            before, after = _around_content(template, role)
            counts = role == self.target_role
            parts += [Part(before, False, True), Part(content, counts), Part(after, counts, True)]
        return tuple(parts) if any(part.counts for part in parts) else ()

    def _role_and_content(self, message: Any, name: str) -> tuple[str, str]:
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not (content is None or isinstance(content, str)):
            raise SettingError(
                f"{self.setting}.field={self.field}: a message in {name} is {str(message)[:80]!r}, not a role and a "
                'content: rewrite it to {"role": "user", "content": "..."}'
            )
        return role, content or ""


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
    """How a message is written, with {role} and {content}. Raises SettingError where the settings lack that."""
    # A command line has no good way to write the end of a line.
    text = (TEMPLATE if settings.template is None else settings.template).replace("\\n", "\n")
    try:
        fields = [
            name + (form or "") + (how or "") for _, name, form, how in Formatter().parse(text) if name is not None
        ]
    except ValueError:
        fields = []
    if fields.count("content") != 1 or set(fields) - {"content", "role"}:
        raise SettingError(
            f"{setting}.template={text!r} has to name {{content}} once and may name {{role}}, nothing else; write a "
            "brace that is no field twice"
        )
    return text


def chat_template(sources: Iterable[SourceConfig | Component], start: str | None) -> str | None:
    """How conversations are written, in Jinja, as tokenizers of transformers keep it; a prompt ends with a turn begun.

    Args:
        sources: of a corpus; those of other kinds do not count.
        start: the token that a document begins with; None: it begins with none.

    Returns:
        None where there are no conversations, or some are written in another way than others.
    """
    chats = [source for source in sources if isinstance(source, SourceConfig) and source.kind == "chat"]
    ways = {(template_of(source, "corpus"), source.target_role or ROLE) for source in chats}
    if len(ways) != 1:
        return None
    template, role = ways.pop()
    before, after = _around_content(template, ROLE_MARK)
    turn = _expression(before, NAMED_ROLE) + "{{ message['content'] or '' }}" + _expression(after, NAMED_ROLE)
    prompt = "{% if add_generation_prompt %}" + _expression(before, _quoted(role)) + "{% endif %}"
    return _expression(start or "", NAMED_ROLE) + "{% for message in messages %}" + turn + "{% endfor %}" + prompt


def _expression(text: str, role: str) -> str:
    """A text as an expression of Jinja, so that it stands as it is, ends of lines too; `role` in place of its mark."""
    return "{{ " + f" ~ {role} ~ ".join(map(_quoted, text.split(ROLE_MARK))) + " }}" if text else ""


def _quoted(text: str) -> str:
    """A text as Jinja reads it between quotation marks, which is as JSON writes it but for pairs of surrogates."""
    return json.dumps(text, ensure_ascii=False)
