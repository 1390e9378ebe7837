"""Made-up conversations as rows, and the same from a naive loop."""

import json
import random
from pathlib import Path
from typing import Any

from families import byte_pairs
from tiny import SEP, parts, text_config

from distill.config.settings import Config
from distill.data.sequence_format import causal_format
from distill.data.tokens import Tokens, corpus_text, prepare

# The end-of-text token inside a conversation, as in ChatML, and the name of the token that fills rows.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '[PAD]' + message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '[SEP]' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '[SEP]' }}{% endif %}{% endfor %}"
)
TOKENIZER = byte_pairs()
FORMAT = causal_format(TOKENIZER)


def conversations(count: int = 30) -> list[list[dict[str, str]]]:
    draw = random.Random(7)
    roles = ["system", "user", "assistant"]

    def words() -> str:
        return " ".join(draw.choices(["the", "then", "an", "cat", "hats", "[SEP"], k=draw.randint(1, 6)))

    said = [[{"role": draw.choice(roles), "content": words()} for _ in range(draw.randint(1, 5))] for _ in range(count)]
    return [each for each in said if any(message["role"] == "assistant" for message in each)]


def chats(folder: Path, **more: Any) -> Config:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations()))
    given = {"sequence_length": 32, "cross_documents": True, "heldout": 0.0, "workers": 1, "template": TEMPLATE}
    return text_config(kind="chat", path=str(path), cache=str(folder / "cache"), **{**given, **more})


def tokens_of(config: Config, part: str = "train") -> Tokens:
    return prepare(corpus_text(*parts(config)), TOKENIZER, *parts(config), part, causal_format)


def naive(conversation: list[dict[str, str]], template: str = TEMPLATE) -> list[tuple[int, bool]]:
    """The ids of a conversation, and whether each counts, up to its end-of-text token, as transformers has them."""
    found: Any = TOKENIZER.apply_chat_template(
        conversation, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = [*zip(found["input_ids"], map(bool, found["assistant_masks"]), strict=True)]
    return ids if ids[-1][0] == SEP else [*ids, (SEP, ids[-1][1])]


def naive_rows(length: int, cross: bool) -> list[list[tuple[int, bool, int]]]:
    """Rows of (id, counts, number of the conversation); one that fits a row is not cut."""
    rows: list[list[tuple[int, bool, int]]] = [[]]
    for number, said in enumerate(conversations()):
        stream = [(*each, number) for each in naive(said)]
        if not cross or len(stream) <= length < len(rows[-1]) + len(stream):
            rows.append([])
        for token in stream:
            if len(rows[-1]) == length:
                rows.append([])
            rows[-1].append(token)
    return [row for row in rows if row]
