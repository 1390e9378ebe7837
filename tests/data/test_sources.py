"""Sources are found or refused in one line; files in every form are read in ranges, and in bounded memory."""

import bz2
import gc
import gzip
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.compression import register_compression
from reading import located, texts, write_lines
from text import some_text, tokens_of
from tiny import parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.data import DocumentUnit
from distill.config.settings import DataConfig, SourceConfig
from distill.data import readers
from distill.data.heldout import fraction
from distill.data.new_tokenizer import byte_bpe
from distill.data.readers import blocks
from distill.data.sources import Document, Shard, Source, _files, find_source
from distill.data.sources._in_memory import source_in_memory
from distill.data.tokens import Text
from distill.runtime.errors import SettingError

# --- where it lies


@pytest.mark.parametrize("kind", ["gutenberg", "text", "jsonl", "parquet", "wikitext", "imdb"])
def test_a_missing_path_and_an_empty_folder_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    for path in map(str, (tmp_path / "nowhere", tmp_path, tmp_path / "*.txt")):
        with pytest.raises(SettingError) as caught:
            find_source(SourceConfig(kind=kind, path=path), "evaluate.sources.mine", DataConfig())
        assert (caught.value.setting, caught.value.value) == ("evaluate.sources.mine.path", path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"kind": "hub"}, r"^corpus\.hub=null"),
        ({"kind": "hub", "path": "x"}, r"kind=hub takes no path"),
        ({"kind": "bundled", "path": "x"}, r"^corpus\.path=x is not read with corpus\.kind=bundled"),
        (
            {"kind": "bundled", "split": "test"},
            r"^corpus\.split=test: the bundled books are those of train and heldout",
        ),
        ({"kind": "text", "path": ".", "prompt": "ask"}, r"^corpus\.prompt='ask': corpus\.kind=text has no such"),
    ],
)
def test_a_kind_that_cannot_be_served_is_refused(settings: dict[str, str], line: str) -> None:
    with pytest.raises(SettingError, match=line):
        located(**settings)


def test_the_usual_places_come_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTILL_DATA", str(tmp_path))
    hub = SourceConfig(kind="imdb", split="test", hub="stanfordnlp/imdb")
    assert "Hub data set stanfordnlp/imdb" in located(hub).describe()
    for name in ("aclImdb/test/pos/0_9.txt", "gutenberg/train/a.txt", "wikitext-2-raw/train.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("Fine.")
    assert texts(hub) == texts(kind="gutenberg") == ["Fine."]
    write_lines(tmp_path / "imdb/test.jsonl.gz", [{"text": "Good."}])
    assert texts(hub) == ["Good."]
    wiki = SourceConfig(kind="wikitext", hub="Salesforce/wikitext", subset="wikitext-2-raw-v1")
    assert located(wiki).settings.path == f"{tmp_path}/wikitext-2-raw/train.txt"
    for other in (wiki.changed(subset="wikitext-103-raw-v1"), hub.changed(hub="a/b")):  # of which it is no copy
        assert located(other).settings.path is None
    monkeypatch.setenv("DISTILL_DATA", str(tmp_path / "typo"))
    with pytest.raises(SettingError, match=r"^DISTILL_DATA=.*typo: "):
        located(kind="gutenberg")
    monkeypatch.delenv("DISTILL_DATA")
    assert all(find_source(SourceConfig(kind=kind), "corpus", DataConfig()) is None for kind in ("gutenberg", "text"))


# --- which files of a folder


@pytest.mark.parametrize("pattern", ["corpus", "corpus/**/*.txt"])
def test_links_are_followed_once(pattern: str) -> None:
    """Also where they lead in a circle; one that leads nowhere is none. A pattern enters no linked folders."""
    for folder in ("corpus/a", "elsewhere/inner"):
        Path(folder).mkdir(parents=True)
    for name in ("corpus/a/one.txt", "elsewhere/two.txt", "elsewhere/inner/three.txt", "four"):
        Path(name).write_text(name)
    links = {"corpus/b": "../elsewhere", "corpus/a/back": "..", "elsewhere/inner/up": "../../corpus"}
    links |= {"corpus/c": "../elsewhere", "corpus/four.txt": "../four", "corpus/gone.txt": "../nowhere"}
    for link, target in (links | {"corpus/itself": "itself", ".link.txt": "nowhere"}).items():
        os.symlink(target, link)
    linked = [] if "*" in pattern else ["elsewhere/inner/three.txt", "elsewhere/two.txt"]  # as of `glob` in a shell
    assert sorted(texts(kind="text", path=pattern)) == ["corpus/a/one.txt", *linked, "four"]
    with pytest.raises(SettingError, match="no such file or folder"):
        located(kind="text", path="corpus/gone.txt")


def test_labelled_examples_are_no_text() -> None:
    with pytest.raises(SettingError, match=r"kind=table: holds labelled examples"):
        located(kind="table", path="x.csv")


def test_hidden_copies_are_no_text(tmp_path: Path) -> None:
    (tmp_path / ".ipynb_checkpoints").mkdir()
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", "._a.txt"):
        (tmp_path / name).write_text(name)
    assert texts(kind="text", path=str(tmp_path)) == texts(kind="text", path=".") == ["a.txt"]
    named = texts(kind="text", path=f"{tmp_path}/.ipynb_checkpoints")  # where the user names it
    assert named == [".ipynb_checkpoints/a-checkpoint.txt"]


@pytest.mark.parametrize(
    ("kind", "files", "split", "read"),
    [
        ("jsonl", ("train", "extra", "test"), "train", ["extra", "train"]),
        ("jsonl", ("train", "extra", "test"), "test", ["extra", "test"]),
        ("jsonl", ("report", "dev_notes"), "train", ["report"]),
        ("jsonl", ("train/part-0", "test/part-0"), "train", ["train/part-0"]),
        ("jsonl", ("train/part-0", "test/part-0"), "validation", None),
        ("jsonl", ("test",), "train", ["test"]),
        ("jsonl", ("train",), "test", None),
        ("jsonl", ("a", "b"), "test", ["a", "b"]),
        ("csv", ("train-0-of-2", "train-1-of-2", "test-0-of-1"), "test", ["test-0-of-1"]),
        ("parquet", ("train-0-of-2", "train-1-of-2", "test-0-of-1"), "train", ["train-0-of-2", "train-1-of-2"]),
        ("imdb", ("train-0", "test-0", "._train-0"), "test", ["test-0"]),
        ("text", ("train", "valid", "test"), "train", ["train"]),
        ("text", ("train", "test"), "validation", None),
        ("text", ("train/a", "test/b", "c"), "train", ["c", "train/a"]),
        ("text", ("train/a", "test/b"), "test", ["test/b"]),
        ("text", ("books/a", "test/b"), "train", ["books/a", "test/b"]),
        ("gutenberg", ("train/a", "heldout/b"), "train", ["train/a"]),
        ("text", ("test-pilot", "dev_diary"), "train", ["dev_diary", "test-pilot"]),  # beside none that is called so
        ("wikitext", ("wiki.train", "wiki.valid", "wiki.test"), "validation", ["wiki.valid"]),
        ("wikitext", ("inner/train", "inner/valid"), "validation", ["inner/valid"]),
        ("wikitext", ("train", "valid"), "test", None),
    ],
)
def test_of_a_folder_the_files_of_other_splits_are_left_out(
    kind: str, files: tuple[str, ...], split: str, read: list[str] | None, tmp_path: Path, lines: list[str]
) -> None:
    ending = {"imdb": "jsonl", "text": "txt", "gutenberg": "txt", "wikitext": "raw"}.get(kind, kind)
    for name in files:
        path, rows = tmp_path / f"{name}.{ending}", datasets.Dataset.from_dict({"text": [name]})
        path.parent.mkdir(exist_ok=True)
        write = {"jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}.get(ending)
        path.write_text(name) if write is None else write(path)
    settings = SourceConfig(kind=kind, path=str(tmp_path), split=split)
    if read is None:
        with pytest.raises(SettingError, match="and split") as caught:
            located(settings)
        assert caught.value.setting == "corpus.path"
        return
    assert texts(settings) == read
    left_out = sum(not name.startswith(".") for name in files) - len(read)
    assert any(f"{left_out} files of other splits than {split} are left out" in line for line in lines) == bool(
        left_out
    )
    alone = settings.changed(path=f"{tmp_path}/{files[0]}.{ending}")
    assert texts(alone) == [files[0]], "a file that the user names is read whatever it is called"


@pytest.mark.parametrize("kind", ["gutenberg", "text"])
def test_a_file_is_what_its_name_says_whatever_the_kind(kind: str, tmp_path: Path) -> None:
    """Its raw lines, with numbers and quotation marks, are no text to train on."""
    frame = pandas.DataFrame({"stars": [5, 1], "text": ["The ship was old, and the sea calm.", "A quiet winter."]})
    frame.to_csv(tmp_path / "REVIEWS.CSV", index=False)
    frame.to_csv(tmp_path / "reviews.tsv", index=False, sep="\t")
    frame.to_json(tmp_path / "DATA.JSONL", orient="records", lines=True)
    frame.to_parquet(tmp_path / "X.PARQUET")
    for path in [*tmp_path.iterdir()]:
        assert texts(kind=kind, path=str(path)) == list(frame["text"])
        with pytest.raises(SettingError, match=r"corpus\.field=review: .*it has stars, text"):
            texts(kind=kind, path=str(path), field="review")
    (tmp_path / "paper.PDF").write_text("<p>The ship was old.</p>")
    with pytest.raises(SettingError, match=r"^corpus\.path=.*\.PDF is by its name no plain text"):
        located(kind=kind, path=f"{tmp_path}/paper.PDF")


# --- units of work


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("size", [7, 50, 64, 999])
def test_ranges_give_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(_files, "RANGE_BYTES", size)
    lines = [f"line {i} é" * (i % 4) for i in range(40)]
    path = write_lines(tmp_path / "x.jsonl", [{"text": line} for line in lines])
    assert texts(kind="jsonl", path=str(path)) == [line for line in lines if line]
    for text in ("\n".join(lines), "é word " * 500, "é word " * 500 + "\nTwo.\nThree."):  # also longer than a range
        (tmp_path / "x.txt").write_text(text)
        assert "".join("".join(texts(kind="text", path=f"{tmp_path}/x.txt")).split()) == "".join(text.split())


@pytest.mark.usefixtures("small_units")
def test_parquet_ranges_give_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_files, "RANGE_BYTES", 2000)
    rows = [f"Row number {i}." for i in range(1000)]
    pandas.DataFrame({"body": rows, "id": range(1000)}).to_parquet(tmp_path / "x.parquet", row_group_size=64)
    source = SourceConfig(kind="parquet", path=str(tmp_path), field="body")
    assert len(located(source).shards()) > 2 and texts(source) == rows


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    """`datasets` reads a local folder the way it reads the Hub."""
    monkeypatch.setattr(_files, "SHARD_ROWS", 3)
    write_lines(tmp_path / "train.jsonl", [{"text": f"Row {i}.<br />"} for i in range(10)])
    source = SourceConfig(kind="hub", hub=str(tmp_path), streaming=streaming)
    assert texts(source) == [f"Row {i}.<br />" for i in range(10)]
    assert texts(source.changed(kind="imdb")) == [f"Row {i}." for i in range(10)]
    with pytest.raises(SettingError, match=r"corpus\.hub=.*split=nosuch\) cannot be loaded"):
        texts(source.changed(split="nosuch", streaming=False))


def test_data_sets_saved_to_disk_are_read_as_they_are(tmp_path: Path) -> None:
    rows = {name: datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(3)]}) for name in ("train", "test")}
    both, one = str(tmp_path / "both"), str(tmp_path / "one")
    datasets.DatasetDict(rows).save_to_disk(both)
    rows["test"].save_to_disk(one)
    assert texts(kind="text", path=both) == texts(kind="hub", hub=both) == rows["train"]["text"][:]
    assert texts(kind="jsonl", path=both, split="test") == texts(kind="hub", path=one) == rows["test"]["text"][:]
    with pytest.raises(SettingError, match="it has train, test"):
        texts(kind="hub", hub=both, split="dev")


# --- documents


def test_a_fraction_is_drawn_from_the_text_alone(tmp_path: Path) -> None:
    rows = [f"Review number {i}." for i in range(2000)]
    a = str(write_lines(tmp_path / "a.jsonl", [{"text": row} for row in rows]))
    b = str(write_lines(tmp_path / "b/b.jsonl.gz", [{"text": row} for row in reversed(rows)]))
    some = texts(kind="jsonl", path=a, fraction=0.1)
    assert 140 < len(some) < 260
    assert some == texts(kind="jsonl", path=b, fraction=0.1)[::-1]
    assert set(some) < set(texts(kind="jsonl", path=a, fraction=0.3))
    held = [row for row in some if fraction(row, "heldout") < 0.5]
    assert 0.3 < len(held) / len(some) < 0.7, "being held out does not depend on being in the fraction"


BLANKS = ["    the red house\n        a dog\n\n", "\ta cat \n", "no blanks"]


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "saved", "memory"])
def test_blanks_at_the_ends_of_records_stay(form: str, tmp_path: Path) -> None:
    """As of code; a text of blanks alone is none."""
    rows = datasets.Dataset.from_dict({"text": [*BLANKS, " \n"]})
    path = str(tmp_path / f"a.{form}")
    if form == "memory":
        source = source_in_memory(rows, "", "rows", SourceConfig(kind="hub"), "corpus")
        assert [document.text for document in source.documents(source.shards()[0])] == BLANKS
        return
    {"jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet, "saved": rows.save_to_disk}[form](path)
    assert texts(kind="hub" if form == "saved" else form, path=path) == BLANKS


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("line", ["  def f(a):  ", "\treturn a", "b"]),
        ("blank", ["  def f(a):  \n\treturn a", "b"]),
        ("file", ["  def f(a):  \n\treturn a\n\n \nb"]),
        (None, ["  def f(a):  \n\treturn a\n\n \nb"]),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_indentation_of_plain_text_stays(unit: str | None, expected: list[str], end: str, tmp_path: Path) -> None:
    """Blank lines at its ends do not."""
    text = "\n   \n  def f(a):  \n\treturn a\n\n \nb\n \n\n"
    (tmp_path / "a.txt").write_bytes(text.replace("\n", end).encode())
    document = None if unit is None else DocumentUnit(unit)
    assert texts(kind="text", path=str(tmp_path / "a.txt"), document=document) == expected


# --- one's own


@dataclass(frozen=True)
class Verses(Source):
    """As a user would write it: a file whose documents are parted by a line of stars."""

    path: str
    mark: str = "***"

    def shards(self) -> list[Shard]:
        return [Shard((self.path,))]

    def documents(self, shard: Shard) -> Iterator[Document]:
        for number, text in enumerate(Path(shard.paths[0]).read_text().split(self.mark)):
            yield Document(f"verse {number}", text.strip())


def own(**settings: object) -> SourceConfig:
    """That source, as `corpus._target_` and the settings beside it."""
    return SourceConfig(**{"_target_": f"{__name__}.Verses", "_group_": "corpus", **settings})


def test_a_source_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "verses"
    file.write_text("Roses\n***\nViolets")

    def identity(**arguments: str) -> object:
        return Text((located(own(path=str(file), **arguments)),), "corpus").identity(str(tmp_path / "cache"))

    assert texts(own(path=str(file))) == ["Roses", "Violets"] and located(own(path="x")).describe() == "Verses"
    assert (before := identity()) == identity() != identity(mark="+")  # the settings decide the text, too
    assert located(own(path="x", fraction=0.5)).fraction == 0.5  # a setting of every source
    file.write_text("Roses")
    assert identity() != before
    with pytest.raises(SettingError, match=r"corpus\.colour: no setting of"):
        located(own(path="x", colour="red"))
    with pytest.raises(SettingError, match=r"corpus\._target_=pathlib\.Path gives no distill\.data\.sources\.Source"):
        located(SourceConfig(**{"_target_": "pathlib.Path", "_group_": "corpus"}))


CHINESE = "我们的生活在这个城市里已经很多年了。他说。今天的天气很好。可以出去走一走。"
TEXTS = [f"the red house {number} was old" for number in range(500)]
PLAIN = "".join(f"{text}\n" for text in TEXTS).encode()
FORMS = {
    "jsonl": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode(),
    "text": PLAIN,
    "csv": b"text\n" + PLAIN,
}
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: bytes(pa.compress(content, "zstd", asbytes=True)),
    ".zstd": lambda content: bytes(pa.compress(content, "zstd", asbytes=True)),
}

# --- what cannot be read

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
    gc.disable()  # or it may clear away objects of other tests where the stack has no room left
    try:
        with pytest.raises(SettingError, match=line) as caught:
            texts(kind="text" if kind == "txt" else kind, path=str(tmp_path))
    finally:
        gc.enable()
    assert caught.value.setting in ("corpus.path", "corpus.field") and "\n" not in str(caught.value)


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
        texts(kind=kind, path=str(tmp_path))


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"half \xed\xa0\x80"])
def test_parquet_and_hub_rows_that_are_not_utf8(tmp_path: Path, bad: bytes) -> None:
    values = [*[b"row"] * 300, bad, *[b"row"] * 300]
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 601, pa.array(values).buffers())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    for kind, name, where in (("parquet", "a.parquet", r"a\.parquet"), ("hub", "saved", r"saved, behind row [\d,]+")):
        with pytest.raises(SettingError, match=rf"{where}: UnicodeDecodeError"):
            texts(kind=kind, path=f"{tmp_path}/{name}")


def test_a_preparation_that_stops_publishes_nothing(tmp_path: Path, words: PreTrainedTokenizerFast) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": some_text(number, 50)} for number in range(100)])
    path.write_text(f"{path.read_text()}{{")
    config = text_config(kind="jsonl", path=str(path), cache=f"{tmp_path}/cache", workers=1, sequence_length=32)
    for make in (lambda: tokens_of(config, words), lambda: tokens_of(config, words), lambda: byte_bpe(*parts(config))):
        with pytest.raises(SettingError, match=r"^corpus\.path: a\.jsonl, line 101: not JSON"):
            make()
    assert not list((tmp_path / "cache").rglob("index.json"))


# --- CSV, encodings and compressions


def test_csv_is_read_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text,note\n1,"One, ""two""\nand three",x\n\n2,Four,y\n')
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b'text\tid\nAn "inch\t1\n'))
    (tmp_path / "c.tsv_export.csv").write_text("text,0123\nthe cat,1\n")
    assert texts(kind="csv", path=str(tmp_path)) == ['One, "two"\nand three', "Four", 'An "inch', "the cat"]
    assert texts(kind="csv", path=f"{tmp_path}/c.tsv_export.csv", field="0123") == ["1"]
    with pytest.raises(SettingError, match=r"corpus\.field=body: a\.csv: no such field; it has id, text, note"):
        texts(kind="csv", path=f"{tmp_path}/a.csv", field="body")
    novel = "A line of the novel, and another half.\n" * 40_000
    (tmp_path / "a.csv").write_text(f'title,text\nOne,"{novel}"\nTwo,Short.\n')
    assert texts(kind="csv", path=f"{tmp_path}/a.csv") == [novel, "Short."]


def test_other_encodings_are_refused_and_read_where_they_are_named(tmp_path: Path) -> None:
    path = str(tmp_path / "a.txt")
    Path(path).write_bytes((CHINESE + "\n").encode("gbk") * 100)
    with pytest.raises(SettingError, match=r"a\.txt, line 1: not UTF-8.*corpus\.encoding"):
        texts(kind="text", path=path)
    assert texts(kind="text", path=path, encoding="gbk") == ["\n".join([CHINESE] * 100)]
    for encoding, match in (("klingon", "no encoding"), ("utf-16", "iconv"), ("base64", "no encoding")):
        with pytest.raises(SettingError, match=rf"corpus\.encoding={encoding}: .*{match}"):
            texts(kind="text", path=path, encoding=encoding)
    (tmp_path / "a.csv").write_bytes("texte,catégorie\nBonjour à tous,3\n".encode("cp1252"))
    with pytest.raises(SettingError, match=r"a\.csv, line 1: not UTF-8"):
        texts(kind="csv", path=f"{tmp_path}/a.csv", field="texte")
    assert texts(kind="csv", path=f"{tmp_path}/a.csv", field="texte", encoding="cp1252") == ["Bonjour à tous"]
    (tmp_path / "b.txt").write_text("\ufeffÉté.\nDeux.", encoding="utf-8")
    for encoding in (None, "utf-8-sig"):
        assert texts(kind="text", path=f"{tmp_path}/b.txt", encoding=encoding) == ["Été.\nDeux."]


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("kind", FORMS)
def test_a_compressed_file_is_unpacked(kind: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several members too, alone and in a folder, never entered in its middle; by Arrow, not by other packages."""
    for name, ending in (("zstd", "zst"), ("lz4", "lz4")):
        register_compression(name, None, ending, force=True)
    monkeypatch.setattr(_files, "RANGE_BYTES", 1000)
    pack, content = PACK[suffix], FORMS[kind]
    half, plain = content.index(b"\n", len(content) // 2) + 5, f"a.{'txt' if kind == 'text' else kind}"
    path, document = tmp_path / f"{plain}{suffix}", "line" if kind == "text" else None
    for packed in (pack(content), pack(content[:half]) + pack(content[half:])):
        path.write_bytes(packed)
        for place in (path, tmp_path):
            assert texts(kind=kind, path=str(place), document=document) == TEXTS
    path.write_bytes(packed[: len(packed) // 2 - 40])
    with pytest.raises(SettingError, match=plain) as caught:
        texts(kind=kind, path=str(path), document=document)
    assert "UTF-8" not in str(caught.value), caught.value
    path.rename(tmp_path / plain)
    if kind != "csv":
        with pytest.raises(SettingError, match=rf"compressed, so its name has to end in \{suffix[:4]}"):
            texts(kind=kind, path=f"{tmp_path}/{plain}")


# --- long texts, and memory


def test_a_large_text_is_cut_at_blank_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE", 200)
    paragraphs = [f"Paragraph {i}. " * (1 + i % 5) for i in range(50)]
    (tmp_path / "x.txt").write_text("\n\n".join(paragraphs))
    found = texts(kind="text", path=str(tmp_path))
    assert len(found) > 5 and all(len(piece) < 400 for piece in found)
    assert [p.strip() for piece in found for p in piece.split("\n\n")] == [p.strip() for p in paragraphs]
    (tmp_path / "x.txt").write_text("no blank line\n" * 100)
    assert all(len(piece) < 420 for piece in texts(kind="text", path=str(tmp_path)))


@pytest.mark.parametrize("text", ["", "a", "word " * 500, "x" * 1000, "\n\n".join(["para " * 8] * 60)])
def test_blocks_put_together_are_the_text(text: str) -> None:
    found = list(blocks(text, 100))
    assert "".join(found) == text and all(found)
    assert all(len(block) >= 100 for block in found[:-1])
    assert all(len(block) <= (210 if " " in text else 400) for block in found)


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
    print(sum(map(len, texts)))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def measured(*arguments: Any) -> list[int]:
    """Characters that were read, and MiB of memory that it took."""
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return [*map(int, done.stdout.split())]


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
    piece = unit * ((1 << 20) // len(unit))
    with gzip.open(tmp_path / name, "wb", 1) if name.endswith(".gz") else (tmp_path / name).open("wb") as file:
        for _ in range(50 if what == "train" else 256):
            file.write(piece)
    assert measured(kind, tmp_path / name, what)[-1] < 500
