"""Documents that are there several times: counted and left out as a naive reader would, however the work is divided."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from shards import assert_same_rows, packing, prepare, write_text
from text import some_text, tokens_of
from tiny import all_of, changed, parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.data import Duplicates, NearConfig
from distill.config.settings import Config
from distill.data import build_tokens, duplicates, tokens
from distill.data.build_tokens import Host
from distill.data.document import Document
from distill.data.duplicates import find_duplicates
from distill.data.heldout import HeldOut
from distill.data.sources import _files
from distill.data.work import work_of
from distill.runtime.errors import SettingError

TEXTS = [some_text(seed, 60) for seed in range(55)]


@pytest.fixture
def tokenizer(words: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return words


def write(folder: Path, files: list[list[str]]) -> None:
    folder.mkdir(exist_ok=True)
    for number, texts in enumerate(files):
        (folder / f"{number}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Three units of work with 55 different documents, of which 12 come again."""
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    files = [TEXTS[:20] + TEXTS[:3], [f"{TEXTS[5]}\n", *TEXTS[20:40], TEXTS[5]], TEXTS[40:] + TEXTS[18:25]]
    write(tmp_path / "texts", files)
    given = {"sequence_length": 32, "heldout": 0.2, "workers": 1, "cache": str(tmp_path / "cache")}
    return text_config(kind="jsonl", path=str(tmp_path / "texts"), **given)


def documents_of(config: Config) -> list[str]:
    paths = sorted(Path(str(config.corpus.path)).iterdir())
    return [json.loads(line)["text"] for path in paths for line in path.read_text().splitlines()]


# --- equal documents


def test_repeated_documents_are_those_of_a_dict(config: Config) -> None:
    documents, seen, expected = documents_of(config), set[str](), []
    for number, text in enumerate(documents):
        expected += [number] * (text.strip() in seen)
        seen.add(text.strip())
    (source,) = tokens.corpus_text(*parts(config)).sources
    counts, left_out = find_duplicates(work_of([source]), Duplicates.drop, NearConfig(), None)
    lengths = [23, 22, 22]
    starts = np.cumsum([0, *lengths])
    assert [
        int(start + number) for start, of_unit in zip(starts, left_out, strict=False) for number in of_unit
    ] == expected
    assert counts == {"documents": 67, "exact": 12, "dropped": 12} and len(expected) == 12
    counted, kept = find_duplicates(work_of([source]), Duplicates.count, NearConfig(), None)
    assert counted == {"documents": 67, "exact": 12} and not any(map(len, kept))
    assert find_duplicates([], Duplicates.drop, NearConfig(), None)[0]["documents"] == 0


def test_duplicates_are_counted_and_the_rows_stay(config: Config, tokenizer: PreTrainedTokenizerFast) -> None:
    kept = tokens_of(config, tokenizer)
    assert kept.duplicates is None
    other = changed(config, cache=f"{config.data.cache}2", duplicates=Duplicates.count)
    counted = tokens_of(other, tokenizer)
    assert counted.duplicates == {"documents": 67, "exact": 12} and counted.digest == kept.digest
    assert [path.name for path in (Path(other.data.cache) / "tokens").glob("*") if path.suffix != ".lock"] == [
        path.name for path in (Path(config.data.cache) / "tokens").glob("*") if path.suffix != ".lock"
    ]


def test_what_drop_leaves_is_the_text_without_copies(
    config: Config, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, lines: list[str]
) -> None:
    dropping = changed(config, duplicates=Duplicates.drop)
    found = tokens_of(dropping, tokenizer)
    assert found.duplicates == {"documents": 67, "exact": 12, "dropped": 12}
    assert any("12 of 67 documents have the text of an earlier one; left out" in line for line in lines)
    write(tmp_path / "once", [TEXTS[:20], TEXTS[20:40], TEXTS[40:]])
    once = changed(config, path=str(tmp_path / "once"))
    for part in ("train", "heldout"):
        wanted = tokens_of(once, tokenizer, part)
        assert tokens_of(dropping, tokenizer, part).digest == wanted.digest
    assert found.digest != tokens_of(config, tokenizer).digest


def with_copies(folder: Path) -> Path:
    """Six files of 40 documents, each of which begins with the first ten of the one before."""
    write_text(folder)
    lines = [path.read_text().splitlines() for path in sorted(folder.iterdir())]
    for number in range(1, 6):
        (folder / f"{number}.jsonl").write_text("\n".join(lines[number - 1][:10] + lines[number]))
    return folder


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    return with_copies(tmp_path / "text")


def test_processes_hosts_and_shards_change_nothing(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = packing(duplicates=Duplicates.drop)
    index = prepare(text, tmp_path / "one", tmp_path / "scratch", rows)
    assert index.duplicates == {"documents": 290, "exact": 50, "dropped": 50}
    assert index.train.documents + index.heldout.documents == 240
    monkeypatch.setattr(build_tokens, "FEW_BYTES", 0)
    monkeypatch.setattr(build_tokens, "POLL", 0.05)
    given = {"workers": 2, "shard_bytes": 1}
    with ThreadPoolExecutor() as pool:
        other = pool.submit(prepare, text, tmp_path / "many", tmp_path / "b", rows, host=Host(1, 2), **given)
        first = prepare(text, tmp_path / "many", tmp_path / "a", rows, host=Host(0, 2), **given)
        assert other.result() == first
    assert first.duplicates == index.duplicates and len(first.train.files) == 6
    assert_same_rows(tmp_path / "one", tmp_path / "many")


# --- copies and the part that is held out


# --- near duplicates


def edited(text: str, every: int) -> str:
    """The text with every so many-th word another one."""
    return " ".join("zzz" if number % every == every - 1 else word for number, word in enumerate(text.split()))


def test_shingles_are_words_without_case_and_signs() -> None:
    assert list(duplicates.shingles("The cat, the HAT!", 3)) == [b"the cat the", b"cat the hat"]
    assert list(duplicates.shingles("One word", 5)) == [b"one word"]
    assert list(duplicates.shingles(" *** ", 5)) == [b"***"]


def jaccard(first: str, second: str, length: int) -> float:
    one, other = (set(duplicates.shingles(text, length)) for text in (first, second))
    return len(one & other) / len(one | other)


def test_near_copies_leave_the_training_text_and_held_out_ones_stay(
    config: Config, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    pytest.importorskip("datasketch")
    long = [some_text(seed, 400) for seed in range(100, 160)]
    near = {number: edited(long[number], 150) for number in range(0, 60, 6)}
    far = {number: edited(long[number], 4) for number in range(1, 60, 6)}
    settings = NearConfig()
    assert min(jaccard(long[number], text, settings.shingle) for number, text in near.items()) > 0.9
    assert max(jaccard(long[number], text, settings.shingle) for number, text in far.items()) < 0.4
    documents = [*long, *near.values(), *far.values(), long[7]]
    write(tmp_path / "near", [documents[:30], documents[30:65], documents[65:]])
    given = changed(config, path=str(tmp_path / "near"), duplicates=Duplicates.near, heldout=0.3)
    found = tokens_of(given, tokenizer)
    assert found.duplicates == {"documents": 81, "exact": 1, "near": 10, "dropped": 11}

    # Of each pair one stays, and that is the one which is held out where only one is.
    rule = HeldOut(0.3)
    held = [next(iter(rule.parts(Document("", text))))[0] for text in documents]
    pairs = {number: 60 + index for index, number in enumerate(near)}
    gone = {copy if held[number] or not held[copy] else number for number, copy in pairs.items()} | {80}
    assert any(held[copy] and not held[number] for number, copy in pairs.items())
    texts = [text for number, text in enumerate(documents) if number not in gone]
    write(tmp_path / "without", [texts])
    without = changed(given, path=str(tmp_path / "without"), duplicates=Duplicates.keep)
    for part in ("train", "heldout"):
        kept, wanted = (
            np.sort(all_of(tokens_of(each, tokenizer, part).sequences), axis=0) for each in (given, without)
        )
        assert np.array_equal(kept, wanted)


def test_near_without_datasketch_or_memory_is_one_line(
    config: Config, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = changed(config, duplicates=Duplicates.near)
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "datasketch", None)
        with pytest.raises(
            SettingError, match=r"corpus.duplicates=near: needs datasketch.*pip install 'distill-kd\[near\]'"
        ):
            tokens_of(given, tokenizer)
    pytest.importorskip("datasketch")
    monkeypatch.setattr(duplicates, "free_memory", lambda: 1 << 10)
    with pytest.raises(SettingError, match=r"67 documents may take .* GB of memory"):
        tokens_of(given, tokenizer)


def test_evaluation_sets_keep_their_copies(config: Config, tokenizer: PreTrainedTokenizerFast) -> None:
    dropping = changed(config, duplicates=Duplicates.drop)
    whole = tokens.prepare(tokens.corpus_text(*parts(dropping)), tokenizer, *parts(dropping), "all")
    assert whole.documents == 67 and whole.duplicates is None


def test_a_threshold_that_leaves_one_band_is_refused() -> None:
    pytest.importorskip("datasketch")
    with pytest.raises(SettingError, match=r"^corpus\.near\.threshold=1\.0: too near to 1 for 128 numbers"):
        duplicates.make_lsh(NearConfig(threshold=1.0))
