"""Made-up conversations as rows, and the same from a naive loop."""

import json
import random
from pathlib import Path
from typing import Any

from families import byte_pairs
from tiny import SEP, parts, text_config
from tokenizers import Tokenizer

from distill.config.settings import Config
from distill.data.sequence_format import causal_format
from distill.data.tokens import Tokens, corpus_text, prepare

# The end-of-text token inside a conversation, as in ChatML, and the name of the token that fills rows.
TEMPLATE = "[PAD]{role}: {content}[SEP]"
TOKENIZER = byte_pairs()
FORMAT = causal_format(TOKENIZER)


def conversations(count: int = 30) -> list[list[dict[str, str]]]:
    draw = random.Random(7)
    roles = ["system", "user", "assistant"]

    def words() -> str:
        return " ".join(draw.choices(["the", "then", "an", "cat", "hats", "[SEP]"], k=draw.randint(1, 6)))

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
    """The ids of a conversation, and whether each counts, from its beginning to its end-of-text token."""
    tokenizer, text = TOKENIZER.backend_tokenizer, Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
    text.encode_special_tokens = True
    ids: list[tuple[int, bool]] = [(int(FORMAT.document_start or 0), True)]
    counts = False
    for message in conversation:
        counts = message["role"] == "assistant"
        before, after = (part.format(role=message["role"]) for part in template.split("{content}"))
        for said, stretch in (
            (False, tokenizer.encode(before, add_special_tokens=False)),
            (counts, text.encode(message["content"], add_special_tokens=False)),
            (counts, tokenizer.encode(after, add_special_tokens=False)),
        ):
            ids += [(id_, said) for id_ in stretch.ids]
    return [*ids, (SEP, counts)]


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
