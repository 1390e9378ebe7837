"""One shard's documents packed into a file of token rows: the work of one process, without torch or transformers."""

import json
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from distill.data.heldout import HeldOut
from distill.data.readers import blocks
from distill.data.sources import Shard, Source, read
from distill.files import atomic

BLOCK = 16 << 10  # characters that are tokenized at once
SHORTEST = 8  # tokens that the end of a document needs to become a row
PARTS = ("train", "heldout")


@dataclass(frozen=True)
class Packing:
    """All that decides how text becomes rows: [CLS] ids [SEP], then padding up to `sequence_length`."""

    tokenizer: str  # tokenizer.json
    vocabulary: int
    cls: int
    sep: int
    pad: int
    sequence_length: int
    cross_documents: bool
    held_out: HeldOut

    @property
    def dtype(self) -> np.dtype:
        """uint16 where the ids allow it, else uint32."""
        return np.dtype(np.uint16 if self.vocabulary <= 1 << 16 else np.uint32)


class RowWriter:
    """Rows written to a file as their ids come in."""

    def __init__(self, file: IO[bytes], packing: Packing) -> None:
        self.file, self.packing = file, packing
        self.left = np.empty(0, packing.dtype)  # ids that do not fill a row yet
        self.rows = self.tokens = self.documents = 0

    def add(self, ids: list[int]) -> None:
        """Takes the next ids of a document; writes the rows that are full."""
        body = self.packing.sequence_length - 2
        ids_ = np.concatenate([self.left, np.asarray(ids, self.packing.dtype)])
        full = len(ids_) // body
        self.left = ids_[full * body :]
        self._write(ids_[: full * body].reshape(full, body))

    def end_document(self) -> None:
        """Ends the row, or, where rows may run over a document's end, marks it with a separator inside the row."""
        if not self.packing.cross_documents:
            self.end()
        elif len(self.left):
            self.add([self.packing.sep])

    def end(self) -> None:
        """Writes what is left as a padded row; fewer than SHORTEST ids are dropped."""
        if len(self.left) and self.left[-1] == self.packing.sep:  # the row ends in one anyway
            self.left = self.left[:-1]
        if len(self.left) >= SHORTEST:
            self._write(self.left[None])
        self.left = self.left[:0]

    def _write(self, bodies: np.ndarray) -> None:
        """Writes [rows, ids] as rows of full length."""
        count, length = bodies.shape
        rows = np.full((count, self.packing.sequence_length), self.packing.pad, self.packing.dtype)
        rows[:, 0] = self.packing.cls
        rows[:, 1 : 1 + length] = bodies
        rows[:, 1 + length] = self.packing.sep
        self.file.write(rows.tobytes())
        self.rows += count
        self.tokens += count * (length + 2)


@lru_cache(maxsize=1)
def load_tokenizer(text: str) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json; a special token's name in a text is text, not the token."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one process per core is enough
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def pack(stem: str, shard: Shard, source: Source, packing: Packing) -> dict[str, Any]:
    """Writes `<stem>.train`, `<stem>.heldout` and, last, `<stem>.json`, whose contents it returns.

    Each file appears whole or not at all, so a build that was killed goes on from the shards that are done.
    """
    begun = time.perf_counter()
    skipped: list[str] = []
    with ExitStack() as files:
        new = [files.enter_context(atomic(Path(f"{stem}.{part}"))) for part in PARTS]
        writers = [RowWriter(files.enter_context(path.open("wb")), packing) for path in new]
        for document in read(source, shard, lambda error: skipped.append(str(error))):
            _pack_document(document.text, writers, packing)
        for writer in writers:
            writer.end()
    done: dict[str, Any] = {
        part: {"rows": writer.rows, "tokens": writer.tokens, "documents": writer.documents}
        for part, writer in zip(PARTS, writers, strict=True)
    }
    done |= {"skipped": skipped, "seconds": time.perf_counter() - begun}
    with atomic(Path(f"{stem}.json")) as record:
        record.write_text(json.dumps(done))
    return done


def _pack_document(text: str, parts: list[RowWriter], packing: Packing) -> None:
    tokenizer = load_tokenizer(packing.tokenizer)
    met = set()
    for held, stretch in packing.held_out.parts(text):
        met.add(held)
        for block in blocks(stretch, BLOCK):
            parts[held].add(tokenizer.encode_batch_fast([block], add_special_tokens=False)[0].ids)
        parts[held].end_document()
    for held in met:
        parts[held].documents += 1
