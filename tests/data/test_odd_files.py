"""Files as programs leave them: copies in hidden folders, archives of macOS, lines and fields of a megabyte."""

import zipfile
from pathlib import Path
from typing import Any

import pytest

from distill.config.settings import DataConfig, SourceConfig
from distill.data.document import Document
from distill.data.heldout import fraction, held_out
from distill.data.sources import _files, find_source, read
from distill.data.tables.glue import Glue
from distill.data.tables.table import Table
from distill.runtime.errors import SettingError

MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\tOne.\tTwo.\n"


def read_all(path: Path, **settings: Any) -> list[str]:
    source = find_source(SourceConfig(path=str(path), **settings), "corpus", DataConfig())
    assert source is not None
    return [document.text for shard in source.shards() for document in read(source, shard)]


@pytest.mark.parametrize("after", ["", "\nTwo.\nThree."])
def test_a_line_longer_than_a_range_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(_files, "RANGE_BYTES", 2 << 20)
    text = "é word " * 700_000 + after
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert "".join("".join(read_all(tmp_path, kind="text")).split()) == "".join(text.split())


def test_hidden_copies_are_no_text_and_no_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tmp_path / ".ipynb_checkpoints"
    hidden.mkdir()
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", "._a.txt"):
        (tmp_path / name).write_text("A text.")
    assert read_all(tmp_path, kind="text") == ["A text."]
    for name in ("train.csv", ".ipynb_checkpoints/train-checkpoint.csv"):
        (tmp_path / name).write_text("text,label\nA text.,good\nOther.,bad\n")
    assert Table(path=str(tmp_path)).read("data", True).first == [
        "A text.",
        "Other.",
    ]
    assert read_all(hidden, kind="text") == ["A text."]  # where the user names it
    monkeypatch.chdir(tmp_path)
    (tmp_path / "1.txt").write_text("One.")
    assert read_all(Path("."), kind="text") == ["One.", "A text."]


def test_what_describes_a_split_is_no_part_of_it(tmp_path: Path) -> None:
    for name in ("dev.tsv", "dev-1.tsv"):
        (tmp_path / name).write_text(MRPC)
    (tmp_path / "dev_ids.tsv").write_text("1\t2\n")
    examples = Glue(task="mrpc", path=str(tmp_path), split="validation").read("glue.dev", False)
    assert examples.first == ["One."] * 2


def test_books_of_an_archive_are_read_and_a_bad_one_is_named(tmp_path: Path) -> None:
    names = {
        "__MACOSX/._a.txt": b"\0\5",
        "./a.txt": b"One.",
        "b.txt": b"*** END OF PROJECT GUTENBERG ***",
        "c.txt": b"Two.",
    }
    for bad in ({}, {"d.txt": b"\0\0"}):
        with zipfile.ZipFile(tmp_path / "books.zip", "w") as archive:
            for name, data in (names | bad).items():
                archive.writestr(name, data)
        if bad:
            with pytest.raises(SettingError, match=r"^corpus\.path: books\.zip/d\.txt: not text"):
                read_all(tmp_path, kind="gutenberg")
        else:
            assert read_all(tmp_path, kind="gutenberg") == ["One.", "Two."]


def test_copies_with_other_blanks_at_their_ends_fall_on_one_side() -> None:
    texts = [f"Text number {number}." for number in range(200)]
    documents = [Document(str(number), text) for number, text in enumerate([*texts, *(f"{text}\n" for text in texts)])]
    rule = held_out(0.3, documents)
    sides = [held for document in documents for held, _ in rule.parts(document)]
    assert sides[:200] == sides[200:] and not rule.by_block and any(sides)


def test_repeated_text_leaves_something_to_hold_out() -> None:
    texts = sorted((f"Text number {number}." for number in range(40)), key=lambda text: fraction(text, "heldout"))
    documents = [Document(str(number), text) for number, text in enumerate([texts[0], texts[0], *texts])]
    rule = held_out(0.02, documents)
    assert [held for document in documents for held, _ in rule.parts(document)] == [True] * 3 + [False] * 39
