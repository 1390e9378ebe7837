"""Text turned once into sequences of token ids, kept on disk under a key of everything that decides them.

`prepare` takes sources, a tokenizer, how text becomes sequences, and where these are kept; it gives stored
sequences. `build_tokens` makes what is not there yet.
"""

import hashlib
import logging
import socket
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distill.config.data import Duplicates
from distill.config.rules import no_prompts
from distill.config.settings import CorpusConfig, DataConfig, SourceConfig
from distill.data.build_tokens import Host, build, this_host
from distill.data.contents import contents_of
from distill.data.disk_cache import folder_of, once
from distill.data.duplicates import describe_duplicates
from distill.data.heldout import HeldOut
from distill.data.order import Mixture, order_of, quotas
from distill.data.packing import Packing, plain_tokenizer
from distill.data.remote import reachable
from distill.data.sequence_format import SequenceFormatOf, masked_format
from distill.data.sequence_store import SequenceStore, StackedSequences, subsample
from distill.data.shards import INDEX, PARTS, Index, Shards, read_index
from distill.data.sources import Source, find_source
from distill.data.sources.bundled import Bundled
from distill.data.sources.tokens import Tokens as StoredTokens
from distill.data.storage import Folder
from distill.data.work import fraction_needed, work_of
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import remove
from distill.runtime.progress import counted
from distill.runtime.seed import key as random_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 10  # raise it when the same inputs and settings would give other sequences

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Text:
    """Sources that are read one after the other, and what error lines call them, such as `corpus`."""

    sources: tuple[Source, ...]
    setting: str
    path: str = ""  # as the user gave it, if so
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
        return [[contents_of(source.text_files, cache), source.identity, source.made_from] for source in self.sources]

    def error(self, problem: str, cure: str) -> SettingError:
        setting = f"{self.setting}.path" if self.path else self.setting
        return SettingError(problem, setting=setting, value=self.path or None, cure=cure)


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
    unit: str = "document"  # what `documents` counts
    held_out: int = 0  # sequences of the same text that are held out
    used: float = 1.0  # about what fraction of the text that is not held out became sequences, as few are needed


class Mixed(NamedTuple):
    """The sequences that a run trains on, and their order."""

    tokens: Tokens  # with the counts of an epoch as it is fed
    sequences: SequenceStore
    order: Mixture


def corpus_text(corpus: CorpusConfig, data: DataConfig) -> Text:
    """The text of the corpus, or the bundled books that stand in for it.

    Raises:
        SettingError: it is not available.
    """
    text = set_text(corpus, "corpus", data)
    if text is None and corpus.fallback:
        text = set_text(SourceConfig(kind="bundled"), "corpus", data)
    return replace(_need(text, corpus, "corpus"), path=_path_of(corpus), max_sequences=corpus.max_sequences)


def heldout_text(text: Text, data: DataConfig) -> Text | None:
    """The whole books that are held out of the bundled ones; None of any other text, of which a part is held out."""
    if not any(isinstance(source, Bundled) and source.settings.split == "train" for source in text.sources):
        return None
    return set_text(SourceConfig(kind="bundled", split="heldout"), text.setting, data)


def corpus_texts(corpus: CorpusConfig, data: DataConfig) -> dict[str, Text]:
    """The texts of a mixture by the names of its sources; of another corpus its only one, by no name.

    Raises:
        SettingError: one of them is not available.
    """
    if not corpus.sources:
        return {"": corpus_text(corpus, data)}
    texts = {name: f"corpus.sources.{name}" for name in corpus.sources}
    limits: list[int | None] = [None] * len(texts)
    if corpus.max_sequences is not None:
        weights = [corpus.weights[name] for name in corpus.sources]
        limits = np.maximum(quotas(weights, corpus.max_sequences), 1).tolist()
    return {
        name: replace(_need(set_text(settings, texts[name], data), settings, texts[name]), max_sequences=limit)
        for (name, settings), limit in zip(corpus.sources.items(), limits, strict=True)
    }


def set_text(source: Any, setting: str, data: DataConfig) -> Text | None:
    """The text of a source with these settings, such as an evaluation set; None where it is not available."""
    found = find_source(source, setting, data)
    return None if found is None else Text((found,), setting, _path_of(source))


def _need(text: Text | None, settings: Any, setting: str) -> Text:
    if text is None:
        raise SettingError(
            f"{setting}.path=null: no {settings.kind} text was found; give {setting}.path=FOLDER, or set "
            f"DISTILL_DATA to a folder that holds it, or name a data set as {setting}.hub"
        )
    return text


def _path_of(settings: Any) -> str:
    return str(settings.path or "") if settings.made_by is None else ""


def prepare(
    text: Text,
    tokenizer: "PreTrainedTokenizerBase",
    corpus: CorpusConfig,
    data: DataConfig,
    part: str,
    sequence_format: SequenceFormatOf = masked_format,
) -> Tokens:
    """Sequences of a text from `data.tokens` or the cache; what is missing is built, together with other hosts.

    Args:
        part: `train` or `heldout`, of which both are built in one pass, or `all`.
        sequence_format: gives the format of sequences for a tokenizer.

    Raises:
        SettingError: a file or record cannot be read, the tokenizer lacks a special token, there is not one sequence, a
            folder cannot be written, or the text has prompts and the format no place for them; prepared sequences are
            damaged.
    """
    assert part in (*PARTS, "all")
    if part == "heldout" and not corpus.heldout:
        raise SettingError(
            "no text is held out to evaluate on", setting="corpus.heldout", value=corpus.heldout, cure="set it to 0.02"
        )
    if part == "all":  # an evaluation set, which stays as it was published
        corpus = corpus.changed(heldout=0.0, duplicates=Duplicates.keep)
    text = replace(text, sources=tuple(source.for_tokenizer(tokenizer) for source in text.sources))
    packing = _packing(text, tokenizer, corpus, sequence_format)
    try:
        if text.stored is None:
            few = part != "all" and data.tokens is None  # what is prepared on purpose is all of a text
            folder, index, packing = _build(text, packing, data, text.max_sequences if few else None)
        else:
            folder = text.stored.made_with(packing.described)
            index = read_index(folder)
            text = replace(text, name=index.made.text)
    except Damaged as damage:
        if text.stored is not None:
            raise text.error(str(damage), "restore that file, or prepare it again") from damage
        setting, value = ("data.cache", data.cache) if data.tokens is None else ("data.tokens", data.tokens)
        cure = "restore that file, or delete its folder, and the same command makes it again from the text"
        raise SettingError(damage, setting=setting, value=value, cure=cure) from damage
    tokens = _load(folder, index, part, text, packing, corpus, data)
    if part == "heldout":  # of one text with that of training, which has logged them
        return tokens
    for reason, count in tokens.left_out.items():
        logger.info(f"left out: {counted(count, 'record')}: {reason}")
    if tokens.duplicates and tokens.duplicates["exact"] + tokens.duplicates.get("near", 0):
        logger.info(f"{tokens.name}: {describe_duplicates(tokens.duplicates)}")
    return tokens


def _packing(
    text: Text, tokenizer: "PreTrainedTokenizerBase", corpus: CorpusConfig, sequence_format: SequenceFormatOf
) -> Packing:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SettingError(
            "its tokenizer is not a `tokenizers` one", setting="teacher.path", value=tokenizer.name_or_path,
            cure="choose a model with a fast tokenizer",
        )  # fmt: skip
    format = sequence_format(tokenizer)
    if text.prompts and format.document_end is None:
        raise no_prompts(text.setting)
    if corpus.sequence_length < (shortest := format.shortest + format.body):
        raise SettingError(
            "too short for a sequence", setting="corpus.sequence_length", value=corpus.sequence_length,
            cure=f"give {shortest} or more",
        )  # fmt: skip
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


def key_of(text: Text, settings: dict[str, Any], data: DataConfig) -> str:
    """The name of what is made from a text with these settings: that of a copy of the text, too."""
    content = (FORMAT, text.identity(data.cache), sorted(settings.items()))
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def _build(text: Text, packing: Packing, data: DataConfig, needed: int | None) -> tuple[Folder, Index, Packing]:
    """The sequences of as much of the text as gives so many of training, if it has them, and how it was packed.

    None: of all of it. Raises Damaged where they are there, and are not as they were written.
    """
    tokens = None if needed is None else needed * packing.sequence_length
    fraction = 1.0 if tokens is None else fraction_needed(work_of(text.sources), tokens)
    while True:
        packing = replace(packing, fraction=fraction)
        folder = _built(text, packing, data)
        index = read_index(folder)
        if needed is None or fraction == 1 or index.train.sequences >= needed:
            return folder, index, packing
        fraction = min(1.0, 4 * fraction)


def _built(text: Text, packing: Packing, data: DataConfig) -> Folder:
    """Where the sequences of a text are, once they are built; on each host one process builds, while others wait.

    Hosts share the work where they share `data.tokens`. They may share the cache, too, so the name of what they lock
    there has the host's in it.

    Raises:
        SettingError: the folder cannot be reached or written, and does not hold them yet.
    """
    key = key_of(text, packing.identity, data)
    if data.tokens is None:
        host, scratch = Host(), folder_of(data.cache, "tokens", key)
        folder = Folder(str(scratch), "data.cache")
    else:
        folder = Folder(f"{data.tokens.rstrip('/')}/{key}", "data.tokens")
    with reachable("data.tokens", folder.place):
        if folder.exists(INDEX):
            return folder
    if data.tokens is not None:
        if folder.path is not None:
            folder_of(data.tokens, "", key, "data.tokens")
        host = this_host()
        scratch = folder_of(data.cache, "tokens", f"{key}.{socket.gethostname()}.{host.number}.build")
    with once(scratch, lambda: folder.exists(INDEX)) as missing:
        if missing:
            build(folder, text.describe(), text.sources, packing, data, scratch, host)
    if data.tokens is not None:
        remove(scratch)
    return folder


def _load(
    folder: Folder, index: Index, part: str, text: Text, packing: Packing, corpus: CorpusConfig, data: DataConfig
) -> Tokens:
    part_name = PARTS[part == "heldout"]
    found = index.part(part_name)
    if not found.sequences:
        if part == "heldout" and index.train.sequences:
            problem, cure = f"{text.setting} is too small to hold a part of it out", "give more text"
            raise SettingError(problem, setting="corpus.heldout", value=corpus.heldout, cure=cure)
        count = index.train.documents + index.heldout.documents
        problem = f"not one sequence: {counted(count, 'document')}, none long enough"
        if text.prompts and not count:
            problem = "no document has a token that counts as a target: conversations need messages of the assistant"
        raise text.error(problem, f"check {text.setting}.kind, {text.setting}.field and {text.setting}.fraction")
    return Tokens(
        sequences=Shards(folder, part_name, index, data),
        counts=found.counts,
        digest=index.digest(part_name),
        name=text.describe(),
        documents=found.documents,
        tokens=found.tokens,
        seconds=index.seconds,
        tokens_per_second=index.tokens_per_second,
        left_out=index.left_out,
        prompts=index.made.prompts,
        duplicates=index.duplicates,
        held_out=index.heldout.sequences if part == "train" else 0,
        used=packing.fraction,
    )


def prepare_mixture(
    corpus: CorpusConfig,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    sequence_format: SequenceFormatOf,
    seed: int,
) -> Mixed:
    """The training sequences of a mixture.

    With `corpus.max_sequences` an epoch has at most so many sequences, and each source gives at most its fraction, a
    seeded choice of its sequences.

    Raises:
        SettingError: as `prepare`, or a weight is too small for a single sequence of an epoch.
    """
    texts = corpus_texts(corpus, data)
    # Each source has a window of its own, so that all of them together take no more memory than that of one corpus.
    data = data.changed(shuffle_bytes=max(1, data.shuffle_bytes // len(texts)))
    sources = {name: prepare(text, tokenizer, corpus, data, "train", sequence_format) for name, text in texts.items()}
    stores = [
        subsample(tokens.sequences, texts[name].max_sequences, f"training rows of {name}", data.shuffle_bytes)
        for name, tokens in sources.items()
    ]
    # No two sources have the same seed.
    seeds = [int(random_key(seed, f"order of {name}") >> np.uint64(1)) for name in sources]
    order = Mixture(
        names=tuple(sources),
        weights=tuple(corpus.weights[name] for name in sources),
        orders=tuple(order_of(store, data.shuffle_bytes, own) for store, own in zip(stores, seeds, strict=True)),
        tokens_per_sequence=tuple(tokens.tokens / len(tokens.sequences) for tokens in sources.values()),
        seed=seed,
    )
    return Mixed(_together(sources, order), StackedSequences(stores), order)


def _together(sources: dict[str, Tokens], order: Mixture) -> Tokens:
    """All sources as one corpus. Tokens and their counts are those of an epoch, a fraction from each source."""
    parts = list(sources.values())
    factors = order.quotas / [len(part.sequences) for part in parts]
    fractions, seconds = order.quotas / len(order), sum(part.seconds for part in parts)
    identity = [(name, part.digest, int(size)) for (name, part), size in zip(sources.items(), order.sizes, strict=True)]
    named = zip(fractions, sources.items(), strict=True)
    duplicates = [Counter(part.duplicates) for part in parts if part.duplicates is not None]  # searched one by one
    return Tokens(
        sequences=StackedSequences([part.sequences for part in parts]),
        counts=np.rint(factors @ np.stack([part.counts for part in parts])).astype(np.int64),
        digest=hashlib.sha256(repr(identity).encode()).hexdigest(),
        name=" + ".join(f"{fraction:.1%} {name} ({part.name})" for fraction, (name, part) in named),
        documents=sum(part.documents for part in parts),
        tokens=round(float(factors @ [part.tokens for part in parts])),
        seconds=seconds,
        tokens_per_second=sum(part.tokens for part in parts) / max(seconds, 1e-9),
        left_out=sum((Counter(part.left_out) for part in parts), Counter()),
        prompts=any(part.prompts for part in parts),
        duplicates={name: sum(one[name] for one in duplicates) for name in duplicates[0]}
        if len(duplicates) == len(parts)
        else None,
        sources=sources,
        held_out=sum(part.held_out for part in parts),
        used=float(fractions @ [part.used for part in parts]),
    )
