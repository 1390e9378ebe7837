"""Files are unpacked as their names tell."""

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from fsspec.compression import register_compression

from distill.config.settings import DataConfig, SourceConfig
from distill.data.sources import _files, find_source, read
from distill.data.tables.table import Table
from distill.runtime.errors import SettingError

TEXTS = [f"the red house {number} was old" for number in range(500)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
PLAIN = "".join(f"{text}\n" for text in TEXTS).encode()
CSV = b"text\n" + PLAIN
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: bytes(pyarrow.compress(content, "zstd", asbytes=True)),
}
PACK[".zstd"] = PACK[".zst"]


def texts(path: Path, kind: str) -> list[str]:
    document = "line" if kind == "text" else None
    source = find_source(SourceConfig(kind=kind, path=str(path), document=document), "corpus", DataConfig())
    assert source is not None
    return [each.text for shard in source.shards() for each in read(source, shard)]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize(("kind", "content"), [("jsonl", LINES), ("text", PLAIN), ("csv", CSV)])
def test_a_compressed_file_is_unpacked(
    kind: str, content: bytes, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several members too, alone and in a folder, never entered in its middle; by Arrow, not by other packages."""
    for name, ending in (("zstd", "zst"), ("lz4", "lz4")):
        register_compression(name, None, ending, force=True)
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(_files, "RANGE_BYTES", 1000)
    pack, half = PACK[suffix], content.index(b"\n", len(content) // 2) + 5
    path = tmp_path / f"a.{'txt' if kind == 'text' else kind}{suffix}"
    for packed in (pack(content), pack(content[:half]) + pack(content[half:])):
        path.write_bytes(packed)
        assert texts(path, kind) == texts(tmp_path, kind) == TEXTS
    path.write_bytes(packed[: len(packed) // 2 - 40])
    with pytest.raises(SettingError, match=re.escape(path.name)) as caught:
        texts(path, kind)
    assert "UTF-8" not in str(caught.value), caught.value


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_compressed_file_of_another_name_is_named_so(kind: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{'txt' if kind == 'text' else kind}"
    path.write_bytes(PACK[suffix](LINES))
    with pytest.raises(SettingError, match=rf"compressed, so its name has to end in \{suffix[:4]}"):
        texts(path, kind)


@pytest.mark.parametrize("suffix", PACK)
def test_tables_are_unpacked(suffix: str, tmp_path: Path) -> None:
    rows = b"text,label\n" + b"".join(b"%s,%d\n" % (text.encode(), number % 2) for number, text in enumerate(TEXTS))
    (tmp_path / f"train.csv{suffix}").write_bytes(PACK[suffix](rows))
    assert Table(path=str(tmp_path)).read("corpus", True).first == TEXTS
    assert Table(path=str(tmp_path / f"train.csv{suffix}")).read("corpus", True).classes == ("0", "1")
