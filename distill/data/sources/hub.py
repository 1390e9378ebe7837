"""Any data set of the Hugging Face Hub, or a local folder that `datasets` reads."""

from typing import Self

from distill.config.settings import DataConfig, SourceConfig
from distill.data import readers
from distill.data.sources._files import FileSource
from distill.runtime.errors import SettingError


class Hub(FileSource):
    word = "Hub"
    suffixes = ()
    takes = ("prompt",)

    @classmethod
    def find(cls, settings: SourceConfig, setting: str, data: DataConfig) -> Self | None:
        if settings.path is not None and not readers.is_saved(settings.path):
            raise SettingError(
                f"{setting}.path={settings.path}: kind=hub takes no path but a folder that `save_to_disk` wrote; set "
                f"{setting}.kind"
            )
        if settings.path is not None:
            return super().find(settings, setting, data)
        if not settings.hub:
            raise SettingError(f"{setting}.hub=null: {setting}.kind=hub needs the name of a data set on the Hub")
        return cls(settings, setting)
