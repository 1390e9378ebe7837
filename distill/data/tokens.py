"""Text turned once into sequences of token ids, kept on disk under a key of everything that decides them.

`prepare` takes sources, a tokenizer, how text becomes sequences, and where these are kept; it gives stored
sequences. `build_tokens` makes what is not there yet.
"""

import hashlib
import logging
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.config.data import Duplicates
from distill.config.rules import no_prompts
from distill.config.settings import CorpusConfig, DataConfig, SourceConfig
from distill.data.build_tokens import Host, build, rate, this_host
from distill.data.contents import contents_of
from distill.data.disk_cache import folder_of, once
from distill.data.duplicates import describe_duplicates
from distill.data.heldout import HeldOut
from distill.data.mixture import quotas
from distill.data.packing import Packing, plain_tokenizer
from distill.data.remote import reachable
from distill.data.sequence_format import SequenceFormatOf, masked_format
from distill.data.sequence_store import SequenceStore
from distill.data.shards import INDEX, PARTS, Index, check_files, open_sequences, read_frequencies, read_index
from distill.data.sources import Source, find_source
from distill.data.sources.bundled import Bundled
from distill.data.sources.tokens import Tokens as StoredTokens
from distill.data.storage import Folder
from distill.data.work import fraction_needed, work_of
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import locked, quarantine, remove
from distill.runtime.progress import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 9  # raise it when the same inputs and settings would give other sequences

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Text:
    """Sources that are read one after the other, and what error lines call them, such as `corpus`."""

    sources: tuple[Source, ...]
    setting: str
    path: str = ""  # as the user gave it
    max_sequences: int | None = None  # that training takes of it, so that no more of it is read; None: all
    name: str = ""  # of the text that prepared sequences stand for; else as its sources describe themselves

    def describe(self) -> str:
        return self.name or " + ".join(source.describe() for source in self.sources)

    @property
    def prompts(self) -> bool:
        """Whether some of it may be there to be read only."""
        return any(source.prompts for source in self.sources)

    @property
    def stored(self) -> StoredTokens | None:
        """The prepared sequences that stand in for it, if they do."""
        return next((source for source in self.sources if isinstance(source, StoredTokens)), None)

    def identity(self, cache: str) -> list[Any]:
        """What decides the text, wherever it lies; `cache`: the folder with the record of the digests of files."""
        return [_identity_of(source, cache) for source in self.sources]


@dataclass(frozen=True)
class Stored:
    """The files that hold the sequences of one part."""

    place: str  # folder or URL
    shards: int
    bytes: int


@dataclass(frozen=True)
class Tokens:
    """The sequences of one part of a text. N sequences, L = sequence_length, V = length of the tokenizer."""

    sequences: SequenceStore  # [N, L]: tokens in the format of sequences, then padding
    counts: np.ndarray  # [V] int64: how often each id is in `sequences`, special tokens and padding included
    digest: str  # sha256 of the sequences: the same for the same content, wherever the files lie
    name: str  # as the sources describe themselves
    documents: int
    tokens: int  # ids in `sequences` that are not padding
    seconds: float  # it took to prepare the whole text, when that was done
    tokens_per_second: float  # of that preparation
    left_out: dict[str, int]  # records of no use, by the reason
    prompts: bool = False  # whether some tokens are no targets: `sequences` are records with a loss mask
    duplicates: dict[str, int] | None = None  # of the whole text, by `find_duplicates`; None: not counted
    sources: dict[str, "Tokens"] = field(default_factory=dict)  # of a mixture, by name
    stored: Stored | None = None  # where they are in files
    unit: str = "document"  # what `documents` counts
    held_out: int = 0  # sequences of the same text that are held out
    used: float = 1.0  # about what fraction of the text that is not held out became sequences, as few are needed


def corpus_text(corpus: CorpusConfig, data: DataConfig) -> Text:
    """The text of the corpus, or the bundled books that stand in for it.

    Raises:
        SettingError: it is not available.
    """
    source = find_source(corpus, "corpus", data)
    if source is None and corpus.fallback:
        source = Bundled.find(SourceConfig(kind="bundled"), "corpus", data)
    sources = (_need(source, corpus, "corpus"),)
    return Text(sources, "corpus", _path_of(corpus), corpus.max_sequences)


def heldout_text(text: Text, data: DataConfig) -> Text | None:
    """The whole books that are held out of the bundled ones; None of any other text, of which a part is held out."""
    if not any(isinstance(source, Bundled) and source.settings.split == "train" for source in text.sources):
        return None
    return Text((Bundled.find(SourceConfig(kind="bundled", split="heldout"), text.setting, data),), text.setting)


def corpus_texts(corpus: CorpusConfig, data: DataConfig) -> dict[str, Text]:
    """The texts of a mixture by the names of its sources; of another corpus its only one, by no name.

    Raises:
        SettingError: one of them is not available.
    """
    if not corpus.sources:
        return {"": corpus_text(corpus, data)}
    texts = {}
    weights = [corpus.weights[name] for name in corpus.sources]
    limits = (
        [None] * len(weights)
        if corpus.max_sequences is None
        else np.maximum(quotas(weights, corpus.max_sequences), 1).tolist()
    )
    for (name, settings), limit in zip(corpus.sources.items(), limits, strict=True):
        setting = f"corpus.sources.{name}"
        source = _need(find_source(settings, setting, data), settings, setting)
        texts[name] = Text((source,), setting, _path_of(settings), limit)
    return texts


def set_text(source: Any, setting: str, data: DataConfig) -> Text | None:
    """The text of an evaluation set; None where it is not available. `source` is its settings."""
    located = find_source(source, setting, data)
    return None if located is None else Text((located,), setting, _path_of(source))


def _need(source: Source | None, settings: Any, setting: str) -> Source:
    if source is None:
        raise SettingError(
            f"{setting}.path=null: no {settings.kind} text was found; give {setting}.path=FOLDER, or set "
            f"DISTILL_DATA to a folder that holds it, or name a data set as {setting}.hub"
        )
    return source


def _path_of(settings: Any) -> str:
    return str(settings.path or settings.hub) if settings.made_by is None else settings.made_by.path


def prepare(
    text: Text,
    tokenizer: "PreTrainedTokenizerBase",
    corpus: CorpusConfig,
    data: DataConfig,
    part: str,
    sequence_format: SequenceFormatOf = masked_format,
    recheck: bool = False,
) -> Tokens:
    """Sequences of a text from `data.tokens` or the cache; what is missing is built, together with other hosts.

    Args:
        part: `train` or `heldout`, of which both are built in one pass, or `all`.
        sequence_format: gives the format of sequences for a tokenizer.
        recheck: read all files again to check them, and stop at damage (`resume=strict`).

    Raises:
        SettingError: a file or record cannot be read, the tokenizer lacks a special token, there is not one sequence, a
            folder cannot be written, or the text has prompts and the format no place for them; `data.tokens` is
            damaged.
    """
    assert part in (*PARTS, "all")
    if part == "heldout" and not corpus.heldout:
        raise SettingError(f"corpus.heldout={corpus.heldout}: no text is held out to evaluate on; set it to 0.02 or so")
    if part == "all":  # an evaluation set, which stays as it was published
        corpus = corpus.changed(heldout=0.0, duplicates=Duplicates.keep)
    text = replace(text, sources=tuple(source.for_tokenizer(tokenizer) for source in text.sources))
    packing = _packing(text, tokenizer, corpus, sequence_format)
    few = part != "all" and data.tokens is None  # what is prepared on purpose is all of a text
    try:
        if text.stored is not None:
            text, packing, folder, index = _found(text, text.stored, packing, data, recheck)
        else:
            needed = text.max_sequences if few else None
            folder, index, packing = _build_sequences(text, packing, data, needed, recheck)
        tokens = _load(folder, index, part, text, packing, corpus, data)
    except Damaged as damage:
        if text.stored is not None:
            raise SettingError(
                damage, setting=f"{text.setting}.path", value=text.path, cure="restore that file, or prepare it again"
            ) from damage
        cure = ", or set resume=auto for that" if recheck and data.tokens is None else ""
        place = f"data.cache={data.cache}" if data.tokens is None else f"data.tokens={data.tokens}"
        raise SettingError(
            f"{place}: {damage}: restore that file, or delete its folder, and the same command makes it again from the "
            f"text{cure}"
        ) from damage
    if part == "heldout":  # of one text with that of training, which has logged them
        return tokens
    for reason, count in tokens.left_out.items():
        logger.info(f"left out: {counted(count, 'record')}: {reason}")
    if tokens.duplicates and tokens.duplicates["exact"] + tokens.duplicates.get("near", 0):
        logger.info(f"{tokens.name}: {describe_duplicates(tokens.duplicates)}")
    return tokens


def key_of(text: Text, settings: dict[str, Any], data: DataConfig) -> str:
    """The name of what is made from a text with these settings: that of a copy of the text, too."""
    return _key_of(text.identity(data.cache), settings)


def _key_of(identity: list[Any], settings: dict[str, Any]) -> str:
    return hashlib.sha256(repr((FORMAT, identity, sorted(settings.items()))).encode()).hexdigest()[:32]


def _identity_of(source: Source, cache: str) -> list[Any]:
    """The contents of a source's files, and its settings but for those of a user's class that say where these lie."""
    files = source.text_files
    identity = [contents_of(files, cache), source.identity]
    if source.made_from is None:
        return identity
    name, arguments, *code = source.made_from
    arguments = [(of, ("place",) if _is_place(value, files) else value) for of, value in arguments]
    return [name, arguments, code, *identity]


def _is_place(value: Any, files: list[str]) -> bool:
    """Whether a setting names a folder of all files, or the only one."""
    if not isinstance(value, str) or not files or (place := value.rstrip("/")) in ("", "."):
        return False
    return all(path == place or path.startswith(f"{place}/") for path in files)


def _folder_of(key: str, data: DataConfig) -> Folder:
    """Where the sequences of this key lie, or are to lie.

    Raises:
        SettingError: the folder cannot be reached or written, and does not hold them yet.
    """
    if data.tokens is None:
        return Folder(str(folder_of(data.cache, "tokens", key)), "data.cache")
    folder = Folder(f"{data.tokens.rstrip('/')}/{key}", "data.tokens")
    if folder.path is not None and not folder.exists(INDEX):
        folder_of(data.tokens, "", key, "data.tokens")
    return folder


def _build_sequences(
    text: Text, packing: Packing, data: DataConfig, needed: int | None, recheck: bool
) -> tuple[Folder, Index, Packing]:
    """The sequences of as much of the text as gives so many of training, if it has them, and how it was packed.

    None: of all of it.
    """
    tokens = None if needed is None else needed * packing.sequence_length
    fraction = 1.0 if tokens is None else fraction_needed(work_of(text.sources), tokens)
    identity = text.identity(data.cache)
    while True:
        packing = replace(packing, fraction=fraction)
        folder = _folder_of(_key_of(identity, packing.identity), data)
        index = _whole(folder, text, packing, data, recheck)
        if needed is None or fraction == 1 or index.train.sequences >= needed:
            return folder, index, packing
        fraction = min(1.0, 4 * fraction)


def _whole(folder: Folder, text: Text, packing: Packing, data: DataConfig, recheck: bool) -> Index:
    """The index of sequences that are all there, once they are built; damaged ones in the cache are made again."""
    _build_once(folder, text, packing, data)
    try:
        return _checked(folder, data, recheck)
    except Damaged as damage:
        if data.tokens is not None or recheck or folder.path is None:
            raise
        try:
            _remove_damaged(folder, folder.path, data)
        except OSError:  # another user's
            raise damage from None
    _build_once(folder, text, packing, data)
    return _checked(folder, data, recheck)


def _remove_damaged(folder: Folder, path: Path, data: DataConfig) -> None:
    """Removes sequences of the cache, unless another process of this machine has made them again already."""
    with locked(Path(f"{path}.lock")):  # which whoever makes them holds (`once`)
        try:
            _checked(folder, data, recheck=False)
        except Damaged as damage:
            if path.exists():
                remove(quarantine(path))  # renamed in one step, whatever kills this process
                logger.warning(f"{damage}: {folder.place} is removed, and made again")


def _checked(folder: Folder, data: DataConfig, recheck: bool) -> Index:
    """The index of finished sequences, of which those on this machine are there. Raises Damaged."""
    index = read_index(folder)
    for part in PARTS:
        read_frequencies(folder, part, index)
    if folder.path is not None:
        check_files(folder.path, index, data, in_full=recheck)
    return index


def _found(
    text: Text, source: StoredTokens, packing: Packing, data: DataConfig, recheck: bool
) -> tuple[Text, Packing, Folder, Index]:
    """The text as it was called when its sequences were made, how they were, and where they are.

    Raises:
        SettingError: none were made with these settings.
        Damaged: they are not as they were written.
    """
    folder = source.made_with(packing.described)
    index = _checked(folder, data, recheck)
    return replace(text, name=index.made.text), replace(packing, prompts=index.made.prompts), folder, index


def _build_once(folder: Folder, text: Text, packing: Packing, data: DataConfig) -> None:
    """Builds what is not there; on each host one process does, while others wait.

    Hosts share the work where they share `data.tokens`. They may share the cache, too, so the name of what they lock
    there has the host's in it.
    """
    with reachable("data.tokens", folder.place):
        is_there = folder.exists(INDEX)
    if is_there:
        return
    key = folder.place.rpartition("/")[2]
    host = Host() if data.tokens is None else this_host()
    scratch = folder_of(
        data.cache, "tokens", key if data.tokens is None else f"{key}.{socket.gethostname()}.{host.number}.build"
    )
    with once(scratch, lambda: folder.exists(INDEX)) as missing:
        if missing:
            build(folder, text.describe(), text.sources, packing, data, scratch, host)
    if data.tokens is not None:
        remove(scratch)


def _packing(
    text: Text,
    tokenizer: "PreTrainedTokenizerBase",
    corpus: CorpusConfig,
    sequence_format: SequenceFormatOf,
) -> Packing:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SettingError(
            f"teacher.path={tokenizer.name_or_path}: its tokenizer is not a `tokenizers` one; choose a model with a "
            "fast tokenizer"
        )
    format = sequence_format(tokenizer)
    if text.prompts and format.document_end is None:
        raise no_prompts(text.setting)
    if corpus.sequence_length < format.shortest + format.body:
        raise SettingError(
            f"corpus.sequence_length={corpus.sequence_length} is too short for a sequence: give "
            f"{format.shortest + format.body} or more"
        )
    return Packing(
        tokenizer=plain_tokenizer(backend.to_str()),
        vocabulary=len(tokenizer),
        format=format,
        sequence_length=corpus.sequence_length,
        cross_documents=corpus.cross_documents,
        held_out=HeldOut(corpus.heldout),
        prompts=text.prompts,
        duplicates=corpus.duplicates,
        near=corpus.near,
    )


def _load(
    folder: Folder, index: Index, part: str, text: Text, packing: Packing, corpus: CorpusConfig, data: DataConfig
) -> Tokens:
    part_name = PARTS[part == "heldout"]
    found = index.part(part_name)
    if not found.sequences:
        raise _no_sequences(index, part, text, corpus)
    counts = read_frequencies(folder, part_name, index)
    if len(counts) != packing.vocabulary:
        raise SettingError(
            f"{folder.place} was prepared with a tokenizer of {len(counts):,} tokens, and that of this run has "
            f"{packing.vocabulary:,}: remove that folder, or take that tokenizer"
        )
    is_remade = data.tokens is None and text.stored is None
    return Tokens(
        sequences=open_sequences(folder, part_name, index, data, is_remade),
        counts=counts,
        digest=index.digest(part_name),
        name=text.describe(),
        documents=found.documents,
        tokens=found.tokens,
        seconds=index.seconds,
        tokens_per_second=rate(index),
        left_out=index.left_out,
        prompts=packing.prompts,
        duplicates=index.duplicates,
        held_out=index.heldout.sequences if part == "train" else 0,
        used=packing.fraction,
        stored=Stored(folder.place, len(found.files), found.sequences * index.sequence_bytes),
    )


def _no_sequences(index: Index, part: str, text: Text, corpus: CorpusConfig) -> SettingError:
    if part == "heldout" and index.train.sequences:
        source = "the corpus" if text.setting == "corpus" else text.setting
        return SettingError(
            f"corpus.heldout={corpus.heldout}: {source} is too small to hold a part of it out; give more text, "
            "or leave `heldout` out of evaluate.sets"
        )
    count = index.train.documents + index.heldout.documents
    if text.prompts and not count:
        return SettingError(
            f"{text.setting}.path={text.path}: no document has a token that counts as a target; check "
            f"{text.setting}.field: conversations need messages of the assistant, prompts need answers"
        )
    return SettingError(
        f"{text.setting}.path={text.path}: not one sequence: {counted(count, 'document')}, none long "
        f"enough; check {text.setting}.kind and {text.setting}.fraction"
    )
