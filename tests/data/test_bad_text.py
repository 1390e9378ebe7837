"""What cannot be read ends the run with the file and the line, and memory stays bounded."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from text import some_text
from tiny import parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.settings import DataConfig, SourceConfig
from distill.data import readers
from distill.data.new_tokenizer import byte_bpe
from distill.data.readers import blocks
from distill.data.sources import _files, find_source, read
from distill.data.tokens import corpus_text, prepare
from distill.runtime.errors import SettingError, StorageFailed

CHINESE = "我们的生活在这个城市里已经很多年了。他说。今天的天气很好。可以出去走一走。"


def read_all(**settings: Any) -> list[str]:
    source = find_source(SourceConfig(**settings), "corpus", DataConfig())
    assert source is not None
    return [document.text for shard in source.shards() for document in read(source, shard)]


BAD = [
    ("jsonl", b'{"text": "\xff"}', r"a\.jsonl, line 11: not UTF-8 \(invalid start byte\).*corpus\.encoding"),
    ("jsonl", b'{"text": ', r"a\.jsonl, line 11: not JSON \(Expecting value"),
    ("jsonl", b"[" * 100_000, r"a\.jsonl, line 11: not JSON"),
    ("jsonl", b'{"text": "\\ud800"}', r"a\.jsonl, line 11: half a surrogate pair"),
    ("jsonl", b'{"text": 5}', r"^corpus\.field=text: a\.jsonl, line 11: it holds int, not text"),
    ("jsonl", b'{"texts": "x"}', r"line 11: no such field \(did you mean texts\?\); it has texts"),
    ("jsonl", b"[1]", r"a\.jsonl, line 11: no JSON object"),
    ("csv", b'"str"ay', r"a\.csv, line 12: ',' expected after '\"'"),
    ("csv", b'"stray', r"a\.csv, line 22: unexpected end of data"),
    ("csv", b"5,a", r"a\.csv, line 12: 2 fields, not the 1 of its header"),
    ("txt", b"One\xff.", r"a\.txt, line 11: not UTF-8"),
]


@pytest.mark.parametrize(("kind", "bad", "line"), BAD)
@pytest.mark.parametrize("size", [1 << 30, 64])
def test_a_bad_line_ends_the_run_with_file_and_line(
    kind: str, bad: bytes, line: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a range of the file."""
    monkeypatch.setattr(_files, "SHARD_BYTES", size)
    monkeypatch.setattr(_files, "RANGE_BYTES", size)
    rows = [json.dumps({"text": f"row {n}"}).encode() if kind == "jsonl" else b"row %d" % n for n in range(20)]
    rows[10:10] = [bad]
    (tmp_path / f"a.{kind}").write_bytes(b"\n".join([b"text"] * (kind == "csv") + rows))
    with pytest.raises(SettingError, match=line) as caught:
        read_all(kind="text" if kind == "txt" else kind, path=str(tmp_path))
    assert caught.value.setting in ("corpus.path", "corpus.field") and "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"half \xed\xa0\x80"])
def test_parquet_and_hub_rows_that_are_not_utf8(tmp_path: Path, bad: bytes) -> None:
    import datasets

    values = [f"row {number}".encode() for number in range(600)]
    values[300] = bad
    text = pa.Array.from_buffers(pa.string(), 600, pa.array(values).buffers())
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet", row_group_size=100)
    with pytest.raises(SettingError, match=r"^corpus\.path: a\.parquet: UnicodeDecodeError"):
        read_all(kind="parquet", path=f"{tmp_path}/a.parquet")
    datasets.Dataset(pa.table({"text": text})).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(SettingError, match=r"saved, behind row [\d,]+: UnicodeDecodeError"):
        read_all(kind="hub", path=f"{tmp_path}/saved")


@pytest.mark.parametrize(
    ("kind", "name", "content", "line"),
    [
        ("jsonl", "a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-12], r"a\.jsonl\.gz: EOFError"),
        ("text", "a.txt.gz", b"no gzip", r"a\.txt\.gz: BadGzipFile"),
        ("text", "a.txt", "text".encode("utf-16"), r"a\.txt, line 1: not UTF-8"),
        ("parquet", "a.parquet", b"PAR1 no PAR1", r"a\.parquet: Arrow"),
        ("csv", "a.csv", b"id,text,text\n1,a,b\n", r"corpus\.field=text: a\.csv has 2 columns of this name"),
    ],
)
def test_a_damaged_file_ends_the_run(kind: str, name: str, content: bytes, line: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingError, match=line):
        read_all(kind=kind, path=str(tmp_path))


def test_a_network_that_fails_under_streamed_rows_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "One."}
        raise ConnectionResetError("cut\nin two")

    found = SimpleNamespace(num_shards=1, shard=lambda total, number: rows())
    monkeypatch.setattr(readers, "load_hub", lambda *_: found)
    source = find_source(SourceConfig(kind="hub", hub="a/b", streaming=True), "corpus", DataConfig())
    assert source is not None
    (shard,) = source.shards()
    documents = read(source, shard)
    assert next(documents).text == "One."
    line = r"^corpus\.hub=a/b could not be read further \(ConnectionResetError: cut\)"
    with pytest.raises(StorageFailed, match=line):
        next(documents)


def test_a_preparation_that_stops_publishes_nothing(tmp_path: Path, words: PreTrainedTokenizerFast) -> None:
    rows = [json.dumps({"text": some_text(number, 50)}) for number in range(100)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*rows, "{"]))
    config = text_config(
        kind="jsonl", path=str(path), cache=str(tmp_path / "cache"), workers=1, heldout=0.0, sequence_length=32
    )
    for make in (lambda: prepare(corpus_text(*parts(config)), words, *parts(config), "train"),) * 2 + (
        lambda: byte_bpe(*parts(config)),
    ):
        with pytest.raises(SettingError, match=r"^corpus\.path: a\.jsonl, line 101: not JSON"):
            make()
    assert not list((tmp_path / "cache").rglob("index.json"))


# --- CSV


def test_csv_is_read_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text,note\n1,"One, ""two""\nand three",x\n\n2,Four,y\n')
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b'text\tid\nAn "inch\t1\n'))
    (tmp_path / "c.tsv_export.csv").write_text("text,0123\nthe cat,1\n")
    texts = read_all(kind="csv", path=str(tmp_path))
    assert texts == ['One, "two"\nand three', "Four", 'An "inch', "the cat"]
    assert read_all(kind="text", path=f"{tmp_path}/a.csv") == texts[:2]  # not its quotes and ids
    assert read_all(kind="csv", path=f"{tmp_path}/c.tsv_export.csv", field="0123") == ["1"]
    with pytest.raises(SettingError, match=r"corpus\.field=body: a\.csv: no such field; it has id, text, note"):
        read_all(kind="csv", path=f"{tmp_path}/a.csv", field="body")


def test_a_field_of_many_lines_may_be_long(tmp_path: Path) -> None:
    novel = "A line of the novel, and another half.\n" * 40_000
    (tmp_path / "a.csv").write_text(f'title,text\nOne,"{novel}"\nTwo,Short.\n')
    assert [text.strip() for text in read_all(kind="csv", path=str(tmp_path))] == [novel.strip(), "Short."]


# --- encodings


def test_gbk_is_refused_and_read_where_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes((CHINESE + "\n").encode("gbk") * 100)
    with pytest.raises(SettingError, match=r"a\.txt, line 1: not UTF-8.*corpus\.encoding"):
        read_all(kind="text", path=str(path))
    assert read_all(kind="text", path=str(path), encoding="gbk") == ["\n".join([CHINESE] * 100)]
    for encoding, match in (("klingon", "no encoding"), ("utf-16", "iconv"), ("base64", "no encoding")):
        with pytest.raises(SettingError, match=rf"corpus\.encoding={encoding}: .*{match}"):
            read_all(kind="text", path=str(path), encoding=encoding)
    (tmp_path / "a.csv").write_bytes("texte,catégorie\nBonjour à tous,3\n".encode("cp1252"))
    with pytest.raises(SettingError, match=r"a\.csv, line 1: not UTF-8"):
        read_all(kind="csv", path=f"{tmp_path}/a.csv", field="texte")
    assert read_all(kind="csv", path=f"{tmp_path}/a.csv", field="texte", encoding="cp1252") == ["Bonjour à tous"]


@pytest.mark.parametrize("encoding", [None, "utf-8-sig"])
def test_utf_8_with_a_mark(tmp_path: Path, encoding: str | None) -> None:
    (tmp_path / "a.txt").write_text("\ufeffÉté.\nDeux.", encoding="utf-8")
    assert read_all(kind="text", path=str(tmp_path), encoding=encoding) == ["Été.\nDeux."]


# --- data sets, and memory


def test_data_sets_saved_to_disk_are_read_as_they_are(tmp_path: Path) -> None:
    import datasets

    parts = {
        name: datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(3)]}) for name in ("train", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "both"))
    parts["test"].save_to_disk(str(tmp_path / "one"))
    assert read_all(kind="hub", hub=f"{tmp_path}/both") == ["train 0", "train 1", "train 2"]
    for where in ({"kind": "text"}, {"kind": "jsonl", "split": "test"}):
        split = where.get("split", "train")
        assert read_all(path=f"{tmp_path}/both", **where) == [f"{split} {i}" for i in range(3)]
    assert read_all(kind="hub", path=f"{tmp_path}/one") == ["test 0", "test 1", "test 2"]
    with pytest.raises(SettingError, match="it has train, test"):
        read_all(kind="hub", hub=f"{tmp_path}/both", split="dev")


def test_text_without_a_blank_is_cut() -> None:
    found = list(blocks("x" * 10_000, 100))
    assert "".join(found) == "x" * 10_000 and max(map(len, found)) == 400


MEASURE = """
import resource, sys
from distill.config.settings import DataConfig, SourceConfig
from distill.data.sources import find_source, read
import numpy, pyarrow.parquet
from pathlib import Path
from distill.data.new_tokenizer import train_byte_bpe, write_tokenizer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
settings = SourceConfig(kind=sys.argv[1], path=sys.argv[2])
source = find_source(settings, "corpus", DataConfig())
texts = (document.text for shard in source.shards() for document in read(source, shard))
if sys.argv[3] == "train":
    write_tokenizer(train_byte_bpe, texts, 400, Path(sys.argv[2] + ".json"))
else:
    print(sum(map(len, texts)), file=sys.stderr)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize(
    ("kind", "name", "unit", "what"),
    [
        ("text", "a.txt.gz", b"a b\n" + 60 * b"c d ", "read"),
        pytest.param("text", "a.txt", b"word \n", "train", marks=pytest.mark.slow),
        ("jsonl", "a.jsonl.gz", b'{"text": "' + 250 * b"word " + b'"}\n', "read"),
    ],
)
def test_memory_is_bounded_by_the_chunk(tmp_path: Path, kind: str, name: str, unit: bytes, what: str) -> None:
    """256 MiB, from 1 MB of gzip where it is packed; 50 MB for the tokenizer."""
    path = tmp_path / name
    piece = unit * ((1 << 20) // len(unit))
    with gzip.open(path, "wb", 1) if name.endswith(".gz") else path.open("wb") as file:
        for _ in range(50 if what == "train" else 256):
            file.write(piece)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, kind, str(path), what], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 500


@pytest.mark.parametrize("short", [0, 1000])
def test_one_text_that_stands_in_every_row_is_not_held_as_often(tmp_path: Path, short: int) -> None:
    """A Parquet file of some kB whose 3 MB text is said once, and by number in 200 rows."""
    texts = pa.array(["a b " * (3 << 18), "short"])
    column = pa.DictionaryArray.from_arrays(pa.array([1] * short + [0] * 200, pa.int32()), texts)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path, dictionary_pagesize_limit=1 << 30, store_schema=False)
    assert path.stat().st_size < 1 << 20
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "parquet", str(path), "read"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) == 200 * (3 << 20) + 5 * short
    assert int(done.stdout.split()[-1]) < 500
