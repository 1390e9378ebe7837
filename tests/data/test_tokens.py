"""Sequences are what a naive packer makes, whatever divides or repeats the work; and tokenizers of one's own."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import ROOT
from reading import prepared, write_lines
from text import some_text, tokens_of
from tiny import VOCAB, all_of, changed, make_tokenizer, parts, text_config
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vocabularies import vocabulary_of

from distill.config.settings import Config, SourceConfig
from distill.data import build_tokens, new_tokenizer
from distill.data import work as work_module
from distill.data.heldout import fraction
from distill.data.new_tokenizer import END, byte_bpe, wordpiece
from distill.data.sequence_format import causal_format, paired_format
from distill.data.sources import Shard, _files
from distill.data.tokens import Tokens, corpus_text, prepare, set_text
from distill.data.unknown_tokens import check_unknown
from distill.data.work import FEWEST, Work, expected_tokens, fraction_needed, some_of
from distill.runs.describe import fraction_used
from distill.runtime.errors import SettingError

Tokenizer = PreTrainedTokenizerFast


def documents_of(config: Config) -> list[str]:
    folder = Path(str(config.corpus.path))
    return [json.loads(line)["text"] for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]


def naive(texts: list[str], tokenizer: Tokenizer, length: int, cross: bool = False) -> list[list[int]]:
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


def naive_causal(texts: list[str], tokenizer: Any, length: int, cross: bool) -> list[list[int]]:
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id not in (None, tokenizer.eos_token_id) else []
    streams = [[*begin, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
    if cross:
        streams = [[id_ for stream in streams for id_ in stream]]
    rows = [stream[start : start + length] for stream in streams for start in range(0, len(stream), length)]
    return [row + [causal_format(tokenizer).pad] * (length - len(row)) for row in rows]


# --- what the sequences are


@pytest.mark.parametrize("length", [10, 32, 128])
def test_rows_are_those_of_a_naive_packer(reviews: Config, words: Tokenizer, length: int) -> None:
    config = changed(reviews, sequence_length=length)
    held = [fraction(text, "heldout") < config.corpus.heldout for text in documents_of(config)]
    for part, wanted in (("train", False), ("heldout", True)):
        texts = [text for text, is_held in zip(documents_of(config), held, strict=True) if is_held is wanted]
        found, rows = tokens_of(config, words, part), np.array(naive(texts, words, length))
        assert found.sequences.dtype == np.uint16
        np.testing.assert_array_equal(all_of(found.sequences), rows)
        np.testing.assert_array_equal(found.counts, np.bincount(rows.ravel(), minlength=len(words)))
        assert found.tokens == (rows != words.pad_token_id).sum()
        assert found.documents == len(texts) and found.left_out == {} and found.tokens_per_second > 0


def test_rows_cross_documents_only_when_asked(reviews: Config, words: Tokenizer) -> None:
    config = changed(reviews, cross_documents=True, heldout=0.0)
    rows = naive(documents_of(config), words, 32, cross=True)
    np.testing.assert_array_equal(all_of(tokens_of(config, words).sequences), rows)


def test_all_takes_a_source_with_the_settings_of_the_corpus(reviews: Config, words: Tokenizer, tmp_path: Path) -> None:
    """And long documents lose nothing between the blocks in which they are tokenized."""
    text = some_text(1, 20_000)
    (tmp_path / "long.txt").write_text(text)
    for kind, path, texts in (
        ("jsonl", reviews.corpus.path, documents_of(reviews)),
        ("text", tmp_path / "long.txt", [text]),
    ):
        source = set_text(SourceConfig(kind=kind, path=str(path)), "evaluate.sources.mine", reviews.data)
        assert source is not None
        found = prepare(source, words, *parts(reviews), "all")
        np.testing.assert_array_equal(all_of(found.sequences), naive(texts, words, 32))
        assert found.documents == len(texts) and found.name.endswith(str(path))


# GPT-2 has one token for both ends and none for padding, Llama 3 one for each end, Qwen pads with its end, Gemma has
# a token of its own for that.
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "gemma"])
@pytest.mark.parametrize("cross", [False, True])
def test_causal_rows_are_those_of_a_naive_packer(reviews: Config, family: str, cross: bool) -> None:
    tokenizer = vocabulary_of(family)
    config = changed(reviews, sequence_length=48, cross_documents=cross, heldout=0.0)
    found, rows = prepared(config, tokenizer), naive_causal(documents_of(config), tokenizer, 48, cross)
    pad = tokenizer.pad_token_id if family == "gemma" else len(tokenizer)
    np.testing.assert_array_equal(all_of(found.sequences), rows)
    assert found.documents == 60 and found.tokens == sum(id_ != pad for row in rows for id_ in row)
    assert len(found.counts) == len(tokenizer) and found.counts.sum() == (np.array(rows) < len(tokenizer)).sum()


def test_the_name_of_a_special_token_in_a_text_is_text(tmp_path: Path) -> None:
    path, tokenizer = write_lines(tmp_path / "a.jsonl", [{"text": "one <|endoftext|> two"}]), vocabulary_of("gpt2")
    config = text_config(kind="jsonl", path=str(path), cache=str(tmp_path), heldout=0.0, sequence_length=48)
    (row,) = all_of(prepared(config, tokenizer).sequences)
    ids = row[row != len(tokenizer)]
    assert (ids == tokenizer.eos_token_id).sum() == 1 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == "one <|endoftext|> two"


# --- one corpus, one digest


@pytest.mark.usefixtures("small_units")
def test_the_digest_follows_content_alone(
    reviews: Config, words: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tokens_of(reviews, words)
    monkeypatch.setattr(_files, "RANGE_BYTES", 5000)
    monkeypatch.setattr(build_tokens, "FEW_BYTES", 0)
    again = tokens_of(changed(reviews, cache=f"{tmp_path}/other", workers=2), words)
    content = hashlib.sha256(all_of(again.sequences).tobytes()).hexdigest()
    assert again.digest == before.digest == hashlib.sha256(b"uint16 32\n" + content.encode()).hexdigest()
    assert tokens_of(reviews, words, "heldout").digest != before.digest


@pytest.mark.parametrize("name", ["", "a.jsonl", "*.jsonl"])
def test_a_copy_of_the_text_is_not_prepared_again(
    reviews: Config, words: Tokenizer, tmp_path: Path, lines: list[str], name: str
) -> None:
    """Nor is one that is mounted elsewhere, or was written at another time."""
    place, copied = Path(str(reviews.corpus.path)), tmp_path / "a" / "copy"
    shutil.copytree(place, copied, copy_function=shutil.copyfile)
    first = tokens_of(changed(reviews, path=str(place / name)), words)
    count = len(lines)
    again = tokens_of(changed(reviews, path=str(copied / name)), words)
    assert again.sequences.folder == first.sequences.folder and len(lines) == count


@pytest.mark.parametrize("change", ["content", "content and time", "name"])
def test_another_text_of_the_same_size_is_prepared(reviews: Config, words: Tokenizer, change: str) -> None:
    file = Path(str(reviews.corpus.path)) / "a.jsonl"
    before, times = tokens_of(reviews, words), file.stat()
    if change == "name":  # after that of b.jsonl
        file.rename(file.with_name("c.jsonl"))
    else:
        text = file.read_text()
        file.write_text(text[:-40] + text[-40:].replace("a", "e"))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + (change == "content")))
    after = tokens_of(reviews, words)
    assert after.digest != before.digest and after.sequences.folder != before.sequences.folder


def test_the_second_time_comes_from_the_cache(reviews: Config, words: Tokenizer, lines: list[str]) -> None:
    first = tokens_of(reviews, words)
    assert len(lines) == 3 and "preparing tokens" in lines[0] and "tokens a second" in lines[1]
    assert "left out 68 tokens (0.6%): documents, and ends of documents, of fewer than 8 tokens" in lines[2]
    words(["some text", "more"], padding=True, truncation=True, max_length=4)  # leaves its marks in the tokenizer
    second = tokens_of(changed(reviews, workers=2), words)
    assert len(lines) == 3 and second.digest == first.digest and second.seconds == first.seconds
    tokens_of(changed(reviews, sequence_length=16), words)
    assert len(lines) == 6


def test_threads_that_want_the_same_sequences_make_them_once(
    reviews: Config, words: Tokenizer, lines: list[str]
) -> None:
    with ThreadPoolExecutor() as pool:
        found = [each.result().digest for each in [pool.submit(tokens_of, reviews, words) for _ in range(4)]]
    assert len(set(found)) == 1 and sum("preparing tokens" in line for line in lines) == 1


# --- what cannot be had


def test_no_rows_no_run(tmp_path: Path, words: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("Ban dan.")
    config = text_config(kind="text", path=f"{tmp_path}/a.txt", cache=str(tmp_path), workers=1)
    with pytest.raises(SettingError, match=r"^corpus\.path=.*a\.txt: not one sequence: 1 document"):
        tokens_of(config, words)
    (tmp_path / "a.txt").write_text("Ban dan fan gan kan lan. " * 9)
    assert len(tokens_of(config, words).sequences) == 1
    for share, line in ((0.02, r"^corpus\.heldout=0\.02: corpus is too small"), (0.0, r"^corpus\.heldout=0\.0: ")):
        with pytest.raises(SettingError, match=line):
            tokens_of(changed(config, heldout=share), words, "heldout")


def test_settings_that_cannot_work_are_refused(
    reviews: Config, words: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    (tmp_path / "file").write_text("")
    bare = Tokenizer(tokenizer_object=words.backend_tokenizer, cls_token="[CLS]")
    for config, tokenizer, line in (
        (
            text_config(kind="gutenberg", cache=str(tmp_path)),
            words,
            r"^corpus\.path=null: no gutenberg text .* DISTILL_DATA",
        ),
        (changed(reviews, cache=f"{tmp_path}/file"), words, r"^data\.cache=.*file"),
        (reviews, bare, r"^teacher\.path=.*no \[SEP\]"),
        (reviews, vocabulary_of("gpt2"), r"teacher\.path=.*\[PAD\] token; choose an encoder"),
    ):
        with pytest.raises(SettingError, match=line):
            tokens_of(config, tokenizer)
    with pytest.raises(SettingError, match=r"teacher\.path=.*end-of-text token"):
        causal_format(make_tokenizer())


@pytest.mark.parametrize(("unknown", "known"), [(0, 90), (10, 90), (30, 70), (100, 0), (0, 0)])
def test_what_a_vocabulary_does_not_know_is_logged_and_refused_above_the_limit(
    tokenizer: Any, lines: list[str], unknown: int, known: int
) -> None:
    counts = np.zeros(VOCAB, np.int64)
    counts[tokenizer.unk_token_id], counts[20] = unknown, known
    if known == 90:
        check_unknown(counts, unknown + known, tokenizer, 0.2, "corpus.path=x")
        assert lines == ["corpus.path=x: 10.00% of its tokens are unknown"] * (unknown > 0)
        return
    with pytest.raises(SettingError, match=r"corpus\.path=x: .* not in the vocabulary.*\(corpus\.max_unknown=0\.2"):
        check_unknown(counts, unknown + known, tokenizer, 0.2, "corpus.path=x")


# --- corpus=tokens: prepared sequences are trained on where their text is not


@pytest.fixture
def stored(reviews: Config, words: Tokenizer, tmp_path: Path) -> tuple[Config, dict[str, Tokens]]:
    """The settings of a run on sequences whose text is gone, and what they were when it was there."""
    config = changed(reviews, tokens=str(tmp_path / "tokens"))
    made = {part: tokens_of(config, words, part) for part in ("train", "heldout")}
    for folder in (str(reviews.corpus.path), str(tmp_path / "cache")):
        shutil.rmtree(folder)
    (tmp_path / "tokens").rename(tmp_path / "elsewhere")
    return changed(reviews, kind="tokens", path=str(tmp_path / "elsewhere")), made


@pytest.mark.parametrize("inner", [False, True])
def test_prepared_sequences_are_those_of_the_text(
    stored: tuple[Config, dict[str, Tokens]], words: Tokenizer, inner: bool, tmp_path: Path
) -> None:
    config, made = stored
    if inner:
        config = changed(config, path=str(next((tmp_path / "elsewhere").iterdir())), max_sequences=5)
    for part, before in made.items():
        found = tokens_of(config, words, part)
        assert (found.digest, found.name, found.documents) == (before.digest, before.name, before.documents)
        assert all_of(found.sequences).shape == before.sequences.shape


@pytest.mark.parametrize(
    ("changes", "setting", "cure"),
    [
        ({"sequence_length": 64}, "corpus.sequence_length", "corpus.sequence_length=32"),
        ({"heldout": 0.5, "cross_documents": True}, "corpus.cross_documents", "corpus.heldout=0.2"),
        ({"duplicates": "drop"}, "corpus.duplicates", "corpus.duplicates=keep"),
        ({"path": "/nowhere"}, "corpus.path", "distill prepare"),
        ({"fraction": 0.5}, "corpus.fraction", "leave it out"),
        ({"field": "text"}, "corpus.field", "leave it out"),
    ],
)
def test_other_settings_are_refused(
    stored: tuple[Config, Any], words: Tokenizer, changes: dict[str, Any], setting: str, cure: str
) -> None:
    with pytest.raises(SettingError) as error:
        tokens_of(changed(stored[0], **changes), words)
    assert error.value.setting == setting and cure in error.value.cure


def test_another_tokenizer_task_or_use_is_refused(stored: tuple[Config, Any], words: Tokenizer) -> None:
    config = stored[0]
    text, of_set = corpus_text(*parts(config)), set_text(config.corpus, "evaluate.sources.mine", config.data)
    assert of_set is not None
    for words_of_it, make in (
        ("another objective", lambda: prepare(text, words, *parts(config), "train", paired_format)),
        ("another tokenizer", lambda: prepare(text, make_tokenizer(), *parts(config), "train")),
        ("token ids, which no new tokenizer has", lambda: new_tokenizer.wordpiece(*parts(config))),
        ("those of a corpus", lambda: prepare(of_set, words, *parts(config), "all")),
    ):
        with pytest.raises(SettingError, match=words_of_it):
            make()


def test_of_several_texts_the_folder_is_named(reviews: Config, words: Tokenizer, tmp_path: Path) -> None:
    config = changed(reviews, tokens=str(tmp_path / "tokens"))
    tokens_of(config, words)
    other = tokens_of(changed(config, path=f"{reviews.corpus.path}/b.jsonl"), words)
    again = changed(reviews, kind="tokens", path=str(tmp_path / "tokens"))
    with pytest.raises(SettingError, match="several texts") as error:
        tokens_of(again, words)
    assert (place := other.sequences.folder.place) in str(error.value)
    assert tokens_of(changed(again, path=place), words).digest == other.digest


# --- of a text of which few sequences are needed, few units are prepared: which ones depends on nothing else


@pytest.fixture
def files(tmp_path: Path, small_units: None) -> Config:
    """60 documents of 100 to 3,000 words in 30 files, each a unit."""
    for file in range(30):
        texts = [some_text(100 * file + number, 100 if file % 3 else 3000) for number in range(2)]
        write_lines(tmp_path / "lines" / f"{file:02d}.jsonl", [{"text": text} for text in texts])
    given = {"cache": str(tmp_path / "cache"), "heldout": 0.1, "sequence_length": 16, "workers": 1}
    return text_config(kind="jsonl", path=str(tmp_path / "lines"), **given)


def test_a_part_gives_enough_rows_and_holds_out_the_same(
    files: Config, words: Tokenizer, tmp_path: Path, lines: list[str]
) -> None:
    few = changed(files, max_sequences=40)
    whole, some = tokens_of(files, words), tokens_of(few, words)
    assert 40 <= len(some.sequences) < len(whole.sequences) / 2
    rows, chosen = ({row.tobytes() for row in all_of(each.sequences)} for each in (whole, some))
    assert chosen < rows and any(line.endswith(": of 0.27 of it, as few sequences are needed") for line in lines)
    held = [tokens_of(each, words, "heldout") for each in (files, few)]
    assert held[0].digest == held[1].digest
    assert some.held_out == whole.held_out == len(held[0].sequences) > 10
    assert not chosen & {row.tobytes() for row in all_of(held[0].sequences)}
    assert some.used < 1 == whole.used and fraction_used(whole, len(whole.sequences)) is None
    assert fraction_used(some, 40) == pytest.approx(some.used * 40 / len(some.sequences))
    again = tokens_of(changed(few, cache=str(tmp_path / "other"), workers=2), words)
    near = tokens_of(changed(few, max_sequences=41, cache=str(tmp_path / "third")), words)
    assert some.digest == again.digest == near.digest, "processes and the exact number change nothing"
    on_purpose = tokens_of(changed(few, tokens=str(tmp_path / "tokens")), words)
    assert on_purpose.digest == whole.digest, "what is prepared on purpose is all of a text"


def test_too_few_rows_are_made_up_for(files: Config, words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the files hold less text than their size tells."""
    monkeypatch.setattr(work_module, "expected_tokens", lambda shard: 100 * expected_tokens(shard))
    assert len(tokens_of(changed(files, max_sequences=3000), words).sequences) >= 3000
    assert tokens_of(changed(files, max_sequences=10**6), words).digest == tokens_of(files, words).digest


def test_of_a_text_too_large_to_read_some_units_are_read(files: Config) -> None:
    source = corpus_text(*parts(files)).sources[0]
    work = [Work(Shard((f"{number}.jsonl",), size=40 << 20), source) for number in range(1000)]
    per_unit = expected_tokens(work[0].shard)
    assert fraction_needed(work, per_unit) == FEWEST / 1000 and fraction_needed(work, 1000 * per_unit) == 1
    share = fraction_needed(work, 100 * per_unit)
    assert share == pytest.approx(0.15, abs=0.0011)
    units, fewer = some_of(work, share), some_of(work, 0.01)
    assert len(units) in (150, 151) and len(fewer) == 10 and all(unit.trains for unit in units)
    assert {unit.shard for unit in fewer} < {unit.shard for unit in units}, "of less are among those of more"
    assert [unit.shard for unit in work if unit in units] == [unit.shard for unit in units], "in the order of the text"
    small = some_of(work[:20], 0.5)  # less than a GiB: the others are read for what is held out of them
    assert len(small) == 20 and sum(unit.trains for unit in small) == 10 and some_of(work, 1.0) == work
    assert fraction_needed([*work, Work(Shard(("a.jsonl",)), source)], per_unit) == 1, "nobody knows the size"
    assert fraction_needed([], 1000) == 1


CODE = """
import sys
sys.path.append('tests')
from tiny import parts, text_config
from distill.data import new_tokenizer
name, path, cache = sys.argv[1:]
given = {'kind': 'jsonl', 'path': path, 'cache': cache, 'vocab_size': 400, 'heldout': 0.2, 'workers': 1}
getattr(new_tokenizer, name)(*parts(text_config(**given)))
"""


def config_of(folder: Path, text: str, **more: Any) -> Config:
    (folder / "a.txt").write_text(text)
    given = {"kind": "text", "path": f"{folder}/a.txt", "heldout": 0.0, "workers": 1, "cache": str(folder)}
    return text_config(**given, **more)


@pytest.mark.parametrize("name", ["wordpiece", "byte_bpe"])
def test_it_is_the_same_in_every_process_and_survives_saving(
    name: str, reviews: Config, tmp_path: Path, lines: list[str]
) -> None:
    """The order in a hash map changes with the process."""
    arguments = [name, str(reviews.corpus.path), f"{tmp_path}/one"]
    subprocess.run([sys.executable, "-c", CODE, *arguments], cwd=ROOT, check=True)
    for cache in ("one", "two"):
        tokenizer = getattr(new_tokenizer, name)(*parts(changed(reviews, vocab_size=400, cache=f"{tmp_path}/{cache}")))
        assert bool(lines) == (cache == "two"), "the first is there"
    files = [file for cache in ("one", "two") for file in (tmp_path / cache).glob(f"{name}/*.json")]
    assert files[0].read_text() == files[1].read_text() and 200 < len(tokenizer) <= 400
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    if name == "wordpiece":
        assert loaded.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
        assert loaded.decode(loaded("Ban DAN fart [MASK].")["input_ids"]) == "[CLS] ban dan fart [MASK]. [SEP]"
        assert loaded("x~")["input_ids"].count(1) == 2
    else:
        assert loaded.eos_token_id == loaded.bos_token_id == loaded(f"Ban{END}")["input_ids"][-1] == 0
        assert len(loaded("ban dan fart")["input_ids"]) < len("ban dan fart"), "no merge was learned"


def test_it_has_the_commonest_letters_of_what_is_not_held_out(tmp_path: Path) -> None:
    rare = "".join(map(chr, range(0x4E00, 0x5000)))
    config = config_of(tmp_path, "\n\n".join([some_text(3, 3000), rare, some_text(4, 3000)]), vocab_size=300)
    tokenizer = wordpiece(*parts(config))
    assert len(tokenizer) == 300 and {"b", "a", "##a"} <= set(tokenizer.get_vocab())
    texts = [f"{some_text(number, 40)} {chr(0x4E00 + number)}" for number in range(100)]
    path = write_lines(tmp_path / "b.jsonl", [{"text": text} for text in texts])
    given = {"heldout": 0.3, "vocab_size": 600, "workers": 1, "cache": str(tmp_path)}
    vocabulary = wordpiece(*parts(text_config(kind="jsonl", path=str(path), **given))).get_vocab()
    assert [text[-1] in vocabulary for text in texts] == [fraction(text, "heldout") >= 0.3 for text in texts]


@pytest.mark.parametrize(
    "text",
    [
        "Plain words, and  two spaces; a tab\tand an end . ",
        "one\r\ntwo\r\n\r\nthree\n",
        "東京 Ελλάδα עברית “quoted” don't",
        "👩\u200d👩\u200d👧 🇨🇭 e\u0301 \u00e9 \ufeff \x00 \x7f",
    ],
)
def test_any_text_comes_back_from_its_ids(text: str, tmp_path: Path) -> None:
    tokenizer = byte_bpe(*parts(config_of(tmp_path, some_text(3, 2000), vocab_size=320)))
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and 0 not in ids


@pytest.mark.parametrize(("train", "least"), [(wordpiece, 100), (byte_bpe, 300)])
def test_what_cannot_be_trained_is_refused(train: Any, least: int, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"^corpus\.path"):
        train(*parts(config_of(tmp_path, " \n", vocab_size=300)))
    with pytest.raises(SettingError, match=rf"^corpus\.vocab_size={least - 1}: "):
        train(*parts(config_of(tmp_path, some_text(3, 200), vocab_size=least - 1)))
