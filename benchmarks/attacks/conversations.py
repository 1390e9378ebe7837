"""Conversations: odd contents, roles, shapes and templates, and damaged files, against a naive reading of the lines."""

import gzip
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from chats import TEMPLATE, conversations, naive
from shards import read_rows

from benchmarks.attacks.case import Case, Outcome, either, finished
from benchmarks.attacks.ground import Ground, student_of
from benchmarks.attacks.ingredients import DAMAGES, SHORT, gpt2, undisturbed
from distill.data.packing import BLOCK
from distill.data.sequence_format import IDS, PROMPT

NAMES = r"corpus[.:]|chats\.jsonl"  # what a refusal has to name
ASSISTANT = "assistant"
CONTENTS = {
    "nothing": "", "null": None, "blanks": "  \t ", "ends of lines": "\n\r\n\n", "a carriage return": "a\rb",
    "a NUL": "a\0b", "an escape": "\x1b[31mred", "a BOM": "\ufeffa", "line separators": "a\u2028b\u2029c\x85d",
    "combining marks": "e\u0301" * 40, "right to left": "\u202eabc\u202c", "joined emoji": "👩‍👩‍👧‍👦" * 9,
    "beyond the plane": "\U0001d54f\U0001d550" * 20, "half a pair": "a\ud800b", "a non-character": "\uffff\ufffe",
    "a special token": "[SEP] an [PAD] [CLS][MASK]", "part of a special token": "[SE", "the template": TEMPLATE,
    "braces": "{content} {role} {{}} {0} %s", "markup": "<|assistant|>\nthe <|user|>", "JSON": '{"role": "assistant"}',
    "a path": "../../etc/passwd", "letters": "a" * 300, "a word of 100,000": "th" * 50_000,
    "a megabyte": "the cat an " * 90_000, "digits": "0123456789", "a tab": "a\tb", "quotes": "\"'`",
    "a backslash": "\\n\\",
}  # fmt: skip
ROLES = {
    "in capitals": "Assistant", "with a blank": " assistant", "none": "", "of another language": "助手",
    "a brace": "{role}",
    "the content's field": "{content}", "a special token": "[SEP]", "a NUL": "\0", "lines": "assistant\n\nuser",
    "long": "r" * 9999,
    "a tool": "tool", "half a pair": "\ud83d",
}  # fmt: skip
GOOD = {"role": ASSISTANT, "content": "the cat"}
SHAPES: dict[str, Any] = {
    "parts of content": {"messages": [{"role": ASSISTANT, "content": [{"type": "text", "text": "the"}]}]},
    "a number as content": {"messages": [{"role": ASSISTANT, "content": 5}]},
    "a role of null": {"messages": [{"role": None, "content": "a"}]},
    "a role that is a list": {"messages": [{"role": [ASSISTANT], "content": "a"}]},
    "no role": {"messages": [{"content": "a"}]}, "no content": {"messages": [{"role": ASSISTANT}]},
    "other names": {"messages": [{"from": "gpt", "value": "a"}]}, "a message of text": {"messages": ["the cat"]},
    "a message of null": {"messages": [None]}, "a list in the list": {"messages": [[GOOD]]},
    "messages of text": {"messages": "the cat"}, "messages of null": {"messages": None},
    "a dict of messages": {"messages": {"0": GOOD}}, "messages that are a number": {"messages": 7},
    "no messages": {"messages": []}, "another field": {"conversation": [GOOD]}, "an empty object": {}, "a list": [GOOD],
    "a string": "the cat", "a number": 1e308, "null": None,
    "more fields": {"id": 1, "messages": [GOOD], "x": {"y": []}},
    "more in a message": {"messages": [{**GOOD, "name": "x", "tool_calls": []}]},
    "users alone": {"messages": [{"role": "user", "content": "a"}]},
    "a user last": {"messages": [GOOD, {"role": "user", "content": "a"}]},
    "assistants in a row": {"messages": [GOOD] * 9}, "a thousand turns": {"messages": [GOOD] * 1000},
    "a system last": {"messages": [GOOD, {"role": "system", "content": "an"}]},
}  # fmt: skip
LINES = {
    "not JSON": b"{'messages': []}", "half a line": b'{"messages": [{"role": "assis',
    "a trailing comma": b'{"messages": [],}',
    "NaN": b'{"messages": NaN}', "an endless number": b'{"messages": [], "x": ' + b"9" * 10_000 + b"}",
    "100,000 brackets": b"[" * 100_000, "deep dicts": b'{"a":' * 20_000, "bad UTF-8": b'{"messages": "\xff\xfe"}',
    "Latin-1": b'{"messages": [{"role": "assistant", "content": "caf\xe9"}]}', "a zero byte": b'{"messages": "\0"}',
    "two objects": b'{"messages": []} {"messages": []}', "blank": b"   ", "a comment": b"// a comment",
    "CSV": b"role,content",
    "a key twice": json.dumps({"messages": [GOOD]}).encode()[:-1] + b', "messages": []}', "a carriage return": b"\r",
    "an escaped half": b'{"messages": [{"role": "assistant", "content": "\\udc00"}]}',
    "20 MB": b'"' + b"a" * 20_000_000 + b'"',
}  # fmt: skip
TEMPLATES = (
    "", "{content}", "{role}", "{content}{content}", "{role}{role}{content}", "{content", "{}", "{0}", "{content!r}",
    "{content:>9}",
    "{content.x}", "{role[0]}{content}", "{{{content}}}", "a\\n{content}\\n", "[SEP]{content}[SEP]",
    "{content}[NOSUCH]",
    "{content}\t{role}", "助{role}手{content}", "x" * 3000 + "{content}", "{role!x}{content}", "%s {content}",
    "{ content }",
)  # fmt: skip


def lines_of(talks: list[Any]) -> bytes:
    return b"".join(json.dumps(talk).encode() + b"\n" for talk in talks)


SOUND = lines_of([{"messages": each} for each in conversations()])


def talks_in(content: bytes) -> list[list[dict[str, str]]]:
    """The conversations of those lines that are sound."""
    talks = []
    for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        try:
            record = json.loads(line.decode())
            messages = [(each["role"], each.get("content") or "") for each in record["messages"]]
            "".join(map("".join, messages)).encode()
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            continue
        counts = any(role == ASSISTANT for role, _ in messages)
        if isinstance(record["messages"], list) and b"\0" not in line and len(line) < 16 << 20 and counts:
            talks.append([{"role": role, "content": text} for role, text in messages])
    return talks


def prepared(ground: Ground, content: bytes, template: str = TEMPLATE, name: str = "chats.jsonl") -> Outcome:
    """Prepare the file: its tokens have to be those of a naive loop over its sound lines, or it is refused."""
    (ground.folder / name).write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    ended = ground.distill(
        "prepare", "+recipe=distilgpt2_gutenberg", "corpus=chat", f"corpus.path={ground.folder / name}", *SHORT[:2],
        f"corpus.template='{template}'", f"data.cache={ground.folder / 'cache'}", "corpus.heldout=0",
        "evaluate.sets=[]",
        "corpus.max_invalid=1", "corpus.max_unknown=1", f"teacher.path={gpt2(ground)}",
    )  # fmt: skip
    return either(ended, NAMES, is_same=lambda: is_as_naive(ground.folder / "cache", content, template))


def is_as_naive(cache: Path, content: bytes, template: str) -> bool:
    """Whether ids and what counts of them are those of a naive loop; long texts are tokenized in pieces."""
    if any(len(message["content"]) > 2 * BLOCK for talk in talks_in(content) for message in talk):
        return True
    written = template.replace("\\n", "\n")
    expected = [token for talk in talks_in(content) for token in naive(talk, written)]
    (meta,) = cache.glob("tokens/*/meta.json")
    ids = read_rows(meta.parent, "train").reshape(-1)[: len(expected)]
    counts = (ids & PROMPT) == 0
    first = [index for index, token in enumerate(expected) if token == naive([])[0]]
    counts[first] = True
    return [*zip((ids & IDS).tolist(), counts.tolist(), strict=True)] == expected


def with_line(line: bytes) -> bytes:
    """The line between sound ones."""
    before, _, after = SOUND.partition(b"\n")
    return before + b"\n" + line + b"\n" + after


def message(role: str, content: str | None) -> bytes:
    return lines_of([{"messages": [{"role": "user", "content": "a"}, {"role": role, "content": content}, GOOD]}])[:-1]


def trained(ground: Ground, path: Path, cache: Path, folder: Path) -> list[str]:
    return [
        "+recipe=distilgpt2_gutenberg", "corpus=chat", f"corpus.path={path}", f"corpus.template='{TEMPLATE}'",
        f"data.cache={cache}", f"teacher.path={gpt2(ground)}", "student.layers=[0]", *SHORT, "corpus.max_invalid=1",
        "corpus.max_unknown=1",
        f"hydra.run.dir={folder}",
    ]  # fmt: skip


def trained_beside(ground: Ground, extra: bytes) -> Outcome:
    """Train on sound conversations beside lines that are left out: the student has to be the same."""
    (ground.folder / "chats.jsonl").write_bytes(SOUND)

    def sound(cache: Path, folder: Path) -> list[str]:
        return trained(ground, ground.folder / "chats.jsonl", cache, folder)

    student, _ = undisturbed(ground, "conversations", sound)
    (ground.folder / "chats.jsonl").write_bytes(with_line(extra))
    ended = ground.distill(*sound(ground.folder / "cache", ground.run))
    return finished(ended, lambda: student_of(ground.run) == student)


def damaged(draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """The sound file damaged at places that are drawn."""
    for number in range(24):
        name = draw.choice([name for name in DAMAGES if name != "gone"])
        content = DAMAGES[name](SOUND, draw)
        assert content is not None
        yield f"{name} {number}", content
    for number in range(8):
        lines = SOUND.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = lines[at][: draw.randrange(len(lines[at]))]
        yield f"a line cut {number}", b"\n".join(lines)
    yield "no end of the last line", SOUND[:-1]
    yield "carriage returns", SOUND.replace(b"\n", b"\r\n")
    yield "a BOM", b"\xef\xbb\xbf" + SOUND
    yield "UTF-16", SOUND.decode().encode("utf-16")
    yield "one line", SOUND.replace(b"\n", b" ")
    yield "a JSON list", json.dumps([json.loads(line) for line in SOUND.splitlines()]).encode()


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    for name, text in CONTENTS.items():
        for role in (ASSISTANT, "user"):
            attacks[f"content of {role}: {name}"] = partial(prepared, content=with_line(message(role, text)))
    for name, role in ROLES.items():
        attacks[f"role: {name}"] = partial(prepared, content=with_line(message(role, "the cat")))
    for name, record in SHAPES.items():
        attacks[f"record: {name}"] = partial(prepared, content=with_line(lines_of([record])[:-1]))
    for name, line in LINES.items():
        attacks[f"line: {name}"] = partial(prepared, content=with_line(line))
        attacks[f"nothing but line: {name}"] = partial(prepared, content=line)
    for template in TEMPLATES:
        attacks[f"template: {template[:20]!r}"] = partial(prepared, content=SOUND, template=template)
    for name, content in damaged(draw):
        attacks[f"file: {name}"] = partial(prepared, content=content)
    for cut in (0, 1, 10, 40):
        content = gzip.compress(SOUND, 1)[: -cut or None]
        attacks[f"gzip cut by {cut}"] = partial(trained_or_refused, content=content)
    for name in ("not JSON", "bad UTF-8", "a zero byte", "100,000 brackets", "blank"):
        attacks[f"training beside a line: {name}"] = partial(trained_beside, extra=LINES[name])
    return [Case("conversations", name, attack) for name, attack in attacks.items()]


def trained_or_refused(ground: Ground, content: bytes) -> Outcome:
    """Train on a gzip file that may have no end."""
    path = ground.folder / "chats.jsonl.gz"
    path.write_bytes(content)
    ended = ground.distill(*trained(ground, path, ground.folder / "cache", ground.run))
    return either(ended, NAMES, ground.run)
