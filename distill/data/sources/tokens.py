"""Sequences that `distill prepare` has made, in place of the text that they were made from."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from distill.config.settings import DataConfig, SourceConfig
from distill.data.remote import reachable
from distill.data.shards import INDEX, Index, read_index
from distill.data.sources import Document, Shard, Source
from distill.data.storage import Folder
from distill.runtime.errors import SettingError

THREADS = 16  # that look into folders


@dataclass(frozen=True)
class Tokens(Source):
    """The prepared sequences at a folder or URL: those of one text, or of several, each in a folder of its own."""

    path: str
    setting: str  # what error lines call the settings

    token_ids = True

    @classmethod
    def find(cls, settings: SourceConfig, setting: str, data: DataConfig) -> Self:
        """Raises SettingError where no path is given, or anything that decides how a text is read."""
        for name in ("hub", "subset", "field"):
            if (value := getattr(settings, name)) is not None:
                raise SettingError(
                    "prepared sequences have no such setting", setting=f"{setting}.{name}", value=value,
                    cure="leave it out",
                )  # fmt: skip
        if settings.fraction < 1:
            raise SettingError(
                "prepared sequences are read as they are", setting=f"{setting}.fraction", value=settings.fraction,
                cure="leave it out, or give corpus.max_sequences",
            )  # fmt: skip
        if settings.path is None:
            raise SettingError(
                "prepared sequences are in no usual place", setting=f"{setting}.path", value="null",
                cure="give the folder or URL that `distill prepare` has filled (data.tokens)",
            )  # fmt: skip
        return cls(settings.path.rstrip("/"), setting)

    def shards(self) -> list[Shard]:
        return []

    def documents(self, shard: Shard) -> Iterator[Document]:
        raise NotImplementedError("the text of prepared sequences is not there")

    def describe(self) -> str:
        return f"prepared sequences in {self.path}"

    @property
    def identity(self) -> Any:
        return [type(self).__name__, self.path]

    def made_with(self, wanted: dict[str, Any]) -> Folder:
        """The folder of the sequences that were made with these settings (`Packing.described`).

        Raises:
            SettingError: there are none, or those of several texts.
            Damaged: an index.json is not as it was written.
        """
        differing = {place: _differences(index, wanted) for place, index in self.indices.items()}
        places = [place for place, differences in differing.items() if not differences]
        if len(places) == 1:
            return Folder(places[0], f"{self.setting}.path")
        texts = "; ".join(f"{place} ({self.indices[place].made.text})" for place in places)
        if places:
            raise SettingError(
                f"sequences of several texts were made with these settings: {texts}", setting=f"{self.setting}.path",
                value=self.path, cure="give one of these folders",
            )  # fmt: skip
        nearest = min(differing, key=lambda place: len(differing[place]))
        raise self._misfit(nearest, differing[nearest], wanted)

    def _misfit(self, place: str, differing: dict[str, Any], wanted: dict[str, Any]) -> SettingError:
        """What a run has to change for the sequences that are the nearest to what it wants."""
        what = f"the sequences in {place} ({self.indices[place].made.text})"
        if "tokenizer" in differing or "vocabulary" in differing:
            return SettingError(
                f"{what} were made with another tokenizer", setting=f"{self.setting}.path", value=self.path,
                cure="take the teacher or tokenizer that they were prepared for, or prepare the text for this one",
            )  # fmt: skip
        if "format" in differing:
            return SettingError(
                f"{what} were made for another objective.task, with other tokens around documents",
                setting=f"{self.setting}.path", value=self.path, cure="take that task, or prepare the text for this",
            )  # fmt: skip
        if self.setting.startswith("evaluate") and {"corpus.heldout", "corpus.duplicates"} & differing.keys():
            return SettingError(
                f"{what} are those of a corpus", setting=f"{self.setting}.path", value=self.path,
                cure="give the folder of a text that was prepared as an evaluation set",
            )  # fmt: skip
        name = next(iter(differing))
        changes = " ".join(f"{each}={value}" for each, value in differing.items())
        return SettingError(
            f"{what} were made with other settings", setting=name, value=wanted[name], cure=f"give {changes}"
        )

    @cached_property
    def indices(self) -> dict[str, Index]:
        """By the folders of prepared sequences at `path`.

        Raises:
            SettingError: there are none, or it cannot be reached.
            Damaged: an index.json is not as it was written.
        """
        setting = f"{self.setting}.path"
        root = Folder(self.path, setting)
        with reachable(setting, self.path), ThreadPoolExecutor(THREADS) as pool:
            places = [self.path] if root.exists(INDEX) else [f"{self.path}/{name}" for name in sorted(root.names())]
            found = pool.map(lambda place: Folder(place, setting).exists(INDEX), places)
            places = [place for place, is_there in zip(places, found, strict=True) if is_there]
        if not places:
            raise SettingError(
                f"no prepared sequences are there (no {INDEX}, in it or in a folder of it)", setting=setting,
                value=self.path, cure="give the folder or URL that `distill prepare` has filled (data.tokens)",
            )  # fmt: skip
        return {place: read_index(Folder(place, setting)) for place in places}


def _differences(index: Index, wanted: dict[str, Any]) -> dict[str, Any]:
    """What sequences were made with, where that is not what is wanted."""
    made = index.made.settings
    return {name: made.get(name) for name, value in wanted.items() if made.get(name) != value}
