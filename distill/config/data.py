"""The settings of prepared sequences: where they are kept, and how they are made and read."""

from typing import Literal, Self

from pydantic import model_validator

from distill.config.model import LocalPath, Settings, setting
from distill.runtime.errors import SettingError


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
