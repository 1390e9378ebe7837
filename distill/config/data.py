"""The settings of a corpus: where its text comes from, how it becomes sequences, and where these are kept."""

from enum import Enum
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator
from pydantic.json_schema import SkipJsonSchema

from distill.config.base import LocalPath, Settings, setting
from distill.config.component import (
    GROUP,
    SOURCES,
    TABLES,
    TARGET,
    Component,
    Part,
    built_in,
    group_named,
    in_group,
    kinds,
)
from distill.config.errors import shown
from distill.runtime.errors import SettingError, did_you_mean

HELDOUT = "heldout"  # the kind of an evaluation set that is a part of the corpus
MIXTURE = "mixture"  # the kind of a corpus of several sources
EXAMPLE = "{wiki: {kind: wikitext, path: WIKI, weight: 0.3}, books: {kind: gutenberg, path: BOOKS, weight: 0.7}}"


class Missing(Enum):
    """What to do when a corpus or an evaluation set is not available."""

    stop = "stop"
    skip = "skip"


class Duplicates(Enum):
    """What becomes of documents that are there several times."""

    keep = "keep"  # nothing: they are not even counted
    count = "count"  # they are counted, and stay
    drop = "drop"  # the first of those with the same text stays
    near = "near"  # and of those with almost the same text; one that is held out before one that is trained on


class DocumentUnit(Enum):
    """What of a plain text file is one document."""

    line = "line"  # a line: the published format of an article a line
    blank = "blank"  # what stands between two blank lines
    file = "file"  # the whole file


class NearConfig(Settings):
    """When two documents are near duplicates, for `corpus.duplicates=near`."""

    threshold: float = setting(
        0.8, "Two documents are alike when they share this fraction of their shingles (Jaccard).", ge=0.1, le=1
    )
    shingle: int = setting(
        5, "A shingle is this many words in a row, without case and signs.", unit="words", ge=1, le=100
    )
    # Fewer permutations would leave hardly a choice of bands.
    permutations: int = setting(
        128, "A MinHash signature has this many numbers; more estimate the similarity better.", ge=16, le=4096
    )


class SourceConfig(Part):
    """Where documents or labelled examples come from.

    `kind` names a file of `distill/data/sources/`, or of `distill/data/tables/`, whose arguments are further settings.
    """

    kind: str = setting("", "The format of the text, or a published corpus.")
    path: LocalPath | None = setting(
        None, "File, folder or glob of the text; null reads the usual folder under $DISTILL_DATA, then `hub`."
    )
    field: str | None = setting(
        None,
        "Column of JSONL, CSV, Parquet and Hub data sets; null reads `text`, or `messages` or `conversations` of them.",
    )
    encoding: str | None = setting(None, "Encoding of plain text, JSONL and CSV files; null is UTF-8.")
    document: DocumentUnit | None = setting(
        None, "What of a plain text file is one document; null cuts about 1 MiB of whole paragraphs."
    )
    prompt: str | None = setting(
        None, "Column of a text that a causal model reads before `field` and does not predict."
    )
    template: str | None = setting(
        None,
        "The chat template of conversations, in Jinja or as FILE.jinja; null: the tokenizer's own.",
    )
    hub: LocalPath | None = setting(None, "Name of a data set on the Hugging Face Hub.")
    subset: str | None = setting(None, "Configuration of the data set on the Hub.")
    split: str = setting(
        "train", "Split of a Hub data set, of the usual folder under $DISTILL_DATA, and of a folder of several."
    )
    streaming: bool = setting(False, "Read a Hub data set without downloading it whole.")
    fraction: float = setting(1.0, "Use this seeded fraction of the documents.", gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, values: Any) -> Any:
        """What is null was not given: the source, which may be of a class of the user's, has a default of its own."""
        names = {*SourceConfig.model_fields, "sources"} - {"kind"}
        if not isinstance(values, dict):
            return values
        return {name: one for name, one in values.items() if one is not None or name not in names}

    @model_validator(mode="after")
    def _is_a_source(self) -> Self:
        choices = [*kinds(SOURCES), *kinds(TABLES)]
        if self.target is None and self.kind not in (*choices, HELDOUT, MIXTURE):
            problem = f"not known{did_you_mean(self.kind, choices)}" if self.kind else "missing"
            cure = f"choose one of {', '.join(choices)}, or name a class of your own as {self.group}.{TARGET}"
            raise SettingError(problem, setting=".kind", value=self.kind or None, cure=cure)
        if self.made_by is None:
            self.refuse_arguments()
        return self

    @property
    def made_by(self) -> Component | None:
        """What makes the source, where that is a callable of the user's or a table; None for a kind of text."""
        given = {
            name: getattr(value, "value", value)
            for name in SourceConfig.model_fields
            if name not in ("target", "group", "kind") and name in self.model_fields_set
            if (value := getattr(self, name)) is not None
        }
        if self.target is not None:
            return self.component("", given, tuple(given))
        if self.kind not in kinds(TABLES):
            return None
        given |= {name: value for name, value in self.arguments.items() if value is not None}
        return Component(self.group, built_in(TABLES, self.kind), given)


def are_sources(values: Any) -> Any:
    """Refuse a text in place of a source's settings, with what these are."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if not isinstance(value, dict | SourceConfig):
            cure = "write {kind: text, path: FILE}"
            raise SettingError("no source of text", setting=f".{name}", value=shown(value), cure=cure)
    return values


class MixedSourceConfig(SourceConfig):
    """One source of a mixture."""

    weight: float = setting(..., "Its part of the sequences; weights are divided by their sum.", gt=0, le=1e12)

    @model_validator(mode="after")
    def _can_be_mixed(self) -> Self:
        if not self.group.rpartition(".")[2].isidentifier():
            raise SettingError("no name of a source", setting=".", cure="take letters, digits and underscores")
        if self.target is None and self.kind in (*kinds(TABLES), MIXTURE, HELDOUT):
            cure = "name where its text comes from"
            raise SettingError("no text that can be mixed", setting=".kind", value=self.kind, cure=cure)
        return self


class CorpusConfig(SourceConfig):
    """What the text is that the student is trained on, and how it is cut into sequences of token ids."""

    group: SkipJsonSchema[str] = group_named("corpus")
    kind: str = setting("gutenberg", "The format of the text or the examples, or a published corpus.")
    sources: Annotated[
        dict[str, MixedSourceConfig], BeforeValidator(in_group("corpus.sources")), BeforeValidator(are_sources)
    ] = setting(None, "Sources of a mixture by name.", factory=dict)
    sequence_length: int = setting(128, "Length of a sequence.", unit="tokens", ge=10, le=131_072)
    cross_documents: bool = setting(False, "Let sequences run over the end of a document.")
    heldout: float = setting(0.02, "Keep this fraction of the documents for the evaluation set `heldout`.", ge=0, lt=1)
    invalid_files: Missing = setting(Missing.skip, "Skip a file that cannot be read with a count, or stop.")
    max_invalid: float = setting(
        0.05, "Stop when more than this fraction of the records (lines of plain text) is invalid.", ge=0, le=1
    )
    vocab_size: int = setting(
        6144, "Size of a tokenizer that is trained because there is none to take over.", unit="tokens", ge=300,
        le=4_000_000,
    )  # fmt: skip
    duplicates: Duplicates = setting(
        Duplicates.count, "Keep, count or drop documents of the same text, or drop near duplicates too."
    )
    near: NearConfig = setting(None, "When two documents are near duplicates.", factory=NearConfig)
    fallback: bool = setting(False, "Train on the bundled books when there is no path, no $DISTILL_DATA and no `hub`.")
    max_sequences: int | None = setting(
        None, "Train on at most this many sequences or labelled examples, a seeded choice; null is all.",
        unit="sequences",
        ge=0, le=10**12,
    )  # fmt: skip
    max_unknown: float = setting(
        0.2, "Stop when more than this fraction of the text is unknown to the vocabulary.", ge=0, le=1
    )
    unlabelled: LocalPath | None = setting(
        None, "File, folder or glob of examples that the teacher labels while the student is fine-tuned; all count."
    )

    @model_validator(mode="after")
    def _has_something_to_learn_from(self) -> Self:
        if self.max_sequences == 0 and self.unlabelled is None:
            raise SettingError(
                "too small", setting="corpus.max_sequences", value="0", cure="give 1 or more, or null for all"
            )
        return self

    @model_validator(mode="after")
    def _has_the_settings_of_its_kind(self) -> Self:
        if self.kind != MIXTURE or self.target is not None:
            if self.sources:
                raise SettingError(
                    f"is for a mixture, but corpus.kind={self.kind}",
                    setting="corpus.sources",
                    cure="set corpus=mixture, or corpus.sources=null",
                )
            return self
        for name in SourceConfig.model_fields:
            if name not in ("kind", "group", "target") and name in self.model_fields_set:
                value, default = getattr(self, name), SourceConfig.model_fields[name].default
                if value != default:
                    raise SettingError(
                        "each source of a mixture has its own",
                        setting=f"corpus.{name}",
                        value=getattr(value, "value", value),
                        cure=f"set corpus.sources.NAME.{name}",
                    )
        return self

    @property
    def source(self) -> SourceConfig:
        """The settings of its source alone."""
        names = [name for name in SourceConfig.model_fields if name in self.model_fields_set]
        given = {SourceConfig.model_fields[name].alias or name: getattr(self, name) for name in names}
        return SourceConfig(**{GROUP: self.group} | given | self.arguments)

    @property
    def parts(self) -> "list[SourceConfig]":
        """The sources of a mixture, or the only source."""
        return [*self.sources.values()] or [self.source]

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each source of a mixture."""
        return {name: source.weight for name, source in self.sources.items()}


class DataConfig(Settings):
    """Where prepared sequences are kept, and how they are made and read."""

    cache: LocalPath = setting("~/.cache/distill", "Folder of prepared sequences on this machine.")
    tokens: LocalPath | None = setting(
        None, "Folder or URL of prepared sequences that several hosts fill and read; null uses `cache`."
    )
    # A shard is held on the disk of the host that makes it, and object stores take files of up to 5 TB.
    shard_bytes: int = setting(
        1 << 30, "About this much of sequences goes into one file, before compression.", unit="bytes", ge=1, le=1 << 40
    )
    compression: Literal["zstd"] | None = setting(None, "Compression of prepared sequences: zstd, or null for none.")
    local: LocalPath | None = setting(
        None, "Folder on storage of each node itself, into which token caches are copied once per node."
    )
    local_bytes: int = setting(
        16 << 30,
        "Keep at most this much in `local`, or of blocks of sequences from a URL.",
        unit="bytes",
        ge=1,
        le=1 << 50,
    )
    shuffle_bytes: int = setting(
        4 << 30, "Shuffle this much of uncompressed sequences together; a smaller corpus is shuffled as a whole.",
        unit="bytes", ge=1, le=1 << 40,
    )  # fmt: skip
    workers: int | None = setting(None, "Processes that prepare tokens; null is one per core.", ge=1, le=1024)

    @model_validator(mode="after")
    def _has_room_to_fetch_ahead(self) -> Self:
        if self.local_bytes < 2 * self.shuffle_bytes:
            raise SettingError(
                f"less than twice data.shuffle_bytes={self.shuffle_bytes}, with room to fetch the next sequences",
                setting="data.local_bytes",
                value=self.local_bytes,
                cure="raise it, or lower data.shuffle_bytes",
            )
        return self
