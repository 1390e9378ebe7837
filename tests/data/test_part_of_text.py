"""Of a text of which few sequences are needed, few stretches are prepared: which ones depends on nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest
from text import some_text, tokens_of
from tiny import all_of, changed, parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config, DataConfig, SourceConfig
from distill.data import part_of_text
from distill.data.document import Document, Part
from distill.data.part_of_text import PartOfText, larger, part_needed
from distill.data.sources import Shard, find_source
from distill.data.tokens import corpus_text
from distill.data.work import Work, expected_tokens
from distill.runs.banner import fraction_used

LENGTH = 16


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """60 documents of 100 to 3,000 words, of which so few as 40 sequences are worth leaving the rest out."""
    monkeypatch.setattr(part_of_text, "SMALL", 1000)
    folder = tmp_path / "lines"
    folder.mkdir()
    for file in range(4):
        texts = [some_text(100 * file + number, 100 if number % 3 else 3000) for number in range(15)]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return text_config(
        kind="jsonl", path=str(folder), cache=str(tmp_path / "cache"), heldout=0.1, sequence_length=LENGTH, workers=1
    )


def bodies(rows: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in np.asarray(rows)}


def test_a_part_gives_enough_rows_and_holds_out_the_same(
    config: Config, words: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "distill")
    whole, some = tokens_of(config, words), tokens_of(changed(config, max_sequences=40), words)
    assert 40 <= len(some.sequences) < len(whole.sequences) / 4
    assert any(
        "of about 1/" in line and line.endswith("of it, as few sequences are needed") for line in caplog.messages
    )
    held = [tokens_of(each, words, "heldout") for each in (config, changed(config, max_sequences=40))]
    assert held[0].digest == held[1].digest and len(held[0].sequences) > 10
    assert not bodies(all_of(some.sequences)) & bodies(all_of(held[0].sequences))


def test_processes_files_and_the_exact_number_change_nothing(
    config: Config, words: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = tokens_of(changed(config, max_sequences=40), words)
    monkeypatch.setattr("distill.data.sources._files.SHARD_BYTES", 1)
    again = tokens_of(changed(config, max_sequences=40, cache=str(tmp_path / "other"), workers=2), words)
    near = tokens_of(changed(config, max_sequences=41, cache=str(tmp_path / "third")), words)
    assert some.digest == again.digest == near.digest


def test_too_few_rows_are_made_up_for(
    config: Config, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the files hold less text than their size tells."""
    monkeypatch.setattr(part_of_text, "expected_tokens", lambda shard: 100 * expected_tokens(shard))
    assert len(tokens_of(changed(config, max_sequences=300), words).sequences) >= 300
    everything = changed(config, max_sequences=10**6)
    assert tokens_of(everything, words).digest == tokens_of(config, words).digest


def test_prepared_folders_and_small_texts_are_whole(
    config: Config, words: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tokens_of(config, words).digest
    assert tokens_of(changed(config, max_sequences=40, tokens=str(tmp_path / "tokens")), words).digest == whole
    monkeypatch.setattr(part_of_text, "SMALL", 1 << 20)
    assert tokens_of(changed(config, max_sequences=40), words).digest == whole


def test_stretches_are_of_the_document_and_those_of_less_are_among_those_of_more() -> None:
    document = Document("book", some_text(0, 20_000))
    half, quarter = ([piece.text for piece in PartOfText(share, 300).of(document)] for share in (0.5, 0.25))
    text = document.text
    for pieces in (half, quarter):
        places = [text.index(piece) for piece in pieces]
        assert places == sorted(places) and all(piece.endswith(("\n\n", text[-9:])) for piece in pieces)
    assert all(any(piece in longer for longer in half) for piece in quarter)
    assert sum(map(len, half)) / len(text) == pytest.approx(0.5, abs=0.1)
    assert sum(map(len, quarter)) / len(text) == pytest.approx(0.25, abs=0.08)
    assert [*PartOfText().of(document)] == [document]


def test_documents_with_prompts_are_used_whole_or_not() -> None:
    chats = [
        Document.of_parts(str(n), [Part(some_text(n, 300), False), Part(some_text(n + 500, 300))]) for n in range(200)
    ]
    used = [found for chat in chats for found in PartOfText(0.25, 64).of(chat)]
    assert all(found in chats for found in used) and 25 <= len(used) <= 80


def test_of_a_text_too_large_to_read_some_units_are_read(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    source = corpus_text(*parts(config)).sources[0]
    work = [Work(Shard((f"{number}.jsonl",), size=40 << 20), source) for number in range(1000)]
    part = part_needed(5000, 128, work)
    smaller, units = part.units(work)
    assert 64 <= len(units) < 100 and [each for each in work if each in units] == units
    assert smaller.share * len(units) == pytest.approx(part.share * len(work))
    assert smaller.units(units) == (smaller, units)
    few = work[:20]  # less than a GiB
    assert part_needed(5000, 128, few).units(few)[1] == few


def test_where_nobody_knows_the_size_all_is_read(config: Config) -> None:
    source = find_source(config.corpus, "corpus", config.data)
    assert source is not None
    assert part_needed(10, LENGTH, [Work(Shard(("a.jsonl",), size=1 << 30), source)]).share < 0.01
    assert part_needed(10, LENGTH, [Work(Shard(("a.jsonl",)), source)]).whole
    assert larger(PartOfText(0.5)).whole


def test_how_much_of_the_text_is_used_is_known(config: Config, words: PreTrainedTokenizerFast) -> None:
    few, everything = (tokens_of(changed(config, max_sequences=count), words) for count in (40, None))
    assert few.used < 1 and everything.used == 1
    assert few.held_out == everything.held_out == len(tokens_of(config, words, "heldout").sequences) > 0
    assert fraction_used(few, 40) == pytest.approx(few.used * 40 / len(few.sequences))
    assert fraction_used(few, 40) == pytest.approx(40 / len(everything.sequences), rel=0.5)
    assert fraction_used(everything, len(everything.sequences)) is None


def test_an_empty_file_at_the_end_does_not_hide_the_size(
    config: Config, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.data.sources._files.SHARD_BYTES", 1)
    source = config.corpus
    assert isinstance(source, SourceConfig)
    before = tokens_of(changed(config, max_sequences=40), words).used
    (Path(str(source.path)) / "z.jsonl").write_text("")
    assert tokens_of(changed(config, max_sequences=40), words).used == before
    found = find_source(SourceConfig(kind="jsonl", path=str(source.path)), "corpus", DataConfig())
    assert found is not None and all(shard.size for shard in found.shards())
