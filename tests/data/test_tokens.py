"""Sequences are what a naive packer makes, whatever divides, interrupts or repeats the work."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from text import some_text, tokens_of
from tiny import all_of, changed, parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config, SourceConfig
from distill.data import build_tokens
from distill.data.document import Document
from distill.data.heldout import fraction, held_out
from distill.data.sources import _files, find_source
from distill.data.tokens import Text, Tokens, prepare, set_text
from distill.runtime.errors import SettingError


@pytest.fixture
def tokenizer(words: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return words


def documents_of(config: Config) -> list[str]:
    folder = Path(str(config.corpus.path))
    return [json.loads(line)["text"] for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]


def naive(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int, cross: bool = False) -> list[list[int]]:
    streams = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    if cross:
        joined: list[int] = []
        for stream in streams:
            joined += stream
            if len(joined) % (length - 2):  # inside a sequence: mark the document's end
                joined.append(tokenizer.sep_token_id)
        streams = [joined[:-1] if joined[-1] == tokenizer.sep_token_id else joined]
    rows = []
    for stream in streams:
        for i in range(0, len(stream), length - 2):
            body = stream[i : i + length - 2]
            if len(body) == length - 2 or len(body) >= 8:
                row = [tokenizer.cls_token_id, *body, tokenizer.sep_token_id]
                rows.append(row + [tokenizer.pad_token_id] * (length - len(row)))
    return rows


def tokens_of_set(config: Config, tokenizer: PreTrainedTokenizerFast, source: SourceConfig) -> Tokens:
    text = set_text(source, "evaluate.sources.mine", config.data)
    assert text is not None
    return prepare(text, tokenizer, *parts(config), "all")


# --- what the sequences are


@pytest.mark.parametrize("length", [10, 32, 128])
def test_rows_are_those_of_a_naive_packer(reviews: Config, tokenizer: PreTrainedTokenizerFast, length: int) -> None:
    config = changed(reviews, sequence_length=length)
    held = [fraction(text, "heldout") < config.corpus.heldout for text in documents_of(config)]
    for part, wanted in (("train", False), ("heldout", True)):
        texts = [text for text, is_held in zip(documents_of(config), held, strict=True) if is_held is wanted]
        found = tokens_of(config, tokenizer, part)
        rows = np.array(naive(texts, tokenizer, length))
        assert found.sequences.dtype == np.uint16
        np.testing.assert_array_equal(all_of(found.sequences), rows)
        np.testing.assert_array_equal(found.counts, np.bincount(rows.ravel(), minlength=len(tokenizer)))
        assert found.tokens == (rows != tokenizer.pad_token_id).sum()
        assert found.documents == len(texts) and found.left_out == {} and found.tokens_per_second > 0


def test_all_takes_a_source_with_the_settings_of_the_corpus(
    reviews: Config, tokenizer: PreTrainedTokenizerFast
) -> None:
    found = tokens_of_set(reviews, tokenizer, SourceConfig(kind="jsonl", path=reviews.corpus.path))
    np.testing.assert_array_equal(all_of(found.sequences), naive(documents_of(reviews), tokenizer, 32))
    assert found.name == f"2 JSONL files in {reviews.corpus.path}" and found.documents == 60


def test_rows_cross_documents_only_when_asked(reviews: Config, tokenizer: PreTrainedTokenizerFast) -> None:
    config = changed(reviews, cross_documents=True, heldout=0.0)
    rows = naive(documents_of(config), tokenizer, 32, cross=True)
    np.testing.assert_array_equal(all_of(tokens_of(config, tokenizer).sequences), rows)


def test_long_documents_lose_nothing_between_blocks(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    text = some_text(1, 20_000)
    (tmp_path / "long.txt").write_text(text)
    config = text_config(kind="text", path=str(tmp_path / "long.txt"), cache=str(tmp_path), heldout=0.0, workers=1)
    np.testing.assert_array_equal(all_of(tokens_of(config, tokenizer).sequences), naive([text], tokenizer, 128))


# --- one corpus, one digest


def test_the_digest_follows_content_alone(
    reviews: Config, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tokens_of(reviews, tokenizer)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in Path(str(reviews.corpus.path)).iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
        os.utime(elsewhere / file.name, (1, 1))
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(_files, "RANGE_BYTES", 5000)
    monkeypatch.setattr(build_tokens, "FEW_BYTES", 0)
    again = tokens_of(changed(reviews, path=str(elsewhere), workers=2), tokenizer)
    assert again.digest == before.digest
    content = hashlib.sha256(all_of(again.sequences).tobytes()).hexdigest()
    assert again.digest == hashlib.sha256(b"uint16 32\n" + content.encode()).hexdigest()
    assert tokens_of(reviews, tokenizer, "heldout").digest != before.digest
    with (elsewhere / "b.jsonl").open("a") as file_:
        file_.write("\n" + json.dumps({"text": some_text(99, 200)}))
    assert tokens_of(changed(reviews, path=str(elsewhere), workers=1, heldout=0.0), tokenizer).digest != before.digest


@pytest.mark.parametrize("kind", ["folder", "file", "glob"])
def test_a_copy_of_the_text_is_not_prepared_again(
    reviews: Config, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, lines: list[str], kind: str
) -> None:
    """Nor is one that is mounted elsewhere, or was written at another time."""
    place, copied = Path(str(reviews.corpus.path)), tmp_path / "a" / "copy"
    shutil.copytree(place, copied, copy_function=shutil.copyfile)
    name = {"folder": "", "file": "a.jsonl", "glob": "*.jsonl"}[kind]
    first = tokens_of(changed(reviews, path=str(place / name)), tokenizer)
    count = len(lines)
    again = tokens_of(changed(reviews, path=str(copied / name)), tokenizer)
    assert again.sequences.folder == first.sequences.folder and len(lines) == count


@pytest.mark.parametrize("change", ["content", "content and time", "name"])
def test_another_text_of_the_same_size_is_prepared(
    reviews: Config, tokenizer: PreTrainedTokenizerFast, change: str
) -> None:
    file = Path(str(reviews.corpus.path)) / "a.jsonl"
    before, times = tokens_of(reviews, tokenizer), file.stat()
    if change == "name":  # after that of b.jsonl
        file.rename(file.with_name("c.jsonl"))
    else:
        text = file.read_text()
        file.write_text(text[:-40] + text[-40:].replace("a", "e"))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + (change == "content")))
    after = tokens_of(reviews, tokenizer)
    assert after.digest != before.digest and after.sequences.folder != before.sequences.folder


def test_the_second_time_comes_from_the_cache(
    reviews: Config, tokenizer: PreTrainedTokenizerFast, lines: list[str]
) -> None:
    first = tokens_of(reviews, tokenizer)
    assert len(lines) == 3 and "preparing tokens" in lines[0] and "tokens a second" in lines[1]
    assert "left out 68 tokens (0.6%): documents, and ends of documents, of fewer than 8 tokens" in lines[2]
    tokenizer(["some text", "more"], padding=True, truncation=True, max_length=4)  # leaves its marks in the tokenizer
    second = tokens_of(changed(reviews, workers=2), tokenizer)
    assert len(lines) == 3 and second.digest == first.digest and second.seconds == first.seconds
    tokens_of(changed(reviews, sequence_length=16), tokenizer)
    assert len(lines) == 6


# --- what cannot be had


def test_no_rows_no_run(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.txt").write_text("Ban dan.")
    config = text_config(kind="text", path=f"{tmp_path}/a.txt", cache=str(tmp_path), workers=1)
    with pytest.raises(SettingError, match=r"^corpus\.path=.*a\.txt: not one sequence: 1 document"):
        tokens_of(config, tokenizer)
    source = SourceConfig(kind="text", path=f"{tmp_path}/a.txt")
    with pytest.raises(SettingError, match=r"^evaluate\.sources\.mine\.path=.*a\.txt: not one sequence"):
        tokens_of_set(config, tokenizer, source)
    (tmp_path / "a.txt").write_text("Ban dan fan gan kan lan. " * 9)
    assert len(tokens_of(config, tokenizer).sequences) == 1
    with pytest.raises(SettingError, match=r"^corpus\.heldout=0\.02: corpus is too small"):
        tokens_of(config, tokenizer, "heldout")
    with pytest.raises(SettingError, match=r"^corpus\.heldout=0\.0: "):
        tokens_of(changed(config, heldout=0.0), tokenizer, "heldout")


def test_something_is_held_out_of_every_corpus_of_a_few_documents() -> None:
    """Of 58 articles none is below 0.02 in 31 of 100 cases."""
    for number in range(60):
        articles = [Document(f"a{number}", f"Article {n} of {number}.") for n in range(58)]
        rule = held_out(0.02, articles)
        held = [article for article in articles for is_out, _ in rule.parts(article) if is_out]
        by_chance = [article for article in articles if fraction(article.text, "heldout") < 0.02]
        assert held == (by_chance or held) and 1 <= len(held) < 8 and rule.by_block != bool(by_chance)


def test_a_single_book_still_has_something_held_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.txt").write_text(some_text(5, 30_000))
    config = text_config(kind="text", path=f"{tmp_path}/a.txt", cache=str(tmp_path), workers=1)
    train, held = tokens_of(config, tokenizer), tokens_of(config, tokenizer, "heldout")
    assert 0 < held.tokens < 0.1 * train.tokens
    assert not set(map(bytes, all_of(train.sequences))) & set(map(bytes, all_of(held.sequences)))


def test_settings_that_cannot_work_are_refused(
    reviews: Config, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    with pytest.raises(SettingError, match=r"^corpus\.path=null: no gutenberg text .* DISTILL_DATA"):
        tokens_of(text_config(kind="gutenberg", cache=str(tmp_path)), tokenizer)
    with pytest.raises(SettingError, match=r"^corpus\.sequence_length=9"):
        tokens_of(changed(reviews, sequence_length=9), tokenizer)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"^data\.cache=.*file"):
        tokens_of(changed(reviews, cache=f"{tmp_path}/file"), tokenizer)
    with pytest.raises(SettingError, match=r"^teacher\.path=.*no \[SEP\]"):
        tokens_of(reviews, PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, cls_token="[CLS]"))


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_what_is_held_out_is_that_of_each_source(
    reviews: Config, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, part: str
) -> None:
    """A book beside sixty reviews is one document all the same, of which blocks are held out."""
    book = tmp_path / "book.txt"
    book.write_text(some_text(5, 6000))
    settings = (SourceConfig(kind="text", path=str(book)), reviews.corpus)
    sources = [find_source(source, "corpus", reviews.data) for source in settings]
    config = changed(reviews, heldout=0.1)
    both, *alone = (
        all_of(prepare(Text(tuple(some), "corpus"), tokenizer, *parts(config), part).sequences)
        for some in (sources, sources[:1], sources[1:])
    )
    assert all(len(rows) for rows in alone)
    np.testing.assert_array_equal(both, np.concatenate(alone))
