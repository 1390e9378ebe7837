"""Files as programs leave them: copies in hidden folders, archives of macOS, lines and fields of a megabyte."""

import zipfile
from pathlib import Path

import pytest

from distill.config.settings import DataConfig, SourceConfig
from distill.data.document import Document
from distill.data.heldout import fraction, held_out
from distill.data.sources import InvalidFile, InvalidRecord, _files, find_source, read
from distill.data.tables.glue import Glue
from distill.data.tables.table import Table

MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\tOne.\tTwo.\n"


def read_all(path: Path, **settings: object) -> tuple[list[str], list[str]]:
    """Texts, and what could not be read."""
    source = find_source(SourceConfig(path=str(path), **settings), "corpus", DataConfig())  # type: ignore[arg-type]
    assert source is not None
    errors: list[InvalidFile | InvalidRecord] = []
    texts = [document.text for shard in source.shards() for document in read(source, shard, errors.append)]
    return texts, [str(error) for error in errors]


@pytest.mark.parametrize("after", ["", "\nTwo.\nThree."])
def test_a_line_longer_than_a_range_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(_files, "RANGE_BYTES", 2 << 20)
    text = "é word " * 700_000 + after
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    texts, errors = read_all(tmp_path, kind="text")
    assert "".join("".join(texts).split()) == "".join(text.split()) and not errors


def test_hidden_copies_are_no_text_and_no_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tmp_path / ".ipynb_checkpoints"
    hidden.mkdir()
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", "._a.txt"):
        (tmp_path / name).write_text("A text.")
    assert read_all(tmp_path, kind="text")[0] == ["A text."]
    for name in ("train.csv", ".ipynb_checkpoints/train-checkpoint.csv"):
        (tmp_path / name).write_text("text,label\nA text.,good\nOther.,bad\n")
    assert Table(path=str(tmp_path)).read("data", True).first == [
        "A text.",
        "Other.",
    ]
    assert read_all(hidden, kind="text")[0] == ["A text."]  # where the user names it
    monkeypatch.chdir(tmp_path)
    (tmp_path / "1.txt").write_text("One.")
    assert read_all(Path("."), kind="text")[0] == ["One.", "A text."]


def test_what_describes_a_split_is_no_part_of_it(tmp_path: Path) -> None:
    for name in ("dev.tsv", "dev-1.tsv"):
        (tmp_path / name).write_text(MRPC)
    (tmp_path / "dev_ids.tsv").write_text("1\t2\n")
    examples = Glue(task="mrpc", path=str(tmp_path), split="validation").read("glue.dev", False)
    assert examples.first == ["One."] * 2


def test_one_bad_book_of_an_archive_leaves_the_others(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "books.zip", "w") as archive:
        for name, data in {"__MACOSX/._a.txt": b"\0\5", "./a.txt": b"One.", "b.txt": b"\0\0", "c.txt": b"Two."}.items():
            archive.writestr(name, data)
    texts, errors = read_all(tmp_path, kind="gutenberg")
    assert texts == ["One.", "Two."] and len(errors) == 1 and errors[0].startswith("books.zip/b.txt: not text")


def test_a_field_of_many_lines_may_be_long(tmp_path: Path) -> None:
    novel = "A line of the novel, and another half.\n" * 40_000
    (tmp_path / "a.csv").write_text(f'title,text\nOne,"{novel}"\nTwo,Short.\n')
    texts, errors = read_all(tmp_path, kind="csv")
    assert [text.strip() for text in texts] == [novel.strip(), "Short."] and not errors


def test_a_header_in_another_encoding_names_the_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("texte,catégorie\nBonjour à tous,3\n".encode("cp1252"))
    texts, errors = read_all(tmp_path, kind="csv", field="texte")
    assert not texts and "its header is damaged: not UTF-8" in errors[0]
    assert read_all(tmp_path, kind="csv", field="texte", encoding="cp1252") == (["Bonjour à tous"], [])


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_utf_8_with_a_mark(tmp_path: Path, mark: str) -> None:
    (tmp_path / "a.txt").write_text(f"{mark}Été.\nDeux.", encoding="utf-8")
    assert read_all(tmp_path, kind="text", encoding="utf-8-sig") == (["Été.\nDeux."], [])


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
