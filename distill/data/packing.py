"""One shard's documents packed into a file of sequences: the work of one process, without torch or transformers."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from typing import IO, Any, Literal

import numpy as np

from distill.config.data import Duplicates, NearConfig
from distill.data.document import Document, Part
from distill.data.heldout import HeldOut
from distill.data.readers import blocks
from distill.data.segment_pairs import PairWriter, sentences
from distill.data.sequence_format import SequenceFormat
from distill.data.sequence_store import token_dtype
from distill.data.sources import read
from distill.data.work import Work
from distill.runtime.errors import SettingError

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
    prompts: bool = False  # whether documents may have prompts, so that tokens are records with a loss mask
    duplicates: Duplicates = Duplicates.keep
    near: NearConfig = field(default_factory=NearConfig)
    fraction: float = 1.0  # of the units of work that are trained on

    @property
    def identity(self) -> dict[str, Any]:
        """Everything here that decides what is prepared, by name: the sequences, and whether duplicates are counted."""
        counted = {"counted": True} if self.duplicates is Duplicates.count else {}
        return {**self.described, "prompts": self.prompts, "fraction": self.fraction, **counted}

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
        """That of a token in the files."""
        return token_dtype(self.id_dtype, self.prompts)

    @property
    def id_dtype(self) -> Literal["uint16", "uint32"]:
        return "uint16" if self.num_ids <= 1 << 16 else "uint32"

    @property
    def num_ids(self) -> int:
        """The vocabulary, and what fills up sequences where that is beyond it."""
        return max(self.vocabulary, self.format.pad + 1)


class SequenceWriter:
    """Sequences written to a file as documents come in.

    Attributes:
        sequences, tokens, documents: how many were written.
        dropped: tokens of ends of documents that were too short for a sequence.
    """

    def __init__(self, file: IO[bytes], packing: Packing) -> None:
        self.file, self.packing, self.format = file, packing, packing.format
        self.body = packing.sequence_length - packing.format.body  # tokens of documents in a sequence
        self.left = np.empty(0, packing.dtype)  # tokens that do not fill a sequence yet
        self.sequences = self.tokens = self.documents = self.dropped = 0

    def add(self, tokens: np.ndarray) -> None:
        """Writes the tokens of a document; one with prompts into one sequence, where it fits.

        Cut off from its prompt, an answer would be learnt as if nobody had asked.
        """
        packing, separator = self.packing, self.format.separator
        if packing.prompts and packing.cross_documents and len(tokens) <= self.body < len(self.left) + len(tokens):
            self.end()
        self._fill(tokens)
        if not packing.cross_documents:
            self.end()
        elif separator is not None and len(self.left):
            self._fill(np.array([separator], packing.dtype))

    def end(self) -> None:
        """Writes what is left as a padded sequence, unless that is too short to be one."""
        separator = self.format.separator
        if separator is not None and len(self.left) and self.left[-1] == separator:  # the sequence ends in one anyway
            self.left = self.left[:-1]
        if len(self.left) >= self.format.shortest:
            self._write(self.left[None])
        else:
            self.dropped += len(self.left)
        self.left = self.left[:0]

    def _fill(self, tokens: np.ndarray) -> None:
        tokens = np.concatenate([self.left, tokens])
        full = len(tokens) // self.body
        self.left = tokens[full * self.body :]
        self._write(tokens[: full * self.body].reshape(full, self.body))

    def _write(self, bodies: np.ndarray) -> None:
        """Writes [sequences, tokens] as sequences of full length."""
        count, length = bodies.shape
        sequences = np.zeros((count, self.packing.sequence_length), self.packing.dtype)
        (sequences["id"] if self.packing.prompts else sequences)[:] = self.format.pad
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
def load_tokenizer(text: str) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json, to which the name of a special token is text."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one process per core is enough
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
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
) -> tuple[Counter[str], list[dict[str, int]]]:
    """Writes the sequences of a unit of work, those of training and those that are held out.

    Args:
        files: to which each of the two parts is written.
        left_out: the indices of documents that are not wanted.

    Returns:
        How many records are of no use, by the reason, and how much each part has, by the names of `shards.Part`.

    Raises:
        SettingError: something cannot be read.
    """
    no_use = Counter[str]()
    writers = [_writer(file, packing) for file in files]
    packing = replace(packing, held_out=unit.held_out)
    for number, document in enumerate(read(unit.source, unit.shard, no_use)):
        if number in left_out:
            continue
        if (document.parts or document.loss_mask is not None) and not packing.prompts:
            raise SettingError(
                f"{type(unit.source).__name__} gives documents of parts, such as {document.name}: set "
                "`prompts = True` in its class"
            )
        _pack_document(document, writers, packing, unit.trains)
    for writer in writers:
        if isinstance(writer, SequenceWriter):
            writer.end()
    names = ("sequences", "tokens", "documents", "dropped")
    return no_use, [{name: getattr(writer, name) for name in names} for writer in writers]


def _writer(file: IO[bytes], packing: Packing) -> SequenceWriter | PairWriter:
    if packing.format.pairs:
        return PairWriter(file, packing.format, packing.sequence_length, packing.dtype)
    return SequenceWriter(file, packing)


def _pack_document(
    document: Document, writers: Sequence[SequenceWriter | PairWriter], packing: Packing, trains: bool
) -> None:
    met = set()
    for is_held_out, stretch in packing.held_out.parts(document):
        if not is_held_out and not trains:
            continue
        writer = writers[is_held_out]
        met.add(is_held_out)
        if isinstance(writer, PairWriter):
            ids = _sentences(stretch.text, packing) if stretch.ids is None else [stretch.ids.tolist()]
            writer.add(stretch.key, ids)
        else:
            writer.add(tokens_of(stretch, packing))
    for is_held_out in met:
        writers[is_held_out].documents += 1


def tokens_of(document: Document, packing: Packing) -> np.ndarray:
    """The tokens of a document, with those that mark its beginning and end in its format.

    Its end is the end-of-text token that its ids end in; else that is added, and is a target where the token before is.
    """
    start, end = packing.format.document_start, packing.format.document_end
    if document.ids is None:
        ids, loss_mask = _tokenized(document, packing)
    else:
        ids, loss_mask = document.ids, True if document.loss_mask is None else document.loss_mask
        if len(ids) and not 0 <= ids.min() <= ids.max() < packing.num_ids:
            problem = f"token ids from {ids.min()} to {ids.max()}, and the tokenizer has {packing.vocabulary:,} tokens"
            raise SettingError(f"{document.name} has {problem}: give ids of the run's own tokenizer")
    begins = int(start is not None and document.add_bos)
    ends = int(end is not None and (document.ids is None or not len(ids) or ids[-1] != end))
    tokens = np.zeros(begins + len(ids) + ends, packing.dtype)
    numbers = tokens["id"] if packing.prompts else tokens
    numbers[begins : begins + len(ids)] = ids
    if begins:
        numbers[0] = start
    if ends:
        numbers[-1] = end
    if packing.prompts:
        mask, inner = tokens["loss_mask"], tokens["inner"]
        mask[:begins], mask[begins : begins + len(ids)] = True, loss_mask
        inner[begins:] = (numbers[begins:] == end) | (numbers[begins:] == packing.format.pad)
        inner[:1] |= not document.add_bos
        inner[-1] = False
        if ends:
            mask[-1] = mask[-2] if len(ids) else True
    return tokens


def _tokenized(document: Document, packing: Packing) -> tuple[np.ndarray, bool | np.ndarray]:
    """Ids and loss mask of a text, tokenized part by part, as who completes a prompt later tokenizes it alone, too."""
    pieces, targets = list[np.ndarray](), list[bool]()
    for part in document.parts or (Part(document.text),):
        for block in blocks(part.text, BLOCK):
            text = without_first_space(packing.tokenizer) if pieces else packing.tokenizer
            encoding = load_tokenizer(text).encode_batch_fast([block], add_special_tokens=False)[0]
            pieces.append(np.array(encoding.ids, np.uint32))
            targets.append(part.loss)
    ids = np.concatenate(pieces or [np.empty(0, np.uint32)])
    return ids, np.repeat(targets, [len(piece) for piece in pieces]) if document.parts else True


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
