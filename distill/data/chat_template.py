"""Chat templates in Jinja, as tokenizers have them: the text of a conversation, and what of it counts."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from distill.data.document import Part
from distill.data.lines import Record
from distill.runtime.errors import SettingError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Record  # `role`, `content`, and what else a template may read, such as `reasoning_content`
Spans = list[tuple[int, int]]  # [begin, end) in characters

ASSISTANT = "assistant"
COLUMNS = ("messages", "conversations")  # of conversations; the second is ShareGPT's
TOOLS = "tools"  # the column of what the assistant may call
TEXT = "text"  # the kind of a part of a content
REWRITE = 'rewrite it to {"role": "user", "content": "..."}'
LIST = re.compile(r"\s*\[")  # as a JSON text of messages begins
# The roles of ShareGPT's form by its names of them.
SHAREGPT = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "function": "tool", "observation": "tool"}
ROLES = ("system", "user", ASSISTANT, "tool")

MAX_TEMPLATE = 1 << 20  # characters; the largest in use have some 10,000
MAX_MESSAGES = 1000  # of a conversation, which is rendered twice for each turn of the assistant
MAX_TEXT = 1 << 20  # characters of a conversation, which is tokenized as a whole
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Templates may write today's date, and tomorrow's sequences have to be those of today.
DATE = {"%d": "01", "%-d": "1", "%b": "Jan", "%B": "January", "%m": "01", "%Y": "2025", "%y": "25", "%A": "Wednesday"}
_REPLACED = "".join(f"|replace('{form}', '{text}')" for form, text in DATE.items())
# The environment of transformers drops the end of a line behind a block.
FIXED_DATE = f"{{% macro strftime_now(form) %}}{{{{ form{_REPLACED} }}}}{{% endmacro %}}\n"


def is_jinja(text: str) -> bool:
    """Whether a template is one of Jinja, which has a loop over messages, and none of {role} and {content}."""
    return re.search(r"(?<!\{)\{%", text) is not None


def message_of(item: Any) -> Message:
    """A message with `role` and `content`, of which an absent one is empty; of ShareGPT's `from` and `value`, too.

    A content in parts, as OpenAI has it, is the text of these. A message, and its `tool_calls`, may be JSON texts.

    Raises:
        ValueError: it is no message, or not of text alone; with the reason.
    """
    item = _parsed(item)
    if not isinstance(item, Mapping):
        raise ValueError(f"a message in it is {str(item)[:80]!r}, not a role and a content: {REWRITE}")
    message = {str(name): value for name, value in item.items() if value is not None}
    if "role" not in message and message.get("from") in (*SHAREGPT, *ROLES):
        role = message.pop("from")
        message = {"role": SHAREGPT.get(role, role), "content": message.pop("value", ""), **message}
    message["content"] = _text(message.get("content", ""))
    if isinstance(message.get("tool_calls"), str):
        message["tool_calls"] = _parsed(message["tool_calls"])
    if not isinstance(message.get("role"), str):
        raise ValueError(f"a message in it is {str(item)[:80]!r}, without a role: {REWRITE}")
    return message


def _text(content: Any) -> str:
    """The text of a message's content, which may be in parts. Raises ValueError where it is more than text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"the content of a message in it is {str(content)[:80]!r}, not text: {REWRITE}")
    texts = []
    for part in content:
        kind = part.get("type") or TEXT if isinstance(part, Mapping) else TEXT
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind != TEXT or not isinstance(text, str):
            raise ValueError(
                f"a message in it has a part that is no text ({str(part)[:80]}), which a language model cannot read: "
                "leave that conversation out, or put text in its place"
            )
        texts.append(text)
    return "".join(texts)


def _parsed(value: Any) -> Any:
    """What a JSON text holds; anything but a text as it is. Raises ValueError where the text is no JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON in {value[:40]!r} ({error}): mend it, or give a list") from error


def holds_messages(value: Any) -> bool:
    """Whether a field holds a conversation: a list of messages, or the JSON text of one."""
    if isinstance(value, str) and not LIST.match(value):
        return False
    try:
        items = _parsed(value)
        return isinstance(items, list) and bool(items) and all(message_of(item) for item in items)
    except ValueError:
        return False


class Conversation(NamedTuple):
    """Messages, and what else a template may write of their record."""

    messages: list[Message]
    tools: list[Any] | None = None  # that the assistant may call; None: there are none
    given: int = 0  # messages that are a prompt, of which none counts


def conversation_of(record: Record, column: str, prompt: str | None = None) -> Conversation:
    """The conversation in a column of a record, behind the messages in another one where `prompt` names it.

    Columns, and what is in their lists, may be JSON texts. The column `tools` holds what the assistant may call.

    Raises:
        ValueError: a column holds something else; with its name and the reason.
    """
    held: dict[str, list[Any]] = {}
    for name in (column, prompt or column, TOOLS):
        try:
            items = _parsed(record.get(name) or [])
            if not isinstance(items, list):
                raise ValueError(f"no list but {str(items)[:80]!r}")
            held[name] = [_parsed(item) if name == TOOLS else message_of(item) for item in items]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    given = held[prompt] if prompt else []
    return Conversation([*given, *held[column]], held[TOOLS] or None, len(given))


def without_nulls(value: Any) -> Any:
    """A row of columns without what is null in it: these give every record the fields that any of them has."""
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class ChatTemplate:
    """Writes conversations by a template, which transformers renders in its sandbox.

    Attributes:
        text: the template.
        name: what error lines call it.
        setting: that names another one, for their cures; empty where nothing does.
        variables: the special tokens that a template may write by names such as `eos_token`.
        special: all special tokens of the tokenizer.
    """

    text: str
    name: str = field(compare=False)
    setting: str = field(compare=False)
    variables: dict[str, str]
    special: tuple[str, ...]

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", name: str, setting: str = "", text: str | None = None
    ) -> Self | None:
        """A template for the tokens of a tokenizer, by default its own; None where it has none.

        Raises:
            SettingError: it is too long, or no Jinja.
        """
        if text is None and not tokenizer.chat_template:
            return None
        try:
            text = tokenizer.get_chat_template() if text is None else text
        except ValueError as error:  # it has several, none of which is the default
            cure = f"set {setting}" if setting else "name one of them default"
            raise SettingError(f"{name} cannot be chosen ({first_line(error)}): {cure}") from error
        if len(text) > MAX_TEMPLATE:
            raise SettingError(f"{name} has {len(text):,} characters: give one of {MAX_TEMPLATE:,} at most")
        variables = {key: str(token) for key, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        template = cls(text, name, setting, variables, tuple(sorted({*special, *variables.values()})))
        template._check()
        return template

    def _check(self) -> None:
        """Raises SettingError where the template is no Jinja; whether it takes a conversation shows with that."""
        from jinja2 import TemplateSyntaxError

        try:
            self.render([{"role": "user", "content": ""}])
        except SettingError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise

    @property
    def writes_tools(self) -> bool:
        """Whether it has a place for what the assistant may call."""
        return re.search(rf"\b{TOOLS}\b", self.text) is not None

    def render(self, messages: Sequence[Message], prompt: bool = False, tools: Sequence[Any] | None = None) -> str:
        """The text of a conversation; `prompt`: with the beginning of the assistant's next turn.

        Raises:
            SettingError: the template refuses it, or it is too long.
        """
        return self._rendered(messages, prompt, tools)[0]

    def parts(self, conversation: Conversation) -> tuple[Part, ...]:
        """The text of a conversation in parts, of which those count that the assistant writes.

        A template marks them by `{% generation %}`. Else a turn of the assistant is what the conversation up to it has
        more than the one before it with the beginning of a turn; it ends with its end-of-text token where it has one.

        Raises:
            SettingError: the template refuses the conversation or writes a turn in another way when others follow, or
                a message holds the name of a special token, which would become that token.
        """
        messages, tools, given = conversation
        self._check_messages(conversation)
        if GENERATION.search(self.text):
            text, spans = self._rendered(messages, tools=tools, spans=True)
            of_prompt = self._rendered(messages[:given], tools=tools, spans=True)[1] if given else []
            spans = spans[len(of_prompt) :]
        else:
            text = self.render(messages, tools=tools)
            spans = self._by_difference(conversation, text)
        parts, place = list[Part](), 0
        for begin, end in spans:
            parts += [_part(text[place:begin], False), _part(text[begin:end], True)]
            place = end
        return tuple(part for part in (*parts, _part(text[place:], False)) if part.text)

    def prompt(self, conversation: Conversation) -> str:
        """The text of a conversation up to where the assistant's next turn begins. Raises as `parts`."""
        self._check_messages(conversation)
        return self.render(conversation.messages, prompt=True, tools=conversation.tools)

    def _check_messages(self, conversation: Conversation) -> None:
        if (count := len(conversation.messages)) > MAX_MESSAGES:
            raise SettingError(
                f"{self.name}: a conversation has {count:,} messages, more than {MAX_MESSAGES:,}: cut it"
            )
        written = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False, default=str)
        if name := next((name for name in self.special if name in written), None):
            raise SettingError(
                f"{self.name}: a message holds {name}, the name of a special token, which would become that token: "
                "remove it from the text" + self._or_another("one with {role} and {content}, where it is text")
            )

    def _or_another(self, template: str) -> str:
        """The end of a cure: to choose such a template, where a setting does."""
        return f", or set {self.setting} to {template}" if self.setting else ""

    def _by_difference(self, conversation: Conversation, text: str) -> Spans:
        messages, tools, given = conversation
        spans: Spans = []
        for turn, message in enumerate(messages):
            if turn < given or message["role"] != ASSISTANT:
                continue
            before = self.render(messages[:turn], prompt=True, tools=tools)
            until = self.render(messages[: turn + 1], tools=tools)
            if not until.startswith(before) or not text.startswith(until):
                why = "as its prompt begins it" if text.startswith(until) else "as it does once other turns follow"
                raise SettingError(
                    f"{self.name} does not write turn {turn + 1} of a conversation, one of the assistant, {why}, so "
                    f"its targets are unknown: set {self.setting} to FILE.jinja, a copy with "
                    "{% generation %} around what the assistant writes, or to one with {role} and {content}"
                )
            end, mark = len(until), self.variables.get("eos_token", "")
            if mark and (last := until.rfind(mark, len(before))) >= 0:
                end = last + len(mark)
            spans.append((len(before), end))
        return spans

    def _rendered(
        self,
        messages: Sequence[Message],
        prompt: bool = False,
        tools: Sequence[Any] | None = None,
        spans: bool = False,
    ) -> tuple[str, Spans]:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template  # whose annotations are those of one text
        dated = "strftime_now" in self.text
        try:
            texts, places = render(
                conversations=[list(messages)],
                tools=None if tools is None else list(tools),
                chat_template=(FIXED_DATE if dated else "") + self.text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=spans,
                **self.variables,
            )
        except Exception as error:  # the template's own, Jinja's, and whatever an operator of Python raises in it
            raise SettingError(
                f"{self.name} refuses a conversation ({type(error).__name__}: {first_line(error)[:200]}): mend one or "
                "the other" + self._or_another("another one")
            ) from error
        if len(texts[0]) > MAX_TEXT:
            raise SettingError(f"{self.name} writes {len(texts[0]):,} characters, more than {MAX_TEXT:,}: cut the text")
        return texts[0], places[0] if spans else []


def _part(text: str, counts: bool) -> Part:
    return Part(text, counts, special=True, rendered=True)
