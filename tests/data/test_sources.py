"""Sources are found or refused in one line; their documents are the same however the work is divided."""

import gzip
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
from tiny import corpus_config

from distill.config.component import Component
from distill.config.data import DocumentUnit
from distill.config.settings import DataConfig, SourceConfig
from distill.data import readers, tokens
from distill.data.heldout import HeldOut, fraction, held_out
from distill.data.readers import blocks
from distill.data.sources import Document, Shard, Source, _files, find_source, read
from distill.data.sources._in_memory import source_in_memory
from distill.data.sources.imdb import review
from distill.data.sources.text import Text
from distill.data.sources.wikitext import articles
from distill.runtime.errors import SettingError


def find(settings: SourceConfig | Component, setting: str = "corpus") -> Source | None:
    return find_source(settings, setting, DataConfig())


def identity_of(settings: SourceConfig | Component, tmp_path: Path) -> list[Any]:
    return tokens.Text((located(settings),), "corpus").identity(str(tmp_path / "cache"))


def located(settings: SourceConfig | Component) -> Source:
    source = find(settings)
    assert source is not None
    return source


def texts(settings: SourceConfig | Component) -> list[str]:
    source = located(settings)
    return [document.text for shard in source.shards() for document in read(source, shard)]


def write_lines(path: Path, records: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# --- where it lies


@pytest.mark.parametrize("kind", ["gutenberg", "text", "jsonl", "parquet", "wikitext", "imdb"])
def test_a_missing_path_and_an_empty_folder_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    for path, what in (
        (tmp_path / "nowhere", "no such file"),
        (tmp_path, "no file of kind"),
        (tmp_path / "*.txt", "no such"),
    ):
        with pytest.raises(SettingError, match=what) as caught:
            find(SourceConfig(kind=kind, path=str(path)), "evaluate.sources.mine")
        assert str(caught.value).startswith(f"evaluate.sources.mine.path={path}: ") and "\n" not in str(caught.value)


def test_the_usual_places_come_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTILL_DATA", str(tmp_path))
    hub = SourceConfig(kind="imdb", split="test", hub="stanfordnlp/imdb")
    assert "Hub data set stanfordnlp/imdb" in located(hub).describe()
    assert find(SourceConfig(kind="imdb")) is None
    (tmp_path / "aclImdb/test/pos").mkdir(parents=True)
    (tmp_path / "aclImdb/test/pos/0_9.txt").write_text("Fine.")
    assert texts(hub) == ["Fine."]
    write_lines(tmp_path / "imdb/test.jsonl.gz", [{"text": "Good."}])
    assert texts(hub) == ["Good."]
    assert "Hub data set a/b" in located(hub.changed(hub="a/b")).describe()  # of which it is no copy
    (tmp_path / "gutenberg/train").mkdir(parents=True)
    (tmp_path / "gutenberg/train/a.txt").write_text("A book.")
    assert texts(SourceConfig(kind="gutenberg")) == ["A book."]
    monkeypatch.setenv("DISTILL_DATA", str(tmp_path / "typo"))
    with pytest.raises(SettingError, match=r"^DISTILL_DATA=.*typo: "):
        find(SourceConfig(kind="gutenberg"))
    monkeypatch.delenv("DISTILL_DATA")
    assert find(SourceConfig(kind="gutenberg")) is None and find(SourceConfig(kind="text")) is None


def test_a_kind_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"corpus\.hub=null"):
        find(SourceConfig(kind="hub"))
    with pytest.raises(SettingError, match=r"kind=hub takes no path"):
        find(SourceConfig(kind="hub", path=str(tmp_path)))


def test_describe(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    assert located(SourceConfig(kind="gutenberg", path=str(tmp_path))).describe() == f"2 Gutenberg files in {tmp_path}"
    assert (
        located(SourceConfig(kind="text", path=f"{tmp_path}/a.txt", fraction=0.5))
        .describe()
        .endswith("a.txt, 0.5 of its documents")
    )
    assert located(SourceConfig(kind="hub", hub="x/y", subset="en")).describe() == "Hub data set x/y (en, split train)"


def test_the_identity_follows_the_files(tmp_path: Path) -> None:
    source = SourceConfig(kind="text", path=str(tmp_path))
    (tmp_path / "a.txt").write_text("one")
    before = identity_of(source, tmp_path)
    assert identity_of(source, tmp_path) == before
    (tmp_path / "b.txt").write_text("two")
    assert identity_of(source, tmp_path) != before


def test_other_processes_do_not_get_the_list_of_all_files(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number}.txt").write_text("text")
    source = located(SourceConfig(kind="text", path=str(tmp_path)))
    (shard,) = source.shards()
    sent = pickle.dumps(source)
    assert b"49.txt" not in sent and len(sent) < 1000
    assert len(list(pickle.loads(sent).documents(shard))) == 50


# --- units of work


def test_small_files_share_a_shard_and_large_ones_have_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "SHARD_BYTES", 100)
    for name, size in {"a": 40, "b": 50, "c": 30, "d": 500, "e": 10}.items():
        (tmp_path / f"{name}.txt.gz").write_bytes(b"x" * size)
    found = located(SourceConfig(kind="text", path=str(tmp_path))).shards()
    assert [[Path(path).name[0] for path in shard.paths] for shard in found] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert sum(shard.size for shard in found) == 630


@pytest.mark.parametrize("size", [7, 50, 64, 999])
def test_ranges_give_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(_files, "RANGE_BYTES", size)
    lines = [f"line {i} é" * (i % 4) for i in range(40)]
    path = write_lines(tmp_path / "x.jsonl", [{"text": line} for line in lines])
    assert texts(SourceConfig(kind="jsonl", path=str(path))) == [line for line in lines if line]
    (tmp_path / "x.txt").write_text("\n".join(lines))
    assert "\n".join(texts(SourceConfig(kind="text", path=f"{tmp_path}/x.txt"))).split() == " ".join(lines).split()


def test_parquet_ranges_give_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(_files, "RANGE_BYTES", 2000)
    rows = [f"Row number {i}." for i in range(1000)]
    pq.write_table(pa.table({"body": rows, "id": list(range(1000))}), tmp_path / "x.parquet", row_group_size=64)
    source = SourceConfig(kind="parquet", path=str(tmp_path), field="body")
    assert len(located(source).shards()) > 2 and texts(source) == rows
    with pytest.raises(SettingError, match=r"corpus\.field=text: x\.parquet: no such field; it has body, id"):
        texts(source.changed(field="text"))


# --- documents


def test_a_large_text_is_cut_at_blank_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE", 200)
    paragraphs = [f"Paragraph {i}. " * (1 + i % 5) for i in range(50)]
    text = "\n\n".join(paragraphs)
    (tmp_path / "x.txt").write_text("\ufeff" + text)
    found = texts(SourceConfig(kind="text", path=str(tmp_path)))
    assert len(found) > 5 and all(len(piece) < 400 for piece in found)
    assert "\n\n".join(found).split() == text.split()
    assert [p.strip() for piece in found for p in piece.split("\n\n")] == [p.strip() for p in paragraphs]
    (tmp_path / "x.txt").write_text("no blank line\n" * 100)
    assert all(len(piece) < 420 for piece in texts(SourceConfig(kind="text", path=str(tmp_path))))


def test_wikitext() -> None:
    lines = [
        " \n", " = First @-@ one = \n", " \n", " It cost 1 @,@ 000 or 1 @.@ 5 , a low @-@ price . \n", " \n",
        " = = Part = = \n", " \n", " where x \n", " = 1 rad / s and y \n", " = 2 = \n", " holds . \n", " \n",
        " = Second = \n", " \n", " More . \n",
    ]  # fmt: skip
    first = (
        "First-one\n\nIt cost 1,000 or 1.5 , a low-price .\n\nPart\n\nwhere x\n\n= 1 rad / s and y\n\n= 2 =\n\nholds ."
    )
    assert list(articles(lines)) == [first, "Second\n\nMore ."]
    assert list(articles([])) == [""]


def test_imdb_in_both_forms(tmp_path: Path) -> None:
    assert (
        review("Good.<br /><br />It\x92s \x96 well \x85<BR>fine\x81") == "Good.\n\nIt\u2019s \u2013 well \u2026\n\nfine"
    )
    for name in ("train/pos/0_9", "train/neg/0_1", "train/unsup/0_0", "test/pos/0_8"):
        (tmp_path / "aclImdb" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "aclImdb" / f"{name}.txt").write_text(f"{name}<br />.")
    (tmp_path / "aclImdb/train/urls_pos.txt").write_text("http://x")
    folder = SourceConfig(kind="imdb", path=f"{tmp_path}/aclImdb")
    assert sorted(texts(folder)) == ["train/neg/0_1\n\n.", "train/pos/0_9\n\n."]
    assert texts(folder.changed(split="test")) == ["test/pos/0_8\n\n."]
    write_lines(tmp_path / "json/train.jsonl.gz", [{"text": "A<br />B", "label": 1}])
    write_lines(tmp_path / "json/test.jsonl.gz", [{"text": "C", "label": 0}])
    assert texts(SourceConfig(kind="imdb", path=f"{tmp_path}/json")) == ["A\n\nB"]


def test_records_without_a_text_are_passed_over_and_those_of_nothing_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "q": "?"}\n\n{"text": null, "q": "?"}\n{"text": " ", "q": ""}\n')
    (tmp_path / "b.jsonl").write_text("\n")
    assert texts(SourceConfig(kind="jsonl", path=str(tmp_path))) == ["one"]
    source, left_out = located(SourceConfig(kind="jsonl", path=str(tmp_path), prompt="q")), Counter[str]()
    assert [each.text for shard in source.shards() for each in read(source, shard, left_out)] == ["?one", " "]
    assert left_out == {"no text in it": 1}


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    """`datasets` reads a local folder the way it reads the Hub."""
    monkeypatch.setattr(_files, "SHARD_ROWS", 3)
    write_lines(tmp_path / "train.jsonl", [{"text": f"Row {i}.<br />"} for i in range(10)])
    source = SourceConfig(kind="hub", hub=str(tmp_path), streaming=streaming)
    assert texts(source) == [f"Row {i}.<br />" for i in range(10)]
    assert texts(source.changed(kind="imdb")) == [f"Row {i}." for i in range(10)]
    assert identity_of(source, tmp_path) == identity_of(source, tmp_path)
    with pytest.raises(SettingError, match=r"corpus\.hub=.*split=nosuch\) cannot be loaded"):
        texts(source.changed(split="nosuch", streaming=False))


def test_wikitext_on_the_hub_has_a_line_a_row(tmp_path: Path) -> None:
    lines = ["", " = One = \n", "", " a @-@ b \n", "", " = Two = \n", "", " c \n"]
    write_lines(tmp_path / "train.jsonl", [{"text": line} for line in lines])
    assert texts(SourceConfig(kind="wikitext", hub=str(tmp_path))) == ["One\n\na-b", "Two\n\nc"]


# --- shares


def test_shares_are_drawn_from_the_text_alone(tmp_path: Path) -> None:
    rows = [f"Review number {i}." for i in range(2000)]
    a = write_lines(tmp_path / "a.jsonl", [{"text": row} for row in rows])
    b = write_lines(tmp_path / "b/b.jsonl.gz", [{"text": row} for row in reversed(rows)])
    some = texts(SourceConfig(kind="jsonl", path=str(a), fraction=0.1))
    assert 140 < len(some) < 260
    assert some == texts(SourceConfig(kind="jsonl", path=str(b), fraction=0.1))[::-1]
    assert set(some) < set(texts(SourceConfig(kind="jsonl", path=str(a), fraction=0.3)))
    assert fraction("Review number 1.", "share") == pytest.approx(0.6036563, abs=1)  # in [0, 1)
    held = [row for row in some if fraction(row, "heldout") < 0.5]
    assert 0.3 < len(held) / len(some) < 0.7, "being held out does not depend on being in the share"


def plain(text: str) -> Document:
    return Document("", text)


def stretches_of(rule: HeldOut, text: str) -> list[tuple[bool, str]]:
    return [(held, stretch.text) for held, stretch in rule.parts(plain(text))]


def test_many_documents_are_held_out_whole() -> None:
    rows = [f"Document {i}. " * 900 for i in range(400)]
    rule = held_out(0.1, map(plain, rows))
    parts = [stretches_of(rule, row) for row in rows]
    assert all(len(part) == 1 and part[0][1] == row for part, row in zip(parts, rows, strict=True))
    assert 20 < sum(part[0][0] for part in parts) < 60
    assert not any(held for row in rows for held, _ in stretches_of(held_out(0.0, map(plain, rows)), row))


@pytest.mark.parametrize(("count", "paragraphs"), [(1, 300), (3, 300), (10, 40)])
def test_few_documents_are_held_out_by_block(count: int, paragraphs: int) -> None:
    rows = ["\n\n".join(f"Paragraph {i} of {j}. " * 9 for i in range(paragraphs)) for j in range(count)]
    rule = held_out(0.02, map(plain, rows))
    stretches = [stretch for row in rows for stretch in stretches_of(rule, row)]
    assert "".join(text for _, text in stretches) == "".join(rows)
    held = sum(len(text) for is_held, text in stretches if is_held)
    assert 0 < held < 0.2 * sum(map(len, rows))


def test_one_short_document_stays_for_training() -> None:
    assert stretches_of(held_out(0.02, [plain("Short.")]), "Short.") == [(False, "Short.")]
    assert stretches_of(held_out(0.02, []), "Short.") in ([(False, "Short.")], [(True, "Short.")])


@pytest.mark.parametrize("text", ["", "a", "word " * 500, "x" * 1000, "\n\n".join(["para " * 8] * 60)])
def test_blocks_put_together_are_the_text(text: str) -> None:
    found = list(blocks(text, 100))
    assert "".join(found) == text and all(found)
    if " " in text:
        assert all(len(block) <= 210 for block in found)
        assert all(len(block) >= 100 for block in found[:-1])


def test_a_shard_names_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (document,) = Text(SourceConfig(kind="text"), "corpus").documents(Shard((str(tmp_path / "a.txt"),)))
    assert document == Document("a.txt#0", "one")


# --- one's own


class Verses(Source):
    """As a user would write it: a file whose documents are parted by a line of stars."""

    def __init__(self, path: str, mark: str = "***") -> None:
        self.path, self.mark = path, mark

    def shards(self) -> list[Shard]:
        return [Shard((self.path,))]

    def documents(self, shard: Shard) -> Iterator[Document]:
        for number, text in enumerate(Path(shard.paths[0]).read_text().split(self.mark)):
            yield Document(f"verse {number}", text.strip())


def own(name: str, **settings: object) -> SourceConfig:
    """A source of this file, as `corpus._target_` and the settings beside it."""
    return SourceConfig(**{"_target_": f"{__name__}.{name}", "_group_": "corpus", **settings})


def test_a_source_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "verses").write_text("Roses\n***\nViolets")
    settings = own("Verses", path=str(tmp_path / "verses"))
    assert texts(settings) == ["Roses", "Violets"] and located(settings).describe() == "Verses"

    def identity(**arguments: str) -> object:
        return identity_of(own("Verses", path=str(tmp_path / "verses"), **arguments), tmp_path)

    assert identity() == identity() != identity(mark="+")  # the settings decide the text, too
    half = located(own("Verses", path="x", fraction=0.5))
    assert half.fraction == 0.5  # a setting of every source
    before = identity_of(settings, tmp_path)
    (tmp_path / "verses").write_text("Roses")
    assert identity_of(settings, tmp_path) != before
    with pytest.raises(SettingError, match=r"corpus\.colour: no setting of"):
        find(own("Verses", path="x", colour="red"))
    with pytest.raises(SettingError, match=r"corpus\._target_=pathlib\.Path gives no distill\.data\.sources\.Source"):
        find(SourceConfig(**{"_target_": "pathlib.Path", "_group_": "corpus"}))


@dataclass(frozen=True)
class Frozen(Verses):
    path: str
    mark: str = "***"


def test_a_source_of_ones_own_may_be_frozen(tmp_path: Path) -> None:
    (tmp_path / "verses").write_text("Roses\n***\nViolets")
    settings = own("Frozen", path=str(tmp_path / "verses"), fraction=1.0)
    assert texts(settings) == ["Roses", "Violets"] and located(settings).made_from is not None


def test_a_new_source_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the folder of the sources is found by its name, with its suffixes and usual paths."""
    import distill.data.sources as package

    folder = tmp_path / "data" / "sources"
    folder.mkdir(parents=True)
    (folder / "verses.py").write_text(
        '"""Files in which every line is a document."""\n'
        "from distill.data.sources._files import FileSource\n"
        "class Verses(FileSource):\n"
        "    word, suffixes = 'verse', ('.verse',)\n"
        "    @classmethod\n"
        "    def usual_paths(cls, split):\n"
        "        return [f'verses/{split}']\n"
        "    def read(self, place, start, stop):\n"
        "        return iter(open(place).read().splitlines())\n"
    )
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    (tmp_path / "verses" / "train").mkdir(parents=True)
    (tmp_path / "verses" / "train" / "a.verse").write_text("one\ntwo\n")
    monkeypatch.setenv("DISTILL_DATA", str(tmp_path))
    source = find_source(corpus_config(kind="verses"), "corpus", DataConfig())
    assert source is not None and source.describe().startswith("verse file")
    assert [document.text for shard in source.shards() for document in read(source, shard)] == ["one", "two"]


BLANKS = ["    the red house\n        a dog\n\n", "\ta cat \n", "no blanks"]


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "saved", "hub", "memory"])
def test_blanks_at_the_ends_of_records_stay(form: str, tmp_path: Path) -> None:
    """As of code; a text of blanks alone is none."""
    rows = datasets.Dataset.from_dict({"text": [*BLANKS, " \n"]})
    path = str(tmp_path / f"a.{form}")
    if form == "memory":
        source = source_in_memory(rows, "", "rows", SourceConfig(kind="hub"), "corpus")
        assert [document.text for document in source.documents(source.shards()[0])] == BLANKS
        return
    match form:
        case "jsonl":
            rows.to_json(path)
        case "csv":
            rows.to_csv(path)
        case "parquet":
            rows.to_parquet(path)
        case "hub":
            rows.to_parquet(f"{path}/train.parquet")
        case "saved":
            rows.save_to_disk(path)
    place = {"hub": path} if form == "hub" else {"path": path}
    kind = "hub" if form in ("hub", "saved") else form
    assert texts(SourceConfig(kind=kind, **place)) == BLANKS


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
    settings = SourceConfig(kind="text", path=str(tmp_path / "a.txt"), document=document)
    assert texts(settings) == expected
