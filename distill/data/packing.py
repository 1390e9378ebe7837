"""One shard's documents packed into a file of sequences: the work of one process, without torch or transformers."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import groupby, islice
from typing import IO, Any

import numpy as np

from distill.config.data import Duplicates, NearConfig
from distill.data.document import Document, Part
from distill.data.heldout import HeldOut
from distill.data.invalid import MEND, Invalid
from distill.data.lines import InvalidFile, InvalidRecord, LeftOut
from distill.data.part_of_text import PartOfText
from distill.data.readers import blocks
from distill.data.segment_pairs import PairWriter
from distill.data.sentences import sentences
from distill.data.sequence_format import INNER, PROMPT, SequenceFormat
from distill.data.shards import Counts
from distill.data.sources import read
from distill.data.work import Work
from distill.runtime.errors import SettingError

Piece = tuple[list[int], bool]  # ids of a document, and whether they count
BLOCK = 16 << 10  # characters that are tokenized at once
SENTENCES = 256  # likewise


@dataclass(frozen=True)
class Packing:
    """All that decides how text becomes sequences: ids in their format, then padding up to `sequence_length`."""

    tokenizer: str  # tokenizer.json
    vocabulary: int
    format: SequenceFormat
    sequence_length: int
    cross_documents: bool
    held_out: HeldOut
    prompts: bool = False  # whether documents may have parts that do not count, so that ids carry flags
    duplicates: Duplicates = Duplicates.keep
    near: NearConfig = field(default_factory=NearConfig)
    part: PartOfText = field(default_factory=PartOfText)  # what of the text that is not held out becomes sequences
    strict: bool = False  # whether what cannot be read ends the preparation at once

    @property
    def identity(self) -> dict[str, Any]:
        """Everything here that decides the sequences, by name; that duplicates are counted does not."""
        identity = asdict(self) | {"duplicates": self.duplicates.value, "near": dict(self.near)}
        del identity["strict"]
        if self.duplicates in (Duplicates.keep, Duplicates.count):
            del identity["duplicates"]
        if self.duplicates is not Duplicates.near:
            del identity["near"]
        if self.part.whole:
            del identity["part"]
        if self.prompts and self.cross_documents:
            identity["keeps_whole"] = True
        if self.prompts:
            identity["marks_beginnings"] = True
        return identity

    @property
    def described(self) -> dict[str, Any]:
        """What a run has to have in common with prepared sequences to train on them, as JSON, by setting."""
        drops = self.duplicates in (Duplicates.drop, Duplicates.near)
        return {
            "tokenizer": sha256(self.tokenizer.encode()).hexdigest(),
            "vocabulary": self.vocabulary,
            "format": asdict(self.format),
            "corpus.sequence_length": self.sequence_length,
            "corpus.cross_documents": self.cross_documents,
            "corpus.heldout": self.held_out.share,
            "corpus.duplicates": self.duplicates.value if drops else Duplicates.keep.value,
            **{
                f"corpus.near.{name}": value
                for name, value in dict(self.near).items()
                if self.duplicates is Duplicates.near
            },
        }

    @property
    def dtype(self) -> np.dtype:
        """uint16 where the ids allow it, else uint32."""
        return np.dtype(np.uint16 if self.num_ids <= 1 << 16 and not self.prompts else np.uint32)

    @property
    def num_ids(self) -> int:
        """The vocabulary, and what fills up sequences where that is beyond it."""
        return max(self.vocabulary, self.format.pad + 1)


class SequenceWriter:
    """Sequences written to a file as their ids come in.

    Attributes:
        sequences, tokens, documents: how many were written.
        dropped: tokens of ends of documents that were too short for a sequence.
    """

    def __init__(self, file: IO[bytes], packing: Packing) -> None:
        self.file, self.packing, self.format = file, packing, packing.format
        self.left = np.empty(0, packing.dtype)  # ids that do not fill a sequence yet
        self.sequences = self.tokens = self.documents = self.dropped = 0

    def add(self, ids: list[int], counts: bool = True, begins: bool = False) -> None:
        """Takes the next ids of a document's text, and whether they count; writes the sequences that are full.

        `begins`: whether a template has written them as the beginning of a document, which nothing is put before.
        """
        new = np.asarray(ids, self.packing.dtype)
        if self.packing.prompts:
            inner = (new == self.format.document_end) | (new == self.format.pad)
            inner[:1] |= begins
            new = new | np.where(inner, np.uint32(INNER), np.uint32(0))
        self._add(new, counts)

    def keep_whole(self, num_ids: int) -> None:
        """Ends the sequence where a document of so many ids fits into the next one, and not into what is left of it.

        Cut off from its prompt, an answer would be learnt as if nobody had asked.
        """
        body = self.packing.sequence_length - self.format.body
        if self.packing.cross_documents and len(self.left) and num_ids <= body < len(self.left) + num_ids:
            self.end()

    def begin_document(self) -> None:
        """Marks where a document begins, in formats that do."""
        if self.format.document_start is not None:
            self._add(np.array([self.format.document_start], self.packing.dtype))

    def end_document(self, counts: bool = True) -> None:
        """Ends the sequence, or, where sequences may run over a document's end, marks it with a separator.

        `counts`: whether what the document ends with does; then its end is to be predicted too.
        """
        if self.format.document_end is not None:
            self._add(np.array([self.format.document_end], self.packing.dtype), counts)
        if not self.packing.cross_documents:
            self.end()
        elif len(self.left) and self.format.separator is not None:
            self._add(np.array([self.format.separator], self.packing.dtype))

    def end(self) -> None:
        """Writes what is left as a padded sequence, unless that is too short to be one."""
        if len(self.left) and self.left[-1] == self.format.separator:  # the sequence ends in one anyway
            self.left = self.left[:-1]
        if len(self.left) >= self.format.shortest:
            self._write(self.left[None])
        else:
            self.dropped += len(self.left)
        self.left = self.left[:0]

    def _add(self, ids: np.ndarray, counts: bool = True) -> None:
        body = self.packing.sequence_length - self.format.body
        ids = np.concatenate([self.left, ids if counts else ids | np.uint32(PROMPT)])
        full = len(ids) // body
        self.left = ids[full * body :]
        self._write(ids[: full * body].reshape(full, body))

    def _write(self, bodies: np.ndarray) -> None:
        """Writes [sequences, ids] as sequences of full length."""
        count, length = bodies.shape
        sequences = np.full((count, self.packing.sequence_length), self.format.pad, self.packing.dtype)
        first = int(self.format.row_start is not None)
        if self.format.row_start is not None:
            sequences[:, 0] = self.format.row_start
        sequences[:, first : first + length] = bodies
        if self.format.row_end is not None:
            sequences[:, first + length] = self.format.row_end
        self.file.write(sequences.tobytes())
        self.sequences += count
        self.tokens += count * (length + self.format.body)


@lru_cache(maxsize=4)
def load_tokenizer(text: str, special: bool = False) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json.

    Args:
        special: whether a special token's name in a text stands for that token; else it is text.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one process per core is enough
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = not special
    return tokenizer


def plain_tokenizer(text: str) -> str:
    """tokenizer.json without the padding and truncation of its last use."""
    return json.dumps(json.loads(text) | {"padding": None, "truncation": None}, sort_keys=True)


@lru_cache(maxsize=1)
def without_first_space(text: str) -> str:
    """tokenizer.json for the middle of a document: those in the manner of SentencePiece put a space before a text."""
    settings = json.loads(text)

    def changed(step: Any) -> Any:
        if isinstance(step, list):
            return [changed(inner) for inner in step if inner.get("type") != "Prepend"]
        if not isinstance(step, dict) or step.get("type") == "Prepend":
            return None
        first = {"prepend_scheme": "never", "add_prefix_space": False}
        inner = ("normalizers", "pretokenizers")
        return {
            name: first[name] if name in first else changed(value) if name in inner else value
            for name, value in step.items()
        }

    steps = {name: changed(settings.get(name)) for name in ("normalizer", "pre_tokenizer")}
    return json.dumps(settings | steps, sort_keys=True)


def pack(
    unit: Work, packing: Packing, files: tuple[IO[bytes], IO[bytes]], left_out: frozenset[int]
) -> tuple[Invalid, list[Counts]]:
    """Writes the sequences of a unit of work, those of training and those that are held out.

    Args:
        files: to which each of the two parts is written.
        left_out: the indices of documents that are not wanted.

    Returns:
        What could not be read, and the counts of each part.
    """
    invalid, setting = Invalid(), getattr(unit.source, "setting", "corpus")

    def note(error: InvalidFile | InvalidRecord | LeftOut) -> None:
        if packing.strict and not isinstance(error, LeftOut):
            raise SettingError(error, setting=f"{setting}.path", cure=MEND)
        invalid(error)

    writers = [_writer(file, packing) for file in files]
    packing = replace(packing, held_out=unit.held_out)
    for number, document in enumerate(read(unit.source, unit.shard, note)):
        invalid.fine(document, unit.source)
        if number in left_out:
            continue
        if document.parts and not packing.prompts:
            raise SettingError(
                f"{type(unit.source).__name__} gives documents of parts, such as {document.name}: set "
                "`prompts = True` in its class"
            )
        _pack_document(document, writers, packing)
    for writer in writers:
        if isinstance(writer, SequenceWriter):
            writer.end()
    names = ("sequences", "tokens", "documents", "dropped")
    return invalid, [Counts(**{name: getattr(writer, name) for name in names}) for writer in writers]


def _writer(file: IO[bytes], packing: Packing) -> SequenceWriter | PairWriter:
    if packing.format.pairs:
        return PairWriter(file, packing.format, packing.sequence_length, packing.dtype)
    return SequenceWriter(file, packing)


def _pack_document(document: Document, writers: Sequence[SequenceWriter | PairWriter], packing: Packing) -> None:
    met = set()
    for is_held_out, stretch in packing.held_out.parts(document):
        writer = writers[is_held_out]
        for used in [stretch] if is_held_out else packing.part.of(stretch):
            met.add(is_held_out)
            if isinstance(writer, PairWriter):
                writer.add(used.text, _sentences(used.text, packing))
            else:
                pack_stretch(used, writer, packing)
    for is_held_out in met:
        writers[is_held_out].documents += 1


def pack_stretch(stretch: Document, writer: SequenceWriter, packing: Packing) -> None:
    """Writes a stretch of a document, part by part; one with prompts into one sequence, where it fits."""
    parts = stretch.parts or (Part(stretch.text),)
    pieces: Iterable[Piece] = (piece for n, part in enumerate(parts) for piece in _pieces(part, n > 0, packing))
    rendered, end_counts = parts[0].rendered, parts[-1].counts
    if rendered:
        pieces, end_counts = _rendered(parts, packing)
    if packing.prompts:
        pieces = list(pieces)
        starts = packing.format.document_start is not None and not rendered
        ends = packing.format.document_end is not None
        writer.keep_whole(starts + sum(len(ids) for ids, _ in pieces) + ends)
    if not rendered:
        writer.begin_document()
    for number, (ids, counts) in enumerate(pieces):
        writer.add(ids, counts, begins=rendered and number == 0)
    writer.end_document(end_counts)


def _rendered(parts: Sequence[Part], packing: Packing) -> tuple[Iterable[Piece], bool]:
    """What a chat template has written is tokenized as `apply_chat_template` does: all of it at once.

    A token counts where one of its characters does. The end of the document is the end-of-text token that the template
    has put last; else it is added, and counts where the text before it does, which is the second value.
    """
    tokenizer = load_tokenizer(packing.tokenizer, special=True)
    encoding = tokenizer.encode("".join(part.text for part in parts), add_special_tokens=False)
    counting = np.repeat([part.counts for part in parts], [len(part.text) for part in parts])
    # Some tokenizers trim blanks from offsets: a token of blanks alone has none of its own, and ends before `end`.
    tokens = [
        (id_, bool(counting[min(begin, max(end - 1, 0)) : end].any()))
        for id_, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
    ]
    last = tokens[-1] if tokens else (None, False)
    if last[0] == packing.format.document_end:
        tokens.pop()
    return [([id_ for id_, _ in of], counts) for counts, of in groupby(tokens, key=lambda token: token[1])], last[1]


def _sentences(text: str, packing: Packing) -> Iterator[list[int]]:
    """The ids of each sentence of a text."""
    coming = sentences(text)
    begins = list(islice(coming, 1))  # a text, so that some tokenizers put a space before it
    while chunk := begins or list(islice(coming, SENTENCES)):
        tokenizer = load_tokenizer(packing.tokenizer if begins else without_first_space(packing.tokenizer))
        yield from (
            encoding.ids for encoding in tokenizer.encode_batch_fast(chunk, add_special_tokens=False) if encoding.ids
        )
        begins = []


def _pieces(part: Part, goes_on: bool, packing: Packing) -> Iterator[Piece]:
    """Parts are tokenized one by one: who completes a prompt later has tokenized it without its completion, too."""
    for number, block in enumerate(blocks(part.text, BLOCK)):
        text = packing.tokenizer
        tokenizer = load_tokenizer(without_first_space(text) if goes_on or number else text, part.special)
        yield tokenizer.encode_batch_fast([block], add_special_tokens=False)[0].ids, part.counts
