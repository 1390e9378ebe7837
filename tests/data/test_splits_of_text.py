"""Of a folder that holds several splits a source reads its own, and WikiText is cleaned in every form of file."""

import json
from pathlib import Path

import datasets
import pytest
from test_sources import located, texts

from distill.config.settings import SourceConfig
from distill.runtime.errors import SettingError

SEA = " \n = Sea = \n \n The well @-@ known sea . \n \n = = Tides = = \n \n It rises . \n \n"
ARTICLE = f"{SEA} = Hill = \n \n It stands . \n"
CLEAN = ["Sea\n\nThe well-known sea .\n\nTides\n\nIt rises .", "Hill\n\nIt stands ."]


@pytest.mark.parametrize("names", ["wiki.{}.raw", "wiki.{}.tokens", "{}.txt", "inner/{}.txt"])
def test_wikitext_of_a_folder_is_that_of_the_split(tmp_path: Path, names: str) -> None:
    for name in ("train", "valid", "test"):
        path = tmp_path / names.format(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"\n = {name.title()} = \n\n Words . \n")
    for split, name in (("train", "Train"), ("validation", "Valid"), ("test", "Test")):
        settings = SourceConfig(kind="wikitext", path=str(tmp_path), split=split)
        assert texts(settings) == [f"{name}\n\nWords ."]
    (tmp_path / names.format("test")).unlink()
    with pytest.raises(SettingError, match=r"^corpus\.path=.*: no file of kind wikitext and split test in this folder"):
        located(SourceConfig(kind="wikitext", path=str(tmp_path), split="test"))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_records_of_a_folder_are_those_of_the_split(tmp_path: Path, kind: str) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        rows = datasets.Dataset.from_dict({"text": [name]})
        {"jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}[kind](tmp_path / f"{name}.{kind}")
    assert len(texts(SourceConfig(kind=kind, path=str(tmp_path)))) == 2
    settings = SourceConfig(kind=kind, path=str(tmp_path), split="test")
    assert texts(settings) == ["test-00000-of-00001"]
    assert texts(settings.changed(path=str(tmp_path / f"train-00000-of-00002.{kind}"))) == ["train-00000-of-00002"]


def test_files_that_no_split_is_called_after_are_read_whatever_it_is(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    assert texts(SourceConfig(kind="jsonl", path=str(tmp_path), split="test")) == ["a", "b"]


@pytest.mark.parametrize(
    ("files", "split", "read"),
    [
        (("train", "extra", "test"), "train", ["extra", "train"]),
        (("train", "extra", "test"), "test", ["extra", "test"]),
        (("report", "dev_notes"), "train", ["report"]),
        (("train/part-0", "test/part-0"), "train", ["train/part-0"]),
        (("train/part-0", "test/part-0"), "validation", None),
        (("test",), "train", ["test"]),
        (("train",), "test", None),
    ],
)
def test_only_what_is_called_like_another_split_is_left_out(
    files: tuple[str, ...], split: str, read: list[str] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in files:
        (tmp_path / f"{name}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    settings = SourceConfig(kind="jsonl", path=str(tmp_path), split=split)
    if read is None:
        with pytest.raises(SettingError, match=rf"no file of kind jsonl and split {split} in this folder"):
            located(settings)
        return
    with caplog.at_level("INFO"):
        assert texts(settings) == read
    left_out = len(files) - len(read)
    assert ("are left out" in caplog.text) == bool(left_out)
    assert f"{left_out} files of other splits than {split} are left out" in caplog.text or not left_out


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.csv"])
def test_wikitext_is_cleaned_in_files_of_records(tmp_path: Path, name: str) -> None:
    """A line a row as on the Hub, or a whole article."""
    lines = datasets.Dataset.from_dict({"text": ARTICLE.splitlines(keepends=True)})
    pages = datasets.Dataset.from_dict({"text": [SEA[2:], ARTICLE[len(SEA) :]]})
    for number, rows in enumerate((lines, pages)):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        {".parquet": rows.to_parquet, ".jsonl": rows.to_json, ".csv": rows.to_csv}[path.suffix](path)
        assert texts(SourceConfig(kind="wikitext", path=str(path))) == CLEAN


def test_plain_text_is_that_of_the_split_beside_a_file_that_is_called_so(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert texts(SourceConfig(kind="text", path=str(tmp_path))) == ["train"]
    assert texts(SourceConfig(kind="text", path=str(tmp_path), split="test")) == ["test"]
    (tmp_path / "valid.txt").unlink()
    with pytest.raises(SettingError, match=r"no file of kind text and split validation in this folder"):
        located(SourceConfig(kind="text", path=str(tmp_path), split="validation"))
    (tmp_path / "books").mkdir()
    for name in ("test-pilot", "dev_diary"):
        (tmp_path / "books" / f"{name}.txt").write_text(name)
    assert texts(SourceConfig(kind="text", path=str(tmp_path / "books"))) == ["dev_diary", "test-pilot"]


def test_a_copy_stands_in_for_its_own_subset_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wikitext-2-raw").mkdir()
    (tmp_path / "wikitext-2-raw" / "train.txt").write_text(ARTICLE)
    monkeypatch.setenv("DISTILL_DATA", str(tmp_path))
    settings = SourceConfig(kind="wikitext", hub="Salesforce/wikitext", subset="wikitext-2-raw-v1")
    assert located(settings).settings.path is not None
    assert located(settings.changed(subset="wikitext-103-raw-v1")).settings.path is None


def test_reviews_of_a_folder_are_those_of_the_split_without_hidden_copies(tmp_path: Path) -> None:
    for name in ("train-00000", "test-00000", "._train-00000"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    settings = SourceConfig(kind="imdb", path=str(tmp_path))
    assert texts(settings) == ["train-00000"] and texts(settings.changed(split="test")) == ["test-00000"]
    (tmp_path / "pos").mkdir()
    for name in ("0_9", "._0_9"):
        (tmp_path / "pos" / f"{name}.txt").write_text(name)
    assert texts(settings) == ["0_9"]
