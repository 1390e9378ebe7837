"""Files of any content as a corpus: each gives documents that can be tokenized, or is counted as invalid."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distill.config.component import SOURCES, Component, built_in
from distill.config.settings import DataConfig, SourceConfig
from distill.data.sources import Document, Source, read
from distill.runtime.errors import SettingError

SUFFIXES = {
    "jsonl": ".jsonl", "csv": ".csv", "text": ".txt", "gutenberg": ".txt", "parquet": ".parquet", "chat": ".jsonl",
}  # fmt: skip

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ROLES = st.sampled_from(["user", "assistant", "system", "", "x"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text()}) | JSON, max_size=4)
RECORDS = st.fixed_dictionaries({}, optional={"text": st.text() | JSON, "messages": MESSAGES | JSON, "id": JSON}) | JSON


def lines(records: list[Any]) -> bytes:
    return "\n".join(json.dumps(each) for each in records).encode()


LINES = st.lists(RECORDS, max_size=8).map(lines)
TEXTS = st.text().map(lambda text: text.encode("utf-8", "surrogatepass"))
ROWS = st.lists(st.lists(st.text(max_size=20), max_size=4), max_size=6).map(
    lambda rows: ("text,id\n" + "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)).encode(
        "utf-8", "replace"
    )
)
SPLICED = st.tuples(LINES | TEXTS | ROWS, st.binary(max_size=40), st.integers(0, 400)).map(
    lambda parts: parts[0][: parts[2]] + parts[1] + parts[0][parts[2] :]
)
CONTENTS = st.binary(max_size=400) | TEXTS | LINES | ROWS | SPLICED


def documents_of(kind: str, path: Path) -> list[Document]:
    settings = SourceConfig(kind=kind, path=str(path))
    source: Source | None = (
        Component("corpus", built_in(SOURCES, kind))
        ._import()
        .find(settings, "corpus", DataConfig(cache=str(path.parent / "cache")))
    )
    assert source is not None
    return [document for shard in source.shards() for document in read(source, shard)]


@pytest.mark.parametrize(
    ("kind", "zipped"), [(kind, zipped) for kind in SUFFIXES for zipped in (False, True)[: 1 + (kind != "parquet")]]
)
@given(content=CONTENTS)
@example(content=b"")
@example(content=b'{"text": "\\r"}')
@example(content=b"[" * 100_000)
@example(content=b'{"text": "\\ud800"}\n{"text": "good"}')
@example(content=b"PAR1" + bytes(20) + b"PAR1")
def test_any_file_is_a_corpus_or_refused(tmp_path: Path, kind: str, zipped: bool, content: bytes) -> None:
    path = tmp_path / f"file{SUFFIXES[kind]}{'.gz' if zipped else ''}"
    path.write_bytes(gzip.compress(content, 1) if zipped else content)
    try:
        documents = documents_of(kind, path)
    except SettingError as error:
        assert len(str(error).splitlines()) == 1
        return
    for document in documents:
        document.text.encode()
        assert document.text.strip()
