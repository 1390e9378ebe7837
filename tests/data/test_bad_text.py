"""Damaged text: what is bad is left out and counted, the rest is read, and memory stays bounded."""

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from text import some_text
from tiny import changed, parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config, DataConfig, DocumentUnit, Missing, SourceConfig
from distill.data import readers
from distill.data.byte_bpe import corpus_tokenizer
from distill.data.readers import blocks
from distill.data.sources import InvalidFile, InvalidRecord, _files, find_source, read
from distill.data.tokens import Tokens, corpus_text, prepare
from distill.runtime.errors import SettingError, StorageFailed

CHINESE = "我们的生活在这个城市里已经很多年了。他说。今天的天气很好。可以出去走一走。"


def read_all(**settings: object) -> tuple[list[str], list[str]]:
    """Texts, and what could not be read."""
    source = find_source(SourceConfig(**settings), "corpus", DataConfig())  # type: ignore[arg-type]
    assert source is not None
    errors: list[InvalidFile | InvalidRecord] = []
    texts = [document.text for shard in source.shards() for document in read(source, shard, errors.append)]
    return texts, [str(error) for error in errors]


def tokens_of(config: Config, tokenizer: PreTrainedTokenizerFast) -> Tokens:
    return prepare(corpus_text(*parts(config)), tokenizer, *parts(config), "train")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": ', "not JSON"),
        (b"[" * 100_000, "brackets"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b'{"text": "a\0b"}', "zero bytes"),
        (b'{"text": 5}', "holds int, not text"),
        (b'{"body": "x"}', "no such field"),
        (b"[1]", "no JSON object"),
        (b'{"text": "' + b"a" * (17 << 20) + b'"}', "more than 16 MiB"),
    ],
)
def test_one_bad_line_of_jsonl_leaves_all_others(tmp_path: Path, bad: bytes, reason: str) -> None:
    lines = [json.dumps({"text": f"row {number}"}).encode() for number in range(200)]
    lines[10] = bad
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    texts, errors = read_all(kind="jsonl", path=str(tmp_path))
    assert texts == [f"row {number}" for number in range(200) if number != 10]
    (error,) = errors
    assert reason in error and error.startswith("a.jsonl")


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"half \xed\xa0\x80"])
def test_parquet_and_hub_rows_that_are_not_utf8(tmp_path: Path, bad: bytes) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = [f"row {number}".encode() for number in range(600)]
    values[300] = bad
    text = pa.Array.from_buffers(pa.string(), 600, pa.array(values).buffers())
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet", row_group_size=100)
    good = [f"row {number}" for number in range(600) if number != 300]
    texts, errors = read_all(kind="parquet", path=f"{tmp_path}/a.parquet")
    assert texts == good and len(errors) == 1 and errors[0].startswith("a.parquet, row 301: not UTF-8")
    datasets.Dataset(pa.table({"text": text})).save_to_disk(str(tmp_path / "saved"))
    texts, errors = read_all(kind="hub", path=f"{tmp_path}/saved")
    assert texts == good and len(errors) == 1


def test_a_bad_record_of_a_range_is_named_from_where_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(_files, "RANGE_BYTES", 100)
    lines = [json.dumps({"text": f"row {number}"}) for number in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"body": 1}']))
    (error,) = read_all(kind="jsonl", path=str(tmp_path))[1]
    assert re.match(r"a\.jsonl, after byte \d+, record \d+: corpus\.field=text: a\.jsonl has no such field", error)


def test_a_network_that_fails_under_streamed_rows_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*_: object) -> Iterator[dict[str, str]]:
        yield {"text": "One."}
        raise ConnectionResetError("cut\nin two")

    monkeypatch.setattr(readers, "load_hub", rows)
    source = find_source(SourceConfig(kind="hub", hub="a/b", streaming=True), "corpus", DataConfig())
    assert source is not None
    (shard,) = source.shards()
    documents = read(source, shard)
    assert next(documents).text == "One."
    line = r"^corpus\.hub=a/b could not be read further \(ConnectionResetError: cut\)"
    with pytest.raises(StorageFailed, match=line):
        next(documents)


def test_a_bad_byte_costs_its_line_of_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"One.\nTw\xff.\nThree.\n\nFour.\n")
    for unit, expected in (
        (None, ["One.\nThree.\n\nFour."]),
        (DocumentUnit.file, ["One.\nThree.\n\nFour."]),
        (DocumentUnit.blank, ["One.\nThree.", "Four."]),
        (DocumentUnit.line, ["One.", "Three.", "Four."]),
    ):
        texts, errors = read_all(kind="text", path=str(tmp_path), document=unit)
        assert texts == expected and [error.partition(":")[0] for error in errors] == ["a.txt, line 2"]
    texts, errors = read_all(kind="wikitext", path=str(tmp_path))
    assert texts == ["One.\n\nThree.\n\nFour."] and len(errors) == 1


def test_a_long_line_with_one_bad_byte_loses_one_part(tmp_path: Path) -> None:
    """Parts of a long line are cut within characters; the decoder has to find its way again."""
    (tmp_path / "a.txt").write_bytes("é€".encode() * 100 + b"\xff" + "é€".encode() * 1_000_000)
    texts, errors = read_all(kind="text", path=str(tmp_path))
    assert len(errors) == 1
    assert 1_500_000 < sum(map(len, texts)) < 2_000_200 and {*"".join(texts)} == {"é", "€"}


# --- CSV


def test_csv_is_read_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text,note\n1,"One, ""two""\nand three",x\n2,Four,y\n')
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b'text\tid\nAn "inch\t1\n'))
    texts, errors = read_all(kind="csv", path=str(tmp_path))
    assert texts == ['One, "two"\nand three', "Four", 'An "inch'] and not errors
    assert read_all(kind="text", path=f"{tmp_path}/a.csv")[0] == texts[:2]  # not its quotes and ids
    with pytest.raises(SettingError, match=r"corpus\.field=body: a\.csv has no such field; it has id, text, note"):
        read_all(kind="csv", path=f"{tmp_path}/a.csv", field="body")


@pytest.mark.parametrize("bad", ['5,"stray', '5,"a"b', "5", "5,a,b"])
def test_one_bad_row_of_csv_leaves_all_others(tmp_path: Path, bad: str) -> None:
    rows = [f'{number},"row, {number}"' for number in range(50)]
    rows[5] = bad
    (tmp_path / "a.csv").write_text("\n".join(["id,text", *rows]))
    texts, errors = read_all(kind="csv", path=str(tmp_path))
    assert texts == [f"row, {number}" for number in range(50) if number != 5]
    assert len(errors) == 1 and errors[0].startswith("a.csv, line 7: ")


# --- encodings


def test_gbk_is_refused_and_read_where_it_is_named(tmp_path: Path, words: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.txt").write_bytes((CHINESE + "\n").encode("gbk") * 100)
    config = text_config(
        kind="text", path=f"{tmp_path}/a.txt", cache=str(tmp_path), workers=1, heldout=0.0, vocab_size=400
    )
    for make in (lambda: tokens_of(config, words), lambda: corpus_tokenizer(*parts(config))):
        with pytest.raises(SettingError, match=r"100 of 100 records .*not UTF-8.*corpus\.encoding") as caught:
            make()
        assert "\n" not in str(caught.value)
    texts, errors = read_all(kind="text", path=f"{tmp_path}/a.txt", encoding="gbk")
    assert texts == ["\n".join([CHINESE] * 100)] and not errors
    for encoding, match in (
        ("klingon", "no encoding"),
        ("idna", "no encoding"),
        ("utf-16", "iconv"),
        ("base64", "no encoding"),
    ):
        with pytest.raises(SettingError, match=rf"corpus\.encoding={encoding} .*{match}"):
            read_all(kind="text", path=str(tmp_path), encoding=encoding)


# --- counts and limits


def test_bad_records_are_counted_and_above_a_share_the_run_stops(
    tmp_path: Path, words: PreTrainedTokenizerFast
) -> None:
    rows = [json.dumps({"text": some_text(number, 50)}) for number in range(100)]
    rows[3] = rows[7] = rows[9] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    config = text_config(
        kind="jsonl", path=f"{tmp_path}/a.jsonl", cache=str(tmp_path), workers=1, heldout=0.0, sequence_length=32
    )
    found = tokens_of(config, words)
    assert (found.documents, found.invalid.bad, found.invalid.records) == (97, 3, 100)
    (line,) = found.invalid.lines()
    assert line.startswith("left out 3 of 100 records (3.00%), first a.jsonl, line 4: not JSON")
    with pytest.raises(
        SettingError, match=r"3 of 100 records \(3\.0%\) are invalid, more than corpus\.max_invalid=0\.01"
    ):
        tokens_of(changed(config, max_invalid=0.01), words)
    with pytest.raises(SettingError, match=r"a\.jsonl, line 4: not JSON.*corpus\.invalid_files=skip"):
        tokens_of(changed(config, invalid_files=Missing.stop), words)


def test_data_sets_saved_to_disk_are_read_as_they_are(tmp_path: Path) -> None:
    import datasets

    parts = {
        name: datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(3)]}) for name in ("train", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "both"))
    parts["test"].save_to_disk(str(tmp_path / "one"))
    assert read_all(kind="hub", hub=f"{tmp_path}/both")[0] == ["train 0", "train 1", "train 2"]
    for where in ({"kind": "text"}, {"kind": "jsonl", "split": "test"}):
        split = where.get("split", "train")
        assert read_all(path=f"{tmp_path}/both", **where)[0] == [f"{split} {i}" for i in range(3)]
    assert read_all(kind="hub", path=f"{tmp_path}/one")[0] == ["test 0", "test 1", "test 2"]
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
from distill.data import byte_bpe
from distill.data.new_tokenizer import write_tokenizer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
settings = SourceConfig(kind=sys.argv[1], path=sys.argv[2])
source = find_source(settings, "corpus", DataConfig())
texts = (document.text for shard in source.shards() for document in read(source, shard))
if sys.argv[3] == "train":
    write_tokenizer(byte_bpe.train, texts, 400, Path(sys.argv[2] + ".json"))
else:
    print(sum(map(len, texts)), file=sys.stderr)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize(
    ("kind", "name", "unit", "what"),
    [
        ("text", "a.txt", b"x", "read"),
        pytest.param("text", "a.txt", b"x", "train", marks=pytest.mark.slow),
        ("text", "a.txt.gz", b"x", "read"),
        pytest.param("text", "a.txt.gz", b"a b\n" + 60 * b"c d ", "read", marks=pytest.mark.slow),
        ("jsonl", "a.jsonl.gz", b"[", "read"),
        ("csv", "a.csv.gz", b'"', "read"),
        ("gutenberg", "a.txt.gz", b"a\n", "read"),
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
