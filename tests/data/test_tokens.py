"""Rows are what a naive packer makes, whatever divides, interrupts or repeats the work."""

import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from distill.config import Corpus, Kind, Missing, Source
from distill.data import corpus as corpus_module
from distill.data import tokens
from distill.data.corpus import HeldOut, fraction
from distill.data.disk_cache import workers
from distill.data.packing import Packing
from distill.data.sources import prose
from distill.data.tokens import Tokens, prepare, train_wordpiece
from distill.errors import SettingError

WORDS = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in ("", "n", "rt", "st")]
ROOT = Path(__file__).resolve().parent.parent.parent


def some_text(seed: int, num_words: int) -> str:
    draw = random.Random(seed)
    sentences = []
    while num_words > 0:
        length = min(num_words, draw.randint(5, 15))
        sentences.append(" ".join(draw.choices(WORDS, k=length)).capitalize() + ".")
        num_words -= length
    return "\n\n".join(" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.txt").write_text(some_text(0, 4000))
    return train_wordpiece(Corpus(kind=Kind.text, path=str(folder)), 300, str(folder / "cache"), log=lambda _: None)


@pytest.fixture
def reviews(tmp_path: Path) -> Corpus:
    """60 documents of 1 to 400 words in two JSONL files; rows of 32; work in this process."""
    folder = tmp_path / "reviews"
    folder.mkdir()
    for name, seeds in (("a", range(40)), ("b", range(40, 60))):
        lines = [json.dumps({"text": some_text(seed, 1 + seed * seed % 400)}) for seed in seeds]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return Corpus(
        kind=Kind.jsonl, path=str(folder), sequence_length=32, cache=str(tmp_path / "cache"), workers=1, heldout=0.2
    )


def documents_of(corpus: Corpus) -> list[str]:
    assert corpus.path is not None
    return [
        json.loads(line)["text"]
        for file in sorted(Path(corpus.path).iterdir())
        for line in file.read_text().splitlines()
    ]


def naive(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int, cross: bool = False) -> list[list[int]]:
    streams = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    if cross:
        joined: list[int] = []
        for stream in streams:
            joined += stream
            if len(joined) % (length - 2):  # inside a row: mark the document's end
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


def quiet(*args: object, **kwargs: object) -> Tokens:
    return prepare(*args, **{"log": lambda _: None, **kwargs})  # type: ignore[arg-type]


# --- what the rows are


@pytest.mark.parametrize("length", [10, 32, 128])
def test_rows_are_those_of_a_naive_packer(reviews: Corpus, tokenizer: PreTrainedTokenizerFast, length: int) -> None:
    corpus = replace(reviews, sequence_length=length)
    held = [fraction(text, "heldout") < corpus.heldout for text in documents_of(corpus)]
    for part, wanted in (("train", False), ("heldout", True)):
        texts = [text for text, is_held in zip(documents_of(corpus), held, strict=True) if is_held is wanted]
        found = quiet(corpus, tokenizer, part)
        rows = np.array(naive(texts, tokenizer, length))
        assert found.rows.dtype == np.uint16 and isinstance(found.rows, np.memmap)
        np.testing.assert_array_equal(found.rows, rows)
        np.testing.assert_array_equal(found.counts, np.bincount(rows.ravel(), minlength=len(tokenizer)))
        assert found.tokens == (rows != tokenizer.pad_token_id).sum()
        assert found.documents == len(texts) and found.skipped == () and found.tokens_per_second > 0


def test_all_takes_a_source_with_the_settings_of_the_corpus(
    reviews: Corpus, tokenizer: PreTrainedTokenizerFast
) -> None:
    source = Source(kind=Kind.jsonl, path=reviews.path)
    found = quiet(reviews, tokenizer, "all", source)
    np.testing.assert_array_equal(found.rows, naive(documents_of(reviews), tokenizer, 32))
    assert found.name == f"2 JSONL files in {reviews.path}" and found.documents == 60


def test_rows_cross_documents_only_when_asked(reviews: Corpus, tokenizer: PreTrainedTokenizerFast) -> None:
    corpus = replace(reviews, cross_documents=True, heldout=0.0)
    rows = naive(documents_of(corpus), tokenizer, 32, cross=True)
    np.testing.assert_array_equal(quiet(corpus, tokenizer).rows, rows)


def test_long_documents_lose_nothing_between_blocks(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    text = some_text(1, 20_000)
    (tmp_path / "long.txt").write_text(text)
    corpus = Corpus(kind=Kind.text, path=str(tmp_path / "long.txt"), cache=str(tmp_path), heldout=0.0, workers=1)
    np.testing.assert_array_equal(quiet(corpus, tokenizer).rows, naive([text], tokenizer, 128))


def test_the_name_of_a_special_token_is_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.txt").write_text("Ban [MASK] dan [SEP] fan [CLS] gan [PAD] kan. " * 20)
    corpus = Corpus(
        kind=Kind.text, path=f"{tmp_path}/a.txt", cache=str(tmp_path), heldout=0.0, sequence_length=16, workers=1
    )
    body = quiet(corpus, tokenizer).rows[:-1, 1:-1]
    assert not np.isin(body, [0, 2, 3, 4]).any()


def test_large_vocabularies_get_four_bytes() -> None:
    packing = Packing("", 1 << 16, 0, 1, 2, 8, False, HeldOut(0.0))
    assert packing.dtype == np.uint16 and replace(packing, vocabulary=(1 << 16) + 1).dtype == np.uint32


# --- one corpus, one digest


def test_the_digest_follows_content_alone(
    reviews: Corpus, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = quiet(reviews, tokenizer)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in Path(str(reviews.path)).iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
        os.utime(elsewhere / file.name, (1, 1))
    monkeypatch.setattr(corpus_module, "SHARD_BYTES", 1)
    monkeypatch.setattr(corpus_module, "RANGE_BYTES", 5000)
    monkeypatch.setattr(tokens, "FEW_BYTES", 0)
    again = quiet(replace(reviews, path=str(elsewhere), workers=2), tokenizer)
    assert again.digest == before.digest and again.rows.filename != before.rows.filename
    assert again.digest == hashlib.sha256(b"uint16 32\n" + np.asarray(again.rows).tobytes()).hexdigest()
    assert quiet(reviews, tokenizer, "heldout").digest != before.digest
    with (elsewhere / "b.jsonl").open("a") as file_:
        file_.write("\n" + json.dumps({"text": some_text(99, 200)}))
    assert quiet(replace(reviews, path=str(elsewhere), workers=1, heldout=0.0), tokenizer).digest != before.digest


def test_the_second_time_comes_from_the_cache(reviews: Corpus, tokenizer: PreTrainedTokenizerFast) -> None:
    lines: list[str] = []
    first = prepare(reviews, tokenizer, log=lines.append)
    assert len(lines) == 2 and "preparing tokens" in lines[0] and "tokens a second" in lines[1]
    tokenizer(["some text", "more"], padding=True, truncation=True, max_length=4)  # leaves its marks in the tokenizer
    second = prepare(replace(reviews, workers=2), tokenizer, log=lines.append)
    assert len(lines) == 2 and second.digest == first.digest and second.seconds == first.seconds
    prepare(replace(reviews, sequence_length=16), tokenizer, log=lines.append)
    assert len(lines) == 4


def test_progress_is_told(reviews: Corpus, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "SHARD_BYTES", 1)
    steps: list[tuple[int, int, int]] = []
    found = quiet(replace(reviews, heldout=0.0), tokenizer, progress=lambda *step: steps.append(step))
    assert len(steps) == 2 and steps[-1][0] == steps[-1][1] and steps[-1][2] == found.tokens


# --- others at work, and death


CHILD = """
import sys, time
from distill.data import corpus as corpus_module
from distill.data import tokens
from distill.config import Corpus, Kind
from transformers import PreTrainedTokenizerFast
from distill.data.wordpiece import SPECIAL

if __name__ == "__main__":
    path, cache, tokenizer = sys.argv[1:]
    corpus_module.SHARD_BYTES = 1
    pack = tokens.pack
    tokens.pack = lambda *args: (time.sleep(0.2), pack(*args))[1]  # real books take longer than these
    corpus = Corpus(kind=Kind.text, path=path, cache=cache, workers=1, heldout=0.1, sequence_length=32)
    found = tokens.prepare(corpus, PreTrainedTokenizerFast(tokenizer_file=tokenizer, **SPECIAL))
    print(found.digest)
"""


@pytest.fixture
def child(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> tuple[Corpus, list[str], dict[str, str]]:
    """A corpus of eight shards, and the command and environment of a process that prepares it slowly."""
    monkeypatch.setattr(corpus_module, "SHARD_BYTES", 1)
    folder = tmp_path / "books"
    folder.mkdir()
    for seed in range(8):
        (folder / f"{seed}.txt").write_text(some_text(seed, 4000))
    (tmp_path / "child.py").write_text(CHILD)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    arguments = [str(folder), str(tmp_path / "cache"), str(tmp_path / "tokenizer.json")]
    corpus = Corpus(
        kind=Kind.text, path=str(folder), cache=str(tmp_path / "cache"), workers=1, heldout=0.1, sequence_length=32
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return corpus, [sys.executable, str(tmp_path / "child.py"), *arguments], environment


def test_a_killed_build_goes_on_and_gives_the_same(
    child: tuple[Corpus, list[str], dict[str, str]], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    corpus, command, environment = child
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "cache").glob("tokens/*.build/*.json"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines: list[str] = []
    found = prepare(corpus, tokenizer, log=lines.append)
    assert any("cut short" in line for line in lines)
    assert found.digest == quiet(replace(corpus, cache=str(tmp_path / "fresh")), tokenizer).digest
    assert not list((tmp_path / "cache").glob("tokens/*.build")) and not list(
        (tmp_path / "cache").glob("tokens/*/*.tmp")
    )


def test_two_at_once_make_it_once(child: tuple[Corpus, list[str], dict[str, str]]) -> None:
    _, command, environment = child
    pair = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    (a, b) = (process.communicate(timeout=120)[0].splitlines() for process in pair)
    assert a[-1] == b[-1] and [process.returncode for process in pair] == [0, 0]
    assert sum("preparing tokens" in line for line in a + b) == 1


def test_the_second_process_waits_and_says_so(reviews: Corpus, tokenizer: PreTrainedTokenizerFast) -> None:
    found = quiet(reviews, tokenizer)
    folder = Path(str(found.rows.filename)).parent
    kept = folder.rename(folder.with_name("kept"))
    lines: list[str] = []
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish(line: str) -> None:  # the first process publishes its work and lets go
            lines.append(line)
            kept.rename(folder)
            fcntl.flock(lock, fcntl.LOCK_UN)

        assert prepare(reviews, tokenizer, log=finish).digest == found.digest
    assert len(lines) == 1 and "another process" in lines[0] and "waiting" in lines[0]


def test_a_killed_worker_is_one_clear_line(reviews: Corpus) -> None:
    killed = pytest.raises(SettingError, match=r"^corpus\.workers=2: a process .* was killed")
    with killed, workers(replace(reviews, workers=2)) as pool:
        assert pool is not None
        pool.submit(os.kill, pool.submit(os.getpid).result(), signal.SIGKILL).result()


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import os, time\nfrom distill.data.disk_cache import workers\nfrom distill.config import Corpus, Kind\n"
        "if __name__ == '__main__':\n    with workers(Corpus(kind=Kind.text, workers=2)) as pool:\n"
        "        print(pool.submit(os.getpid).result(), flush=True)\n        time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    os.kill(worker, 0)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.05)


def test_workers_load_neither_torch_nor_transformers() -> None:
    heavy = "('torch', 'transformers', 'datasets', 'hydra')"
    code = f"import sys, distill.data.tokens; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# --- what cannot be had


def test_unreadable_files_are_counted_or_stop(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books/good.txt").write_text(some_text(1, 500))
    (tmp_path / "books/bad.txt.gz").write_bytes(b"no gzip")
    corpus = Corpus(kind=Kind.gutenberg, path=f"{tmp_path}/books", cache=str(tmp_path), workers=1, heldout=0.0)
    for _ in range(2):  # said when built, and when it comes from the cache
        lines: list[str] = []
        found = prepare(corpus, tokenizer, log=lines.append)
        assert len(found.skipped) == 1 and found.skipped[0].startswith("bad.txt.gz: BadGzipFile")
        assert lines[-2:] == [f"skipped {found.skipped[0]}", "skipped 1 of the files: they could not be read"]
    with pytest.raises(SettingError, match=r"^corpus\.path=.*: bad\.txt\.gz: BadGzipFile"):
        quiet(replace(corpus, unreadable=Missing.stop), tokenizer)
    with pytest.raises(SettingError, match=r"^corpus\.path=.*: bad\.txt\.gz: BadGzipFile"):
        quiet(replace(corpus, unreadable=Missing.stop, cache=f"{tmp_path}/fresh"), tokenizer)


def test_no_rows_no_run(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.txt").write_text("Ban dan.")
    corpus = Corpus(kind=Kind.text, path=f"{tmp_path}/a.txt", cache=str(tmp_path), workers=1)
    with pytest.raises(SettingError, match=r"^corpus\.path=.*a\.txt: not one row: 1 document"):
        quiet(corpus, tokenizer)
    source = Source(kind=Kind.text, path=f"{tmp_path}/a.txt")
    with pytest.raises(SettingError, match=r"^evaluate\.sources\.mine\.path=.*a\.txt: not one row"):
        quiet(corpus, tokenizer, "all", source, setting="evaluate.sources.mine")
    (tmp_path / "a.txt").write_text("Ban dan fan gan kan lan. " * 9)
    assert len(quiet(corpus, tokenizer).rows) == 1
    with pytest.raises(SettingError, match=r"^corpus\.heldout=0\.02: the corpus is too small"):
        quiet(corpus, tokenizer, "heldout")
    with pytest.raises(SettingError, match=r"^corpus\.heldout=0\.0: "):
        quiet(replace(corpus, heldout=0.0), tokenizer, "heldout")


def test_a_single_book_still_has_something_held_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.txt").write_text(some_text(5, 30_000))
    corpus = Corpus(kind=Kind.text, path=f"{tmp_path}/a.txt", cache=str(tmp_path), workers=1)
    train, held = quiet(corpus, tokenizer), quiet(corpus, tokenizer, "heldout")
    assert 0 < held.tokens < 0.1 * train.tokens
    assert not set(map(bytes, np.asarray(train.rows))) & set(map(bytes, np.asarray(held.rows)))


def test_settings_that_cannot_work_are_refused(
    reviews: Corpus, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    with pytest.raises(SettingError, match=r"^corpus\.path=null: no gutenberg text .* DISTILL_DATA"):
        quiet(Corpus(kind=Kind.gutenberg, cache=str(tmp_path)), tokenizer)
    with pytest.raises(SettingError, match=r"^corpus\.sequence_length=9"):
        quiet(replace(reviews, sequence_length=9), tokenizer)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"^corpus\.cache=.*file"):
        quiet(replace(reviews, cache=f"{tmp_path}/file"), tokenizer)
    with pytest.raises(SettingError, match=r"^teacher\.path=.*no \[SEP\]"):
        quiet(reviews, PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, cls_token="[CLS]"))


# --- prose, joining or standing in


@pytest.fixture
def small_prose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "package"
    root.mkdir()
    sentences = (f"The {word} of a package is not the same as the other parts of it." for word in WORDS)
    (root / "a.py").write_text("".join(f'def f{i}():\n    """{s}"""\n' for i, s in enumerate(sentences)))
    monkeypatch.setattr(prose, "installed", lambda: {"package": (root, "1.0")})


@pytest.mark.usefixtures("small_prose")
def test_prose_stands_in_or_joins_and_is_named(
    reviews: Corpus, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    alone = quiet(replace(reviews, kind=Kind.gutenberg, path=None, fallback=True, heldout=0.0), tokenizer)
    assert alone.name.startswith("embedded prose") and alone.documents == 1
    both = quiet(replace(reviews, add_prose=True, heldout=0.0), tokenizer)
    assert both.name.startswith("2 JSONL files in ") and " + embedded prose" in both.name
    np.testing.assert_array_equal(both.rows[-len(alone.rows) :], alone.rows)
    np.testing.assert_array_equal(both.rows[: -len(alone.rows)], naive(documents_of(reviews), tokenizer, 32))
    assert quiet(replace(reviews, kind=Kind.prose, path=None, heldout=0.0), tokenizer).digest == alone.digest


# --- a tokenizer of one's own


def test_wordpiece_is_the_same_every_time_and_survives_saving(reviews: Corpus, tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):  # in processes of their own, since the order in a hash map changes with the process
        code = (
            "import sys; from distill.config import Corpus, Kind; from distill.data.tokens import train_wordpiece\n"
            "c = Corpus(kind=Kind.jsonl, path=sys.argv[1], heldout=0.2, workers=1)\n"
            "train_wordpiece(c, 400, sys.argv[2])\n"
        )
        subprocess.run([sys.executable, "-c", code, str(reviews.path), f"{tmp_path}/{name}"], cwd=ROOT, check=True)
        made.append(next((tmp_path / name).glob("wordpiece/*.json")).read_text())
        assert not list((tmp_path / name).glob("wordpiece/*.t*"))
    assert made[0] == made[1]
    lines: list[str] = []
    tokenizer = train_wordpiece(reviews, 400, f"{tmp_path}/one", lines.append)
    assert not lines and len(tokenizer) <= 400
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "Ban DAN fart [MASK]."
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == "[CLS] ban dan fart [MASK]. [SEP]"
    assert loaded.mask_token_id == 4 and loaded("x~")["input_ids"].count(1) == 2


def test_wordpiece_keeps_the_commonest_letters_of_many(tmp_path: Path) -> None:
    rare = "".join(map(chr, range(0x4E00, 0x5000)))
    (tmp_path / "a.txt").write_text("\n\n".join([some_text(3, 3000), rare, some_text(4, 3000)]))
    corpus = Corpus(kind=Kind.text, path=f"{tmp_path}/a.txt", heldout=0.0, workers=1)
    tokenizer = train_wordpiece(corpus, 200, str(tmp_path), log=lambda _: None)
    assert len(tokenizer) == 200 and {"b", "a", "##a"} <= set(tokenizer.get_vocab())
    with pytest.raises(SettingError, match=r"^corpus\.vocab_size=50"):
        train_wordpiece(corpus, 50, str(tmp_path), log=lambda _: None)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(SettingError, match=r"^corpus\.path"):
        train_wordpiece(corpus, 200, str(tmp_path), log=lambda _: None)
