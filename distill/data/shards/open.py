"""The sequences of one part of a text, wherever its shards lie: from their files or through a cache."""

from pathlib import Path

from distill.config.settings import DataConfig
from distill.data.remote import is_url
from distill.data.sequence_store import SequenceStore
from distill.data.shards.block_cache import BlockCache
from distill.data.shards.block_store import BlockStore
from distill.data.shards.fetch import Blocks, read_whole
from distill.data.shards.index import ShardIndex
from distill.data.shards.plain import PlainShards
from distill.runtime.errors import Damaged


def index_name(place: str, part: str) -> str:
    """The file of the index of a part, `train` or `heldout`."""
    return f"{place.rstrip('/')}/{part}.index"


def read_index(place: str, part: str, digest: str | None = None) -> ShardIndex:
    """The index of a part of the shards at a folder or URL.

    Args:
        digest: SHA-256 of its file, where that is on record.

    Raises:
        Damaged: there is none, or it is not as it was written.
        StorageFailed: storage keeps failing.
    """
    name = index_name(place, part)
    content = read_whole(name, digest)
    try:
        return ShardIndex.from_bytes(content)
    except ValueError as error:
        raise Damaged(name, str(error)) from error


def open_sequences(place: str, part: str, data: DataConfig, digest: str | None = None) -> SequenceStore:
    """The sequences of a part of the shards at a folder or URL.

    Takes `digest` and raises as `read_index` does, and SettingError where the folder of the node's cache cannot be
    written.
    """
    place = place if is_url(place) else str(Path(place).expanduser())
    index = read_index(place, part, digest)
    if not is_url(place) and index.layout.compression is None and not _far(Path(place), data):
        return PlainShards(Path(place), index)
    setting = "data.cache" if data.local is None else "data.local"
    block_cache = BlockCache(data.local or data.cache, data.local_bytes, setting)
    return BlockStore(index, Blocks(place, index.layout), block_cache)


def _far(folder: Path, data: DataConfig) -> bool:
    """Whether a folder is not on the disk of the node, though there is one: `local_copy` has found it too large."""
    return data.local is not None and not folder.is_relative_to(Path(data.local).expanduser())
