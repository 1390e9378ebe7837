"""The settings of a corpus: where its text comes from, how it becomes sequences, and where these are kept."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator
from pydantic.json_schema import SkipJsonSchema

from distill.config.base import LocalPath, Refusal, Settings, setting
from distill.config.component import SOURCES, TABLES, Component, Part, built_in, group_named, in_group, kinds
from distill.runtime.errors import did_you_mean

HELDOUT = "heldout"  # the kind of an evaluation set that is a part of the corpus
MIXTURE = "mixture"  # the kind of a corpus of several sources
EXAMPLE = "{wiki: {kind: wikitext, path: WIKI, weight: 0.3}, books: {kind: gutenberg, path: BOOKS, weight: 0.7}}"


# What to do when a corpus or an evaluation set is not available.
Missing = StrEnum("Missing", ["stop", "skip"])
# What becomes of documents that are there several times: nothing, they are counted, the first of those with the same
# text stays, and of those with almost the same text; one that is held out before one that is trained on.
Duplicates = StrEnum("Duplicates", ["keep", "count", "drop", "near"])
# A document of a plain text file: a line, what stands between two blank lines, or the whole file.
DocumentUnit = StrEnum("DocumentUnit", ["line", "blank", "file"])


class NearConfig(Settings):
    """When two documents are near duplicates, for `corpus.duplicates=near`."""

    threshold: float = setting(0.8, "Documents are alike that share this fraction of shingles (Jaccard).", ge=0.1, le=1)
    shingle: int = setting(5, "A shingle is so many words in a row, without case.", unit="words", ge=1, le=100)
    # Fewer permutations would leave hardly a choice of bands.
    permutations: int = setting(128, "Numbers of a MinHash signature; more estimate better.", ge=16, le=4096)


class SourceConfig(Part):
    """Where documents or labelled examples come from.

    `kind` names a file of `distill/data/sources/`, or of `distill/data/tables/`, whose arguments are further settings.
    """

    kind: str = setting("", "The format of the text, or a published corpus.")
    path: LocalPath | None = setting(None, "File, folder or glob; null: the usual folder in $DISTILL_DATA, then `hub`.")
    field: str | None = setting(None, "Column of the text; null is `text`, else `messages` or `conversations`.")
    encoding: str | None = setting(None, "Encoding of plain text, JSONL and CSV files; null is UTF-8.")
    document: DocumentUnit | None = setting(None, "A document of plain text; null cuts about 1 MiB of paragraphs.")
    prompt: str | None = setting(None, "Column of what a causal model reads before `field` and does not predict.")
    template: str | None = setting(
        None, "The chat template of conversations, in Jinja or as FILE.jinja; null: the tokenizer's own."
    )
    hub: LocalPath | None = setting(None, "Name of a data set on the Hugging Face Hub.")
    subset: str | None = setting(None, "Configuration of the data set on the Hub.")
    split: str = setting("train", "Split of a Hub data set, of the usual folder, and of a folder of several.")
    streaming: bool = setting(False, "Read a Hub data set without downloading it whole.")
    fraction: float = setting(1.0, "Use this seeded fraction of the documents.", gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, values: Any) -> Any:
        """What is null was not given: the source, which may be of a class of the user's, has a default of its own."""
        if not isinstance(values, dict):
            return values
        return {name: one for name, one in values.items() if one is not None or name not in (*OF_SOURCE, "sources")}

    def refusals(self) -> Iterator[Refusal]:
        choices = [*kinds(SOURCES), *kinds(TABLES)]
        if self.target is None and self.kind not in (*choices, HELDOUT, MIXTURE):
            problem = f"not known{did_you_mean(self.kind, choices)}" if self.kind else "missing"
            cure = f"choose one of {', '.join(choices)}, or name a class of your own as {self.group}._target_"
            yield ".kind", self.kind or None, problem, cure
        if self.target is None and self.kind == MIXTURE and type(self) is SourceConfig:
            yield ".kind", MIXTURE, "for what is trained on", "name the source of one text"
        if self.made_by is None:
            self.refuse_arguments()

    @property
    def made_by(self) -> Component | None:
        """What makes the source, where that is a callable of the user's or a table; None for a kind of text."""
        values = {name: getattr(self, name) for name in OF_SOURCE if name in self.model_fields_set}
        given = {name: getattr(one, "value", one) for name, one in values.items() if one is not None}
        if self.target is not None:
            return self.component("", given, tuple(given))
        if self.kind not in kinds(TABLES):
            return None
        given |= {name: value for name, value in self.arguments.items() if value is not None}
        return Component(self.group, built_in(TABLES, self.kind), given)


# The settings of a source besides what it is.
OF_SOURCE = tuple(name for name in SourceConfig.model_fields if name not in ("kind", "group", "target"))


class MixedSourceConfig(SourceConfig):
    """One source of a mixture."""

    weight: float = setting(..., "Its part of the sequences; weights are divided by their sum.", gt=0, le=1e12)

    def refusals(self) -> Iterator[Refusal]:
        yield from super().refusals()
        if not self.group.rpartition(".")[2].isidentifier():
            yield ".", None, "no name of a source", "take letters, digits and underscores"
        if self.target is None and self.kind in (*kinds(TABLES), MIXTURE, HELDOUT):
            yield ".kind", self.kind, "no text that can be mixed", "name where its text comes from"


class CorpusConfig(SourceConfig):
    """What the text is that the student is trained on, and how it is cut into sequences of token ids."""

    group: SkipJsonSchema[str] = group_named("corpus")
    kind: str = setting("gutenberg", "The format of the text or the examples, or a published corpus.")
    sources: Annotated[dict[str, MixedSourceConfig], BeforeValidator(in_group("corpus.sources"))] = setting(
        dict, "Sources of a mixture by name."
    )
    sequence_length: int = setting(128, "Length of a sequence.", unit="tokens", ge=10, le=131_072)
    cross_documents: bool = setting(False, "Let sequences run over the end of a document.")
    heldout: float = setting(0.02, "Keep this fraction of the documents for the evaluation set `heldout`.", ge=0, lt=1)
    vocab_size: int = setting(6144, "Size of a tokenizer that is trained here.", unit="tokens", ge=300, le=4_000_000)
    duplicates: Duplicates = setting(Duplicates.keep, "Keep, count or drop equal documents, or near ones too.")
    near: NearConfig = setting(NearConfig, "When two documents are near duplicates.")
    fallback: bool = setting(False, "Train on the bundled books when there is no path, no $DISTILL_DATA and no `hub`.")
    max_sequences: int | None = setting(
        None, "Train on at most this many sequences or labelled examples, a seeded choice; null is all.",
        unit="sequences",
        ge=0, le=10**12,
    )  # fmt: skip
    max_unknown: float = setting(0.2, "Stop when more than this fraction of the text is unknown tokens.", ge=0, le=1)
    unlabelled: LocalPath | None = setting(None, "Examples that the teacher labels: file, folder or glob.")

    def refusals(self) -> Iterator[Refusal]:
        yield from super().refusals()
        if self.max_sequences == 0 and self.unlabelled is None:
            yield ".max_sequences", "0", "too small", "give 1 or more, or null for all"
        if self.kind == HELDOUT and self.target is None:
            yield ".kind", HELDOUT, "for evaluation sets", "name where the corpus comes from"
        is_mixture = self.kind == MIXTURE and self.target is None
        if self.sources and not is_mixture:
            problem = f"is for a mixture, but corpus.kind={self.kind}"
            yield ".sources", None, problem, "set corpus=mixture, or corpus.sources=null"
        for name, value in self.given(*OF_SOURCE).items() if is_mixture else ():
            yield f".{name}", value, "each source of a mixture has its own", f"set corpus.sources.NAME.{name}"
        if is_mixture and len(self.sources) < 2:
            yield ".", MIXTURE, "needs two sources or more", f"give corpus.sources='{EXAMPLE}'"

    @property
    def parts(self) -> "list[SourceConfig]":
        """The sources of a mixture, or the only source."""
        return [*self.sources.values()] or [self]

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each source of a mixture."""
        return {name: source.weight for name, source in self.sources.items()}


class DataConfig(Settings):
    """Where prepared sequences are kept, and how they are made and read."""

    cache: LocalPath = setting("~/.cache/distill", "Folder of prepared sequences on this machine.")
    tokens: LocalPath | None = setting(None, "Folder or URL that several hosts fill and read; null uses `cache`.")
    shard_bytes: int = setting(64 << 20, "About the size of one file of sequences.", unit="bytes", ge=1, le=1 << 40)
    local: LocalPath | None = setting(None, "Folder on each node's own disk for files that are read; null: `cache`.")
    local_bytes: int = setting(16 << 30, "Keep at most this much there, of files.", unit="bytes", ge=1, le=1 << 50)
    shuffle_bytes: int = setting(4 << 30, "Shuffle this much of sequences together.", unit="bytes", ge=1, le=1 << 40)
    workers: int | None = setting(None, "Processes that prepare tokens; null is one per core.", ge=1, le=1024)

    def refusals(self) -> Iterator[Refusal]:
        if self.local_bytes < 2 * self.shuffle_bytes:
            twice = f"less than twice data.shuffle_bytes={self.shuffle_bytes}, with room to fetch the next sequences"
            yield ".local_bytes", self.local_bytes, twice, "raise it, or lower data.shuffle_bytes"
