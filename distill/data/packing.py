"""One shard's documents packed into a file of token rows: the work of one process, without torch or transformers."""

import json
import os
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from distill.config import Source
from distill.data.corpus import HeldOut, Shard, documents
from distill.data.readers import blocks

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


class Rows:
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


def pack(stem: str, shard: Shard, source: Source, packing: Packing, setting: str) -> dict[str, Any]:
    """Writes `<stem>.train`, `<stem>.heldout` and, last, `<stem>.json`, whose contents it returns.

    Each file appears whole or not at all, so a build that was killed goes on from the shards that are done.
    """
    begun = time.perf_counter()
    skipped: list[str] = []
    marks = [f"{stem}.{os.getpid()}.{part}.tmp" for part in PARTS]
    with open(marks[0], "wb") as train, open(marks[1], "wb") as heldout:
        parts = [Rows(train, packing), Rows(heldout, packing)]
        for document in documents(shard, source, setting, lambda error: skipped.append(str(error))):
            _pack_document(document.text, parts, packing)
        for rows in parts:
            rows.end()
    for mark, part in zip(marks, PARTS, strict=True):
        os.replace(mark, f"{stem}.{part}")
    done: dict[str, Any] = {
        part: {"rows": rows.rows, "tokens": rows.tokens, "documents": rows.documents}
        for part, rows in zip(PARTS, parts, strict=True)
    }
    done |= {"skipped": skipped, "seconds": time.perf_counter() - begun}
    Path(f"{marks[0]}.json").write_text(json.dumps(done))
    os.replace(f"{marks[0]}.json", f"{stem}.json")
    return done


def _pack_document(text: str, parts: list[Rows], packing: Packing) -> None:
    tokenizer = load_tokenizer(packing.tokenizer)
    met = set()
    for held, stretch in packing.held_out.parts(text):
        met.add(held)
        for block in blocks(stretch, BLOCK):
            parts[held].add(tokenizer.encode_batch_fast([block], add_special_tokens=False)[0].ids)
        parts[held].end_document()
    for held in met:
        parts[held].documents += 1
