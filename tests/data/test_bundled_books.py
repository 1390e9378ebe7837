"""The books that ship with the package: text alone, small, on record, and the held-out ones apart from the others."""

import re
from pathlib import Path

import pytest
from text import some_text, tokens_of
from tiny import all_of, changed, parts
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config, DataConfig, EvaluateConfig, SourceConfig
from distill.data.sources import bundled, find_source
from distill.data.sources.gutenberg import books, clean
from distill.data.tokens import corpus_text, heldout_text
from distill.evaluation.sets import load_sets
from distill.runtime.errors import SettingError

FILES = sorted(bundled.BOOKS.rglob("*.gz"))
LARGEST = 3_000_000  # bytes of all of them: what an installation carries
NOT_THE_AUTHORS = re.compile(r"gutenberg|pgdp|\be-?text\b|\be-?book\b|transcriber|copyright", re.I)
HELDOUT = {"heldout": SourceConfig(kind="heldout")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_but_the_text_of_the_book_is_there(file: Path) -> None:
    ((_, text),) = books(str(file))
    assert len(text) > 250_000 and clean(text) == text
    assert not NOT_THE_AUTHORS.search(text)


def test_they_are_few_small_and_on_record() -> None:
    record = (bundled.BOOKS / "README.md").read_text()
    assert [file.parent.name for file in FILES] == ["heldout"] * 2 + ["train"] * 3
    assert sum(file.stat().st_size for file in FILES) < LARGEST
    for file in FILES:
        assert f"`{file.relative_to(bundled.BOOKS)}`" in record


def test_without_books_of_ones_own_they_are_the_corpus(reviews: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    corpus, data = parts(changed(reviews, kind="gutenberg", path=None, fallback=True))
    text = corpus_text(corpus, data)
    unseen = heldout_text(text, data)
    assert text.describe().startswith("3 bundled books (austen_emma, dickens_")
    assert unseen is not None and unseen.describe().startswith("2 bundled books (collins_the_moonstone, hope_")
    assert heldout_text(corpus_text(*parts(reviews)), data) is None


def test_whole_books_are_held_out(
    reviews: Config, words: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, split in enumerate(("train", "train", "heldout")):
        (tmp_path / split).mkdir(exist_ok=True)
        (tmp_path / split / f"book{number}.txt").write_text(some_text(number, 400))
    monkeypatch.setattr(bundled, "BOOKS", tmp_path)
    config = changed(reviews, kind="bundled", path=None, heldout=0.1)
    (heldout,), _ = load_sets(config.changed(evaluate=EvaluateConfig(sets=["heldout"], sources=HELDOUT)), words)
    whole = tokens_of(config.changed(corpus=config.corpus.changed(split="heldout", heldout=0.0)), words)
    assert (heldout.description, heldout.documents) == ("1 bundled book (book2)", 1)
    assert all_of(heldout.sequences).tolist() == all_of(whole.sequences).tolist()
    assert tokens_of(config, words).name == "2 bundled books (book0, book1)"
    config = changed(config, heldout=0.0)
    (same,), _ = load_sets(config.changed(evaluate=EvaluateConfig(sets=["heldout"], sources=HELDOUT)), words)
    assert all_of(same.sequences).tolist() == all_of(whole.sequences).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"path": "x"}, r"^corpus\.path=x is not read with corpus\.kind=bundled: choose corpus\.kind=gutenberg"),
        ({"hub": "x"}, r"^corpus\.hub=x is not read with"),
        ({"split": "test"}, r"^corpus\.split=test: the bundled books are those of train and heldout"),
    ],
)
def test_a_place_of_ones_own_is_refused(settings: dict[str, str], expected: str) -> None:
    with pytest.raises(SettingError, match=expected):
        find_source(SourceConfig(kind="bundled", **settings), "corpus", DataConfig())
