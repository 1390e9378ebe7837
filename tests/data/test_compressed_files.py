"""Files are unpacked by their first bytes, whatever their names are; archives are refused with the reason."""

import bz2
import gzip
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

from distill.config.settings import DataConfig, SourceConfig
from distill.data.sources import Document, InvalidFile, InvalidRecord, LeftOut, _files, find_source, read
from distill.data.tables.table import Table

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


def texts(path: Path, kind: str, errors: list[str] | None = None) -> list[str]:
    document = "line" if kind == "text" else None
    source = find_source(SourceConfig(kind=kind, path=str(path), document=document), "corpus", DataConfig())
    assert source is not None

    def stop(error: InvalidFile | InvalidRecord | LeftOut) -> None:
        assert errors is not None, error
        errors.append(str(error))

    documents: list[Document] = [each for shard in source.shards() for each in read(source, shard, stop)]
    return [document.text for document in documents]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize(("kind", "content"), [("jsonl", LINES), ("text", PLAIN), ("csv", CSV)])
def test_a_compressed_file_is_unpacked(
    kind: str, content: bytes, named: bool, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several members too, alone and in a folder, and never entered in its middle."""
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(_files, "RANGE_BYTES", 1000)
    pack, half = PACK[suffix], content.index(b"\n", len(content) // 2) + 5
    path = tmp_path / f"a.{'txt' if kind == 'text' else kind}{suffix if named else ''}"
    for packed in (pack(content), pack(content[:half]) + pack(content[half:])):
        path.write_bytes(packed)
        assert texts(path, kind) == texts(tmp_path, kind) == TEXTS
    path.write_bytes(packed[: len(packed) // 2 - 40])
    errors: list[str] = []
    assert texts(path, kind, errors)[:500] != TEXTS and len(errors) == 1
    assert path.name in errors[0] and "UTF-8" not in errors[0] and "ncoding" not in errors[0], errors


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_tables_are_unpacked(suffix: str, tmp_path: Path) -> None:
    rows = b"text,label\n" + b"".join(b"%s,%d\n" % (text.encode(), number % 2) for number, text in enumerate(TEXTS))
    (tmp_path / f"train.csv{suffix}").write_bytes(PACK[suffix](rows))
    assert Table(path=str(tmp_path)).read("corpus", True).first == TEXTS
    assert Table(path=str(tmp_path / f"train.csv{suffix}")).read("corpus", True).classes == ("0", "1")


def test_archives_and_wide_characters_are_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.txt", "w") as archive:
        archive.writestr("b.txt", "text")
    (tmp_path / "b.txt").write_bytes("text".encode("utf-16"))
    (tmp_path / "c.txt").write_bytes(b"the cat")
    errors: list[str] = []
    assert texts(tmp_path, "text", errors) == ["the cat"]
    assert "ZIP" in errors[0] and "unpack" in errors[0] and "UTF-16" in errors[1]


def test_the_end_of_a_name_alone_makes_a_file_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.tsv_export.csv").write_text("text,label\nthe cat,1\n")
    assert texts(tmp_path / "a.tsv_export.csv", "csv") == ["the cat"]
