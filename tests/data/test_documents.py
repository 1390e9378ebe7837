"""Books, articles and reviews give their text alone; what is held out; documents that are there several times."""

import gzip
import re
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pytest
from chats import FORMAT, TOKENIZER
from reading import prepared, texts, write_lines
from shards import VOCABULARY, assert_same_rows, packing, write_text
from shards import prepare as prepare_shards
from text import some_text, tokens_of
from tiny import PAD, all_of, changed, parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.data import Duplicates, NearConfig
from distill.config.settings import Config, EvaluateConfig, SourceConfig
from distill.data import build_tokens, duplicates
from distill.data.build_tokens import Host
from distill.data.document import Document
from distill.data.heldout import HeldOut, fraction, held_out
from distill.data.packing import tokens_of as packed_tokens_of
from distill.data.readers import InvalidFile
from distill.data.sources import bundled, find_source
from distill.data.sources.gutenberg import books, clean, decode
from distill.data.sources.imdb import review
from distill.data.sources.wikitext import articles
from distill.data.tokens import Text, corpus_text, heldout_text, prepare
from distill.evaluation.sets import load_sets
from distill.runtime.errors import SettingError

BODY = """CHAPTER I

It was a bright morning in the well-
known village, and nobody--
or so they _said_--had seen
the stranger come.

"End of the road," he said. "The _Nautilus_ sails at noon."
"""
BOOK = (
    "CHAPTER I\n\n"
    "It was a bright morning in the well-known village, and nobody--or so they said--had seen the stranger come.\n\n"
    '"End of the road," he said. "The Nautilus sails at noon."'
)
HEAD = "The Project Gutenberg EBook of A Tale, by A. Nonymous\n\nTitle: A Tale\nCharacter set encoding: UTF-8\n\n"
LICENCE = "\n\nUpdated editions will replace the previous one.\n\n*** START: FULL LICENSE ***\n\nSection 1. Terms.\n"
SMALL_PRINT = (
    "***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nWhy is this here? You know: lawyers.\n\n"
    "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n"
)
THIS, THE = (f"*** START OF {word} PROJECT GUTENBERG EBOOK A TALE ***" for word in ("THIS", "THE"))
CREDITS = (
    "\n\nProduced by Jane Doe and the Online Distributed\nProofreading Team at http://www.pgdp.net\n\n"
    "HTML version by John Roe."
)


def pg(start: str, end: str = "") -> str:
    return f"{HEAD}{start}\n\n{BODY}\n\n{end or start.replace('START', 'END')}{LICENCE}"


VARIANTS = {
    "pg": pg(THIS),
    "no blanks": pg(THE.replace("* ", "*").replace(" *", "*")),
    "two lines": pg(THIS.replace(" A TALE", "\nA TALE, OR THE STRANGER")),
    "indented": re.sub("^", "  ", pg(THIS, "End of Project Gutenberg's X"), flags=re.M),
    "credits": pg(THE + CREDITS, f"End of Project Gutenberg's A Tale, by A. Nonymous\n\n{THE.replace('START', 'END')}"),
    "end over two lines": pg(
        THE, "End of The Project Gutenberg Etext of A Tale, of\nThe Stranger\n\n*** END OF IT ***"
    ),
    "small print": "**Welcome To The World of Free Plain Vanilla Electronic Texts**\n\nIt is a joy to give.\n\n"
    f"{SMALL_PRINT}A Tale, prepared by hand for Project Gutenberg.\n\n{BODY}"
    "\n\nEnd of The Project Gutenburg Etext of A Tale\n",
    "small print, no end": f"Welcome!\n\n{SMALL_PRINT}{BODY}\n*Project Gutenberg Etext of A Tale, by A. Nonymous*\n",
    "footer only": f"{BODY}\nEnd of Project Gutenberg's A Tale\n\n*** END OF IT ***\n{SMALL_PRINT}",
    "small print at the end": f"{BODY}\n\n{SMALL_PRINT}",
    "none": BODY,
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r\r\n"])
def test_every_variant_gives_the_same_book(name: str, newline: str) -> None:
    assert clean(VARIANTS[name].replace("\n", newline)) == BOOK


def test_only_marks_and_rules_go() -> None:
    marks = "[Illustration]\n\n * * * * *\n\n[Illustration: A ship\nat sea]\n\n \t\n\n\n"
    assert clean(f"One.\n\n{marks}Two snake_case words.\n-----\nEnd.") == "One.\n\nTwo snake_case words. End."
    lines = ["The end of the project was near.", "At the END of it all, START again.", *"CDEF", "Produced by nobody."]
    assert clean("\n\n".join(lines)) == "\n\n".join(lines)


DECLARED = "Character set encoding: {}\n\n{}"


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        *[(encoding, "Émile") for encoding in ("utf-8", "utf-8-sig", "latin-1", "utf-16")],
        ("iso-8859-2", DECLARED.format("ISO-8859-2", "Łódź")),
        ("latin-1", DECLARED.format("ISO Latin-99", "Émile")),
        ("cp1252", "“quoted”"),
    ],
)
def test_encodings(encoding: str, text: str) -> None:
    assert decode(text.encode(encoding), "x.txt") == text


def test_plain_gzip_and_zip_hold_the_same_book(tmp_path: Path) -> None:
    data = VARIANTS["pg"].replace("\n", "\r\n").encode()
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(data))
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        for name, content in (("c/picture.png", b"\x89PNG\0"), ("__MACOSX/._a.txt", b"\0\5"), ("./c.txt", data)):
            archive.writestr(name, content)
        archive.writestr("d.txt", "*** END OF PROJECT GUTENBERG ***")
    assert texts(kind="gutenberg", path=str(tmp_path)) == [BOOK] * 3
    with zipfile.ZipFile(tmp_path / "c.zip", "a") as archive:
        archive.writestr("e.txt", b"\0\0")
    with pytest.raises(SettingError, match=r"^corpus\.path: c\.zip/e\.txt: not text"):
        texts(kind="gutenberg", path=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("cut.txt.gz", gzip.compress(bytes(range(256)) * 40, mtime=0)[:90], "EOFError"),
        ("false.txt.gz", b"no gzip at all", "BadGzipFile"),
        ("false.zip", b"no zip at all", "BadZipFile"),
        ("picture.txt", b"\x89PNG\0\0\0", "zero bytes"),
        ("chinese.txt", ("他说的话是在那里的人都不知道的事情" * 9).encode("gbk"), "corpus.encoding=NAME"),
        ("gone.txt", None, "FileNotFoundError"),
    ],
)
def test_what_is_no_book_is_named_with_its_reason(tmp_path: Path, name: str, data: bytes | None, reason: str) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidFile, match=reason) as caught:
        list(books(str(path)))
    assert caught.value.name == name and "\n" not in str(caught.value)


# --- the books that ship with the package

FILES = sorted(bundled.BOOKS.rglob("*.gz"))
NOT_THE_AUTHORS = re.compile(r"gutenberg|pgdp|\be-?text\b|\be-?book\b|transcriber|copyright", re.I)


def test_bundled_books_are_text_alone_few_small_and_on_record() -> None:
    record = (bundled.BOOKS / "README.md").read_text()
    assert [file.parent.name for file in FILES] == ["heldout"] * 2 + ["train"] * 3
    assert sum(file.stat().st_size for file in FILES) < 3_000_000, "what an installation carries"
    for file in FILES:
        assert f"`{file.relative_to(bundled.BOOKS)}`" in record
        ((_, text),) = books(str(file))
        assert len(str(text)) > 250_000 and clean(str(text)) == text and not NOT_THE_AUTHORS.search(str(text))


def test_without_books_of_ones_own_they_are_the_corpus(reviews: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    corpus, data = parts(changed(reviews, kind="gutenberg", path=None, fallback=True))
    text = corpus_text(corpus, data)
    unseen = heldout_text(text, data)
    assert text.describe().startswith("3 bundled books (austen_emma, dickens_")
    assert unseen is not None and unseen.describe().startswith("2 bundled books (collins_the_moonstone, hope_")
    assert heldout_text(corpus_text(*parts(reviews)), data) is None


def test_whole_bundled_books_are_held_out(
    reviews: Config, words: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, split in enumerate(("train", "train", "heldout")):
        (tmp_path / split).mkdir(exist_ok=True)
        (tmp_path / split / f"book{number}.txt").write_text(some_text(number, 400))
    monkeypatch.setattr(bundled, "BOOKS", tmp_path)
    evaluate = EvaluateConfig(sets=["heldout"], sources={"heldout": SourceConfig(kind="heldout")})
    config = changed(reviews, kind="bundled", path=None)
    whole = all_of(
        tokens_of(config.changed(corpus=config.corpus.changed(split="heldout", heldout=0.0)), words).sequences
    )
    for share in (0.1, 0.0):
        given = changed(config, heldout=share)
        (heldout,), _ = load_sets(given.changed(evaluate=evaluate), words)
        assert (heldout.description, heldout.documents) == ("1 bundled book (book2)", 1)
        assert all_of(heldout.sequences).tolist() == whole.tolist()
        assert tokens_of(given, words).name == "2 bundled books (book0, book1)"


# --- WikiText and reviews

SEA = " \n = Sea = \n \n The well @-@ known sea . \n \n = = Tides = = \n \n It rises . \n \n"
ARTICLE = f"{SEA} = Hill = \n \n It stands . \n"
CLEAN = ["Sea\n\nThe well-known sea .\n\nTides\n\nIt rises .", "Hill\n\nIt stands ."]


def test_wikitext() -> None:
    first = " \n = First @-@ one = \n \n It cost 1 @,@ 000 or 1 @.@ 5 , a low @-@ price . \n \n = = Part = = \n \n"
    text = f"{first} where x \n = 1 rad / s and y \n = 2 = \n holds . \n \n = Second = \n \n More . \n"
    cleaned = (
        "First-one\n\nIt cost 1,000 or 1.5 , a low-price .\n\nPart\n\nwhere x\n\n= 1 rad / s and y\n\n= 2 =\n\nholds ."
    )
    assert list(articles(text.splitlines(keepends=True))) == [cleaned, "Second\n\nMore ."]
    assert list(articles([])) == [""]


@pytest.mark.parametrize("form", ["hub", "parquet", "jsonl", "csv"])
def test_wikitext_is_cleaned_in_records(tmp_path: Path, form: str) -> None:
    """A line a row as on the Hub, or a whole article."""
    for number, rows in enumerate((ARTICLE.splitlines(keepends=True), [SEA[2:], ARTICLE[len(SEA) :]])):
        found = datasets.Dataset.from_dict({"text": rows})
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / ("train.parquet" if form == "hub" else f"a.{form}")
        {"jsonl": found.to_json, "csv": found.to_csv}.get(form, found.to_parquet)(path)
        assert texts(kind="wikitext", **({"hub": str(folder)} if form == "hub" else {"path": str(path)})) == CLEAN


def test_imdb_in_both_forms(tmp_path: Path) -> None:
    cleaned = "Good.\n\nIt\u2019s \u2013 well \u2026\n\nfine"
    assert review("Good.<br /><br />It\x92s \x96 well \x85<BR>fine\x81") == cleaned
    for name in ("train/pos/0_9", "train/neg/0_1", "train/unsup/0_0", "test/pos/0_8", "test/pos/._0_8"):
        (tmp_path / "aclImdb" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "aclImdb" / f"{name}.txt").write_text(f"{name}<br />.")
    (tmp_path / "aclImdb/train/urls_pos.txt").write_text("http://x")
    folder = SourceConfig(kind="imdb", path=f"{tmp_path}/aclImdb")
    assert sorted(texts(folder)) == ["train/neg/0_1\n\n.", "train/pos/0_9\n\n."]
    assert texts(folder.changed(split="test")) == ["test/pos/0_8\n\n."]
    write_lines(tmp_path / "json/train.jsonl.gz", [{"text": "A<br />B", "label": 1}])
    write_lines(tmp_path / "json/test.jsonl.gz", [{"text": "C", "label": 0}])
    assert texts(kind="imdb", path=f"{tmp_path}/json") == ["A\n\nB"]


def plain(texts: list[str]) -> list[Document]:
    return [Document(str(number), text) for number, text in enumerate(texts)]


def stretches(rule: HeldOut, texts: list[str]) -> list[tuple[bool, str]]:
    return [(held, part.text) for document in plain(texts) for held, part in rule.parts(document)]


def test_many_documents_are_held_out_whole() -> None:
    rows = [f"Document {i}. " * 900 for i in range(400)]
    found = stretches(held_out(0.1, plain(rows)), rows)
    assert [text for _, text in found] == rows and 20 < sum(held for held, _ in found) < 60
    assert not any(held for held, _ in stretches(held_out(0.0, plain(rows)), rows))


@pytest.mark.parametrize(("count", "paragraphs"), [(1, 300), (3, 300), (10, 40)])
def test_few_documents_are_held_out_by_block(count: int, paragraphs: int) -> None:
    rows = ["\n\n".join(f"Paragraph {i} of {j}. " * 9 for i in range(paragraphs)) for j in range(count)]
    found = stretches(held_out(0.02, plain(rows)), rows)
    assert "".join(text for _, text in found) == "".join(rows)
    assert 0 < sum(len(text) for held, text in found if held) < 0.2 * sum(map(len, rows))


def test_something_is_held_out_of_every_corpus_of_a_few_documents() -> None:
    """Of 58 articles none is below 0.02 in 31 of 100 cases."""
    for number in range(60):
        articles = [f"Article {n} of {number}." for n in range(58)]
        rule = held_out(0.02, plain(articles))
        held = [text for is_out, text in stretches(rule, articles) if is_out]
        by_chance = [text for text in articles if fraction(text, "heldout") < 0.02]
        assert held == (by_chance or held) and 1 <= len(held) < 8 and rule.by_block != bool(by_chance)


def test_copies_fall_on_one_side_whatever_blanks_are_at_their_ends() -> None:
    texts = [f"Text number {number}." for number in range(200)]
    rule = held_out(0.3, plain([*texts, *(f"{text}\n" for text in texts)]))
    sides = [held for held, _ in stretches(rule, [*texts, *(f"{text}\n" for text in texts)])]
    assert sides[:200] == sides[200:] and not rule.by_block and any(sides)
    few = sorted(texts[:40], key=lambda text: fraction(text, "heldout"))
    repeated = [few[0], few[0], *few]  # of which blocks are held out
    assert [held for held, _ in stretches(held_out(0.02, plain(repeated)), repeated)] == [True] * 3 + [False] * 39


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_what_is_held_out_is_that_of_each_source(
    reviews: Config, words: PreTrainedTokenizerFast, tmp_path: Path, part: str
) -> None:
    """A book beside sixty reviews is one document all the same, of which blocks are held out."""
    (tmp_path / "book.txt").write_text(some_text(5, 6000))
    settings = (SourceConfig(kind="text", path=str(tmp_path / "book.txt")), reviews.corpus)
    sources = [find_source(source, "corpus", reviews.data) for source in settings]
    config = changed(reviews, heldout=0.1)
    both, *alone = (
        all_of(prepare(Text(tuple(some), "corpus"), words, *parts(config), part).sequences)
        for some in (sources, sources[:1], sources[1:])
    )
    assert all(len(rows) for rows in alone)
    np.testing.assert_array_equal(both, np.concatenate(alone))


@pytest.mark.parametrize("count", [8, 200])
def test_a_document_with_a_prompt_is_held_out_whole(tmp_path: Path, count: int) -> None:
    """Of few documents too, of which others are held out by their paragraphs."""
    answer = "\n\n".join(["the cat. " * 100] * 20)
    rows = [{"prompt": f"cat {chr(97 + i % 26)} {i // 26 * 'an'}", "text": answer} for i in range(count)]
    path = write_lines(tmp_path / "x.jsonl", rows)
    given = {"heldout": 0.2, "sequence_length": 512, "workers": 1, "cache": str(tmp_path)}
    config = text_config(kind="jsonl", path=str(path), prompt="prompt", **given)
    counts = []
    for part in ("train", "heldout"):
        found = prepared(config, TOKENIZER, part)
        rows = all_of(found.sequences)
        has_prompt = ~rows["loss_mask"].all(1, where=rows["id"] != PAD)
        assert found.documents == (has_prompt & (rows["id"][:, 0] == FORMAT.document_start)).sum()
        counts.append(found.documents)
    assert sum(counts) == count and 0 < min(counts) < 0.35 * count


TEXTS = [some_text(seed, 60) for seed in range(55)]
pytestmark = pytest.mark.usefixtures("small_units")


def write(folder: Path, files: list[list[str]]) -> Path:
    for number, rows in enumerate(files):
        write_lines(folder / f"{number}.jsonl", [{"text": text} for text in rows])
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Three units of work with 55 different documents, of which 12 come again."""
    files = [TEXTS[:20] + TEXTS[:3], [f"{TEXTS[5]}\n", *TEXTS[20:40], TEXTS[5]], TEXTS[40:] + TEXTS[18:25]]
    given = {"sequence_length": 32, "heldout": 0.2, "workers": 1, "cache": str(tmp_path / "cache")}
    return text_config(kind="jsonl", path=str(write(tmp_path / "texts", files)), **given)


def test_ids_of_another_tokenizer_are_refused() -> None:
    for number in (-1, 1 << 16):
        with pytest.raises(SettingError, match=f"^mine has token ids from .* the tokenizer has {VOCABULARY} tokens"):
            packed_tokens_of(Document("mine", "", ids=np.array([5, number])), packing())


def test_what_drop_leaves_is_the_text_without_copies(
    config: Config, words: PreTrainedTokenizerFast, tmp_path: Path, lines: list[str]
) -> None:
    kept, dropping = tokens_of(config, words), changed(config, duplicates=Duplicates.drop)
    counted = tokens_of(changed(config, duplicates=Duplicates.count), words)  # although the text is prepared
    assert counted.duplicates == {"documents": 67, "exact": 12} and kept.duplicates is None
    assert counted.digest == kept.digest
    found = tokens_of(dropping, words)
    assert found.duplicates == {"documents": 67, "exact": 12, "dropped": 12} and found.digest != kept.digest
    assert any("12 of 67 documents have the text of an earlier one; left out" in line for line in lines)
    once = changed(config, path=str(write(tmp_path / "once", [TEXTS[:20], TEXTS[20:40], TEXTS[40:]])))
    for part in ("train", "heldout"):
        assert tokens_of(dropping, words, part).digest == tokens_of(once, words, part).digest
    whole = prepare(corpus_text(*parts(dropping)), words, *parts(dropping), "all")
    assert whole.documents == 67 and whole.duplicates is None, "evaluation sets keep their copies"


def test_processes_hosts_and_shards_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six files of 40 documents, each of which begins with the first ten of the one before."""
    text, rows = write_text(tmp_path / "text"), packing(duplicates=Duplicates.drop)
    lines = [path.read_text().splitlines() for path in sorted(text.iterdir())]
    for number in range(1, 6):
        (text / f"{number}.jsonl").write_text("\n".join(lines[number - 1][:10] + lines[number]))
    index = prepare_shards(text, tmp_path / "one", tmp_path / "scratch", rows)
    assert index.duplicates == {"documents": 290, "exact": 50, "dropped": 50}
    assert index.train.documents + index.heldout.documents == 240
    monkeypatch.setattr(build_tokens, "FEW_BYTES", 0)
    monkeypatch.setattr(build_tokens, "POLL", 0.05)
    with ThreadPoolExecutor() as pool:
        made = [
            pool.submit(
                prepare_shards, text, tmp_path / "many", tmp_path / f"{host}", rows, host=Host(host, 2), workers=2,
                shard_bytes=1,
            )
            for host in range(2)
        ]  # fmt: skip
        first, other = (each.result() for each in made)
    assert first == other and first.duplicates == index.duplicates and len(first.train.files) == 6
    assert_same_rows(tmp_path / "one", tmp_path / "many")


# --- near duplicates


def edited(text: str, every: int) -> str:
    """The text with every so many-th word another one."""
    return " ".join("zzz" if number % every == every - 1 else word for number, word in enumerate(text.split()))


def jaccard(first: str, second: str) -> float:
    one, other = (set(duplicates.shingles(text, NearConfig().shingle)) for text in (first, second))
    return len(one & other) / len(one | other)


def test_near_copies_leave_the_training_text_and_held_out_ones_stay(
    config: Config, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    pytest.importorskip("datasketch")
    long = [some_text(seed, 400) for seed in range(100, 160)]
    near = {number: edited(long[number], 150) for number in range(0, 60, 6)}
    far = {number: edited(long[number], 4) for number in range(1, 60, 6)}
    assert min(jaccard(long[number], text) for number, text in near.items()) > 0.9
    assert max(jaccard(long[number], text) for number, text in far.items()) < 0.4
    rows = [*long, *near.values(), *far.values(), long[7]]
    place = write(tmp_path / "near", [rows[:30], rows[30:65], rows[65:]])
    given = changed(config, path=str(place), duplicates=Duplicates.near, heldout=0.3)
    found = tokens_of(given, words)
    assert found.duplicates == {"documents": 81, "exact": 1, "near": 10, "dropped": 11}

    # Of each pair one stays, and that is the one which is held out where only one is.
    held = [next(iter(HeldOut(0.3).parts(Document("", text))))[0] for text in rows]
    pairs = {number: 60 + index for index, number in enumerate(near)}
    gone = {copy if held[number] or not held[copy] else number for number, copy in pairs.items()} | {80}
    assert any(held[copy] and not held[number] for number, copy in pairs.items())
    kept = write(tmp_path / "without", [[text for number, text in enumerate(rows) if number not in gone]])
    without = changed(given, path=str(kept), duplicates=Duplicates.keep)
    for part in ("train", "heldout"):
        one, other = (np.sort(all_of(tokens_of(each, words, part).sequences), axis=0) for each in (given, without))
        assert np.array_equal(one, other)


def test_near_that_cannot_be_searched_for_is_one_line(
    config: Config, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = changed(config, duplicates=Duplicates.near)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasketch", None)
        with pytest.raises(SettingError, match=r"corpus.duplicates=near: needs datasketch.*'distill-kd\[near\]'"):
            tokens_of(given, words)
    pytest.importorskip("datasketch")
    with pytest.raises(SettingError, match=r"^corpus\.near\.threshold=1\.0: too near to 1 for 128 numbers"):
        duplicates.make_lsh(NearConfig(threshold=1.0))
    monkeypatch.setattr(duplicates, "free_memory", lambda: 1 << 10)
    with pytest.raises(SettingError, match=r"67 documents may take .* GB of memory"):
        tokens_of(given, words)
