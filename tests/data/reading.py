"""What tests of text share: sources by their settings, their documents, and the sequences that become of them."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiny import parts

from distill.config.settings import Config, DataConfig, SourceConfig
from distill.data.document import Document
from distill.data.sequence_format import causal_format
from distill.data.sources import Source, find_source, read
from distill.data.tokens import Tokens, corpus_text, prepare


def located(settings: SourceConfig | None = None, /, **named: Any) -> Source:
    """The source with these settings, or with settings of these names."""
    source = find_source(settings or SourceConfig(**named), "corpus", DataConfig())
    assert source is not None
    return source


def documents(settings: SourceConfig | None = None, /, **named: Any) -> list[Document]:
    source = located(settings, **named)
    return [document for shard in source.shards() for document in read(source, shard)]


def texts(settings: SourceConfig | None = None, /, **named: Any) -> list[str]:
    return [document.text for document in documents(settings, **named)]


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """A JSONL file, packed where its name ends so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def prepared(config: Config, tokenizer: Any, part: str = "train", made: Any = causal_format) -> Tokens:
    """The sequences of a corpus, by default as causal models have them."""
    return prepare(corpus_text(*parts(config)), tokenizer, *parts(config), part, made)
