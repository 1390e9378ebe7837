"""Conversations, and chat templates in Jinja: the tokens of a conversation, and which of them are targets."""

import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from distill.data.document import Document
from distill.runtime.errors import SettingError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # `role`, `content`, and what else a template may read, such as `reasoning_content`

ASSISTANT = "assistant"
COLUMNS = ("messages", "conversations")  # of conversations; the second is ShareGPT's
TOOLS = "tools"  # the column of what the assistant may call
REWRITE = 'rewrite it to {"role": "user", "content": "..."}'
LIST = re.compile(r"\s*\[")  # as a JSON text of messages begins
ROLES = {role: role for role in ("system", "user", ASSISTANT, "tool")}
# And those of ShareGPT's form by its names of them.
ROLES |= {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "function": "tool", "observation": "tool"}

# How conversations are written where neither the settings nor the tokenizer have a template.
DEFAULT = (
    "{% if bos_token is defined and bos_token != eos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Templates may write today's date, and tomorrow's sequences have to be those of today.
DATE = {"%d": "01", "%-d": "1", "%b": "Jan", "%B": "January", "%m": "01", "%Y": "2025", "%y": "25", "%A": "Wednesday"}
_REPLACED = "".join(f"|replace('{form}', '{text}')" for form, text in DATE.items())
# The environment of transformers drops the end of a line behind a block.
FIXED_DATE = f"{{% macro strftime_now(form) %}}{{{{ form{_REPLACED} }}}}{{% endmacro %}}\n"


class Conversation(NamedTuple):
    """Messages, and what else a template may write of their record."""

    messages: list[Message]
    tools: list[Any] | None = None  # that the assistant may call; None: there are none
    given: int = 0  # messages that are a prompt, of which no token is a target


def conversation_of(record: dict[str, Any], column: str, prompt: str | None = None) -> Conversation:
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


def holds_messages(value: Any) -> bool:
    """Whether a field holds a conversation: a list of messages, or the JSON text of one."""
    if isinstance(value, str) and not LIST.match(value):
        return False
    try:
        items = _parsed(value)
        return isinstance(items, list) and bool(items) and all(message_of(item) for item in items)
    except ValueError:
        return False


def message_of(item: Any) -> Message:
    """A message with `role` and `content`, of which an absent one is empty; of ShareGPT's `from` and `value`, too.

    A content in parts, as OpenAI has it, is the text of these. A message, and its `tool_calls`, may be JSON texts.

    Raises:
        ValueError: it is no message, or not of text alone; with the reason.
    """
    item = _parsed(item)
    message = {name: value for name, value in item.items() if value is not None} if isinstance(item, Mapping) else {}
    if "role" not in message and message.get("from") in ROLES:
        message = {"role": ROLES[message.pop("from")], "content": message.pop("value", ""), **message}
    if not isinstance(message.get("role"), str):
        raise ValueError(f"a message in it is {str(item)[:80]!r}, without a role: {REWRITE}")
    content = message.get("content", "")
    texts = [_text(part) for part in content] if isinstance(content, list) else [content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"a message in it has a content that is no text ({str(content)[:80]}), which a language model cannot read: "
            "leave that conversation out, or put text in its place"
        )
    calls = {"tool_calls": _parsed(message["tool_calls"])} if "tool_calls" in message else {}
    return {**message, "content": "".join(texts), **calls}


def _text(part: Any) -> Any:
    """The text of a part of a content; anything else as it is."""
    return part.get("text") if isinstance(part, Mapping) and part.get("type") in (None, "text") else part


def _parsed(value: Any) -> Any:
    """What a JSON text holds; anything but a text as it is. Raises ValueError where the text is no JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON in {value[:40]!r} ({error}): mend it, or give a list") from error


def without_nulls(value: Any) -> Any:
    """A row of columns without what is null in it: these give every record the fields that any of them has."""
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class ChatTemplate:
    """Writes conversations by a template, which transformers renders in its sandbox."""

    tokenizer: "PreTrainedTokenizerBase"
    text: str
    name: str  # what error lines call it
    setting: str = ""  # that names another one, for their cures; empty: nothing does

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", name: str, setting: str = "", text: str | None = None
    ) -> Self | None:
        """A template for the tokens of a tokenizer, by default its own; None where it has none.

        Raises:
            SettingError: the tokenizer has several, none of which is the default.
        """
        if text is None and not tokenizer.chat_template:
            return None
        try:
            text = tokenizer.get_chat_template() if text is None else text
        except ValueError as error:
            cure = f"set {setting}" if setting else "name one of them default"
            raise SettingError(f"{name} cannot be chosen ({first_line(error)}): {cure}") from error
        return cls(tokenizer, text, name, setting)

    def __reduce__(self) -> Any:
        """Other processes make the tokenizer once, not for each of their tasks: a large one takes a second."""
        return _in_this_process, (self._pickled, self.text, self.name, self.setting)

    @cached_property
    def _pickled(self) -> bytes:
        return pickle.dumps(self.tokenizer)

    @cached_property
    def special(self) -> list[str]:
        """All special tokens of the tokenizer."""
        added = (str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        return sorted({*self.tokenizer.all_special_tokens, *added})

    @property
    def writes_tools(self) -> bool:
        """Whether it has a place for what the assistant may call."""
        return re.search(rf"\b{TOOLS}\b", self.text) is not None

    def document(self, conversation: Conversation, name: str) -> Document:
        """The tokens of a conversation, of which those that the assistant writes are targets.

        A template marks them by `{% generation %}`. Else a turn of the assistant is what the conversation up to it has
        more than the one before it with the beginning of a turn; it ends with its end-of-text token where it has one.

        Raises:
            SettingError: the template refuses the conversation or writes a turn in another way when others follow, or
                a message holds the name of a special token, which would become that token.
        """
        text = self._text(conversation)
        is_marked = GENERATION.search(self.text) is not None
        ids, loss_mask = self._marked(conversation) if is_marked else self._by_difference(conversation, text)
        return Document(name, text, ids=ids, loss_mask=loss_mask, add_bos=False)

    def prompt(self, conversation: Conversation) -> str:
        """The text of a conversation up to where the assistant's next turn begins. Raises as `document`."""
        return self._text(conversation, add_generation_prompt=True)

    def _text(self, conversation: Conversation, **how: Any) -> str:
        written = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False, default=str)
        if name := next((name for name in self.special if name in written), None):
            raise SettingError(
                f"{self.name}: a message holds {name}, the name of a special token, which would become that token: "
                "remove it from the text"
            )
        (text,) = self._apply([conversation.messages], conversation.tools, **how)
        return str(text)

    def _marked(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Ids and loss mask where the template marks what the assistant writes."""
        messages, tools, given = conversation
        talks = [messages, messages[:given]] if given else [messages]
        quiet = {"verbose": False}
        encoded = self._apply(talks, tools, tokenize=True, return_assistant_tokens_mask=True, tokenizer_kwargs=quiet)
        masks = [np.array(mask, bool) for mask in encoded["assistant_masks"]]
        if given:  # as many marked places as the prompt has are no targets
            begins, of_prompt = (np.flatnonzero(np.diff(mask, prepend=False) & mask) for mask in masks)
            masks[0][: begins[len(of_prompt)] if len(begins) > len(of_prompt) else None] = False
        return np.array(encoded["input_ids"][0]), masks[0]

    def _by_difference(self, conversation: Conversation, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids and loss mask where the template marks nothing; a token is a target where one of its characters is."""
        is_target = np.zeros(len(text) + 1, np.int64)
        for begin, end in self._turns(conversation, text):
            is_target[begin + 1 : end + 1] = 1
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        begins, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        # Some tokenizers trim blanks from offsets: a token of blanks alone has none of its own, and ends before `end`.
        count = is_target.cumsum()
        loss_mask = count[ends] > count[np.minimum(begins, np.maximum(ends - 1, 0))]
        return np.array(encoded["input_ids"], np.int64), loss_mask

    def _turns(self, conversation: Conversation, text: str) -> Iterator[tuple[int, int]]:
        """The characters [begin, end) of each turn of the assistant that is no prompt."""
        messages, tools, given = conversation
        turns = [turn for turn in range(given, len(messages)) if messages[turn]["role"] == ASSISTANT]
        prompts = self._apply([messages[:turn] for turn in turns], tools, add_generation_prompt=True)
        ended = self._apply([messages[: turn + 1] for turn in turns], tools)
        mark = self.tokenizer.eos_token or ""
        for turn, before, until in zip(turns, prompts, ended, strict=True):
            if not until.startswith(before) or not text.startswith(until):
                why = "as its prompt begins it" if text.startswith(until) else "as it does once other turns follow"
                raise SettingError(
                    f"{self.name} does not write turn {turn + 1} of a conversation, one of the assistant, {why}, so "
                    f"its targets are unknown: set {self.setting} to FILE.jinja, a copy with "
                    "{% generation %} around what the assistant writes"
                )
            last = until.rfind(mark, len(before)) if mark else -1
            yield len(before), len(until) if last < 0 else last + len(mark)

    def _apply(
        self, talks: Sequence[Sequence[Message]], tools: Sequence[Any] | None, tokenize: bool = False, **how: Any
    ) -> Any:
        """What `apply_chat_template` gives for conversations. Raises SettingError where the template refuses one."""
        text = (FIXED_DATE if "strftime_now" in self.text else "") + self.text
        try:
            return self.tokenizer.apply_chat_template(
                [list(talk) for talk in talks],
                list(tools) if tools else None,
                chat_template=text,
                tokenize=tokenize,
                **how,
            )
        except Exception as error:  # the template's own, Jinja's, and whatever an operator of Python raises in it
            cure = f", or set {self.setting} to another one" if self.setting else ""
            reason = f"{type(error).__name__}: {first_line(error)[:200]}"
            raise SettingError(f"{self.name} refuses a conversation ({reason}): mend one or the other{cure}") from error


def plain_text(conversation: Conversation) -> str:
    """A conversation as `DEFAULT` writes it, where there is no tokenizer yet."""
    return "".join(f"<|{message['role']}|>\n{message['content']}\n" for message in conversation.messages)


@lru_cache(maxsize=4)
def _in_this_process(tokenizer: bytes, *fields: str) -> ChatTemplate:
    return ChatTemplate(pickle.loads(tokenizer), *fields)
