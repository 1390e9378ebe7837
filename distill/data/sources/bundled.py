"""The public-domain books that ship with this package: some to train on, and others that its teachers have not read."""

from typing import Self

from distill.config import HERE
from distill.config.settings import DataConfig, SourceConfig
from distill.data.sources.gutenberg import Gutenberg
from distill.runtime.errors import SettingError

BOOKS = HERE / "data" / "books"  # a folder for each split; README.md there lists the books


class Bundled(Gutenberg):
    word = "bundled"

    @classmethod
    def find(cls, settings: SourceConfig, setting: str, data: DataConfig) -> Self:
        """The books of a split. Raises SettingError for a place to look for them, or a split that there is not."""
        for name in ("path", "hub"):
            if (value := getattr(settings, name)) is not None:
                raise SettingError(
                    f"{setting}.{name}={value} is not read with {setting}.kind={settings.kind}: choose "
                    f"{setting}.kind=gutenberg, or leave it out"
                )
        if not (BOOKS / settings.split).is_dir():
            raise SettingError(f"{setting}.split={settings.split}: the bundled books are those of train and heldout")
        return cls(settings.changed(path=str(BOOKS / settings.split)), setting)

    def describe(self) -> str:
        """For example `3 bundled books (austen_emma, ...)`."""
        names = ", ".join(file.name.partition(".")[0] for file in self.files)
        return f"{len(self.files)} bundled book{'s' * (len(self.files) > 1)} ({names})"
