"""Sources of text: one file for each kind, found by its name, and the base class of a user's own."""

import copy
import importlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from distill.config.component import Component, class_name
from distill.config.settings import DataConfig, SourceConfig
from distill.data.document import Document as Document
from distill.data.document import Part as Part
from distill.data.heldout import fraction
from distill.data.readers import InvalidFile as InvalidFile
from distill.data.readers import has_utf8
from distill.data.remote import is_url
from distill.runtime.errors import SettingError
from distill.runtime.users_code import naming_mistakes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Settings that only some kinds read: those in their `takes`.
OPTIONAL = ("prompt", "template", "document", "encoding")


class Shard(NamedTuple):
    """A unit of work: whole files, or the range [start, stop) of one file or Hub data set.

    Attributes:
        paths: the files.
        start, stop: the range, in bytes of a plain file, row groups of a Parquet file or rows of a Hub data set.
        size: stored bytes (rows of a Hub data set), for progress.
    """

    paths: tuple[str, ...]
    start: int = 0
    stop: int | None = None
    size: int = 0


class LeftOut(NamedTuple):
    """A record, or a part of one, that can be read and is of no use; it is counted by the reason."""

    name: str
    reason: str


class Source(ABC):
    """Where documents come from. It is sent to the processes that prepare tokens, so it must pickle.

    Attributes:
        fraction: seeded fraction of the documents that is used.
        prompts: whether its documents may have tokens that are no targets (`Document.of_parts`).
        made_from: import path, settings and code of a user's own source; built-in ones have all in `identity`.
        token_ids: whether its documents are token ids, of which no tokenizer can be trained.
    """

    fraction: float = 1.0
    prompts: bool = False
    made_from: Any = None
    token_ids: bool = False

    def made_by(self, settings: Component) -> Self:
        """A user's own source with what the settings say of it that its constructor need not know."""
        made = copy.copy(self)
        code = [] if settings.code is None else [settings.code]
        # A frozen dataclass of the user's refuses `made.made_from = ...`.
        object.__setattr__(made, "made_from", (settings.path, sorted(settings.arguments.items()), *code))
        if (value := settings.arguments.get("fraction")) is not None:
            object.__setattr__(made, "fraction", value)
        return made

    def for_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> Self:
        """The source of documents for this tokenizer, where they depend on it as conversations do."""
        return self

    @abstractmethod
    def shards(self) -> list[Shard]:
        """The units of work that the source falls into, in the order of its documents."""

    @abstractmethod
    def documents(self, shard: Shard) -> Iterator[Document | LeftOut]:
        """The documents of a shard, in order and in bounded memory.

        In place of one of no use, such as a conversation without an answer, why that is so.

        Raises:
            InvalidFile: the file cannot be read.
        """

    def describe(self) -> str:
        """A few words for the banner."""
        return type(self).__name__

    @property
    def text_files(self) -> list[str]:
        """The files whose contents decide the text; tokens in the cache are identified by their digests and names."""
        paths = dict.fromkeys(path for shard in shards_of(self) for path in shard.paths)
        return [path for path in paths if is_url(path) or Path(path).expanduser().is_file()]

    @property
    def identity(self) -> Any:
        """What else changes when the text changes. Any value with a `repr`, without the place where the files lie."""
        return type(self).__qualname__


def shards_of(source: Source) -> list[Shard]:
    """`Source.shards`. Raises SettingError where a class of the user's fails."""
    with naming_mistakes(f"{type(source).__name__}, a source of yours,", source):
        return source.shards()


def read(source: Source, shard: Shard, left_out: Counter[str] | None = None) -> Iterator[Document]:
    """The documents of a shard, of them the seeded fraction `source.fraction`.

    Args:
        left_out: counts what is of no use, by the reason.

    Raises:
        SettingError: a file or a record cannot be read.
    """
    with naming_mistakes(f"{type(source).__name__}, a source of yours,", source):
        try:
            for document in source.documents(shard):
                if isinstance(document, LeftOut):
                    if left_out is not None:
                        left_out[document.reason] += 1
                elif source.fraction >= 1 or fraction(document.key, "share") < source.fraction:
                    if not has_utf8(document.text):
                        raise InvalidFile(document.name, "half a surrogate pair in it")
                    yield document
        except InvalidFile as error:
            setting = getattr(source, "setting", None)  # a source of the user's has none
            is_encoded = isinstance(error.__cause__, UnicodeDecodeError) and "encoding" in getattr(source, "takes", ())
            cure = f"mend or remove it{f', or set {setting}.encoding' * is_encoded}"
            raise SettingError(error, setting="" if setting is None else f"{setting}.path", cure=cure) from error


def find_source(settings: SourceConfig, setting: str, data: DataConfig) -> Source | None:
    """The source that settings name, its files found; None where it is not available.

    Args:
        setting: what error lines call the settings, such as `corpus` or `evaluate.sources.imdb`.

    Raises:
        SettingError: a path does not exist, or holds no file of the kind.
    """
    if (make := settings.made_by) is not None:
        source = make()
        if not isinstance(source, Source) and settings.target is None:
            problem, cure = "holds labelled examples, and this objective learns from text", "choose another kind"
            raise SettingError(problem, setting=f"{setting}.kind", value=settings.kind, cure=cure)
        if not isinstance(source, Source):
            raise SettingError(f"{setting}._target_={make.path} gives no distill.data.sources.Source: inherit from it")
        return source.made_by(make)
    module = importlib.import_module(f"{__name__}.{settings.kind}")
    kind = getattr(module, class_name(settings.kind))
    for name in OPTIONAL:
        if (value := getattr(settings, name)) is not None and name not in getattr(kind, "takes", ()):
            raise SettingError(
                f"{setting}.{name}={getattr(value, 'value', value)!r}: {setting}.kind={settings.kind} has no such "
                "setting; leave it out"
            )
    source = kind.find(settings, setting, data)
    assert source is None or isinstance(source, Source)
    return source
