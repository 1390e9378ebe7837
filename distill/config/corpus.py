"""The settings of a corpus: where its text comes from, and how it becomes sequences of token ids."""

from enum import Enum
from typing import Any, Self

from pydantic import model_validator

from distill.config.component import Component
from distill.config.model import LocalPath, Settings, setting
from distill.runtime.errors import SettingError


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


class SourceConfig(Settings):
    """Where documents come from. `kind` names a file of `distill/data/sources/`."""

    kind: str = setting("???", "The format of the text, or a published corpus.")
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
        "How conversations are written: {role} and {content}, Jinja, or FILE.jinja; null: the tokenizer's way.",
    )
    target_role: str | None = setting(
        None, "The role whose messages a causal model learns to write; null is assistant."
    )
    hub: LocalPath | None = setting(None, "Name of a data set on the Hugging Face Hub.")
    subset: str | None = setting(None, "Configuration of the data set on the Hub.")
    split: str = setting(
        "train", "Split of a Hub data set, of the usual folder under $DISTILL_DATA, and of a folder of several."
    )
    streaming: bool = setting(False, "Read a Hub data set without downloading it whole.")
    fraction: float = setting(1.0, "Use this seeded fraction of the documents.", gt=0, le=1)


class CorpusConfig(Settings):
    """What the text is that the student is trained on, and how it is cut into sequences of token ids."""

    # The command line writes the settings of the source beside the others: `corpus.path` is that of `source`.
    source: SourceConfig | Component = setting(None, "Where the text comes from.", factory=SourceConfig)
    # Of a mixture, in place of `source`: SourceConfig or Component by name, and the fraction that each has.
    sources: dict[str, Any] = setting(None, "Sources of a mixture by name.", factory=dict)
    weights: dict[str, float] = setting(None, "Weight of each source of a mixture.", factory=dict)
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
