"""Of a text of which few sequences are needed, few units are prepared: which ones depends on nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest
from text import some_text, tokens_of
from tiny import all_of, changed, parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config
from distill.data import work as work_module
from distill.data.sources import Shard, find_source
from distill.data.tokens import corpus_text
from distill.data.work import FEWEST, Work, expected_tokens, fraction_needed, some_of
from distill.runs.describe import fraction_used

LENGTH = 16


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """60 documents of 100 to 3,000 words in 30 files, each a unit."""
    monkeypatch.setattr("distill.data.sources._files.SHARD_BYTES", 1)
    folder = tmp_path / "lines"
    folder.mkdir()
    for file in range(30):
        texts = [some_text(100 * file + number, 100 if file % 3 else 3000) for number in range(2)]
        (folder / f"{file:02d}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
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
    assert 40 <= len(some.sequences) < len(whole.sequences) / 2
    assert bodies(all_of(some.sequences)) < bodies(all_of(whole.sequences))
    assert any(line.endswith(": of 0.27 of it, as few sequences are needed") for line in caplog.messages)
    held = [tokens_of(each, words, "heldout") for each in (config, changed(config, max_sequences=40))]
    assert held[0].digest == held[1].digest and len(held[0].sequences) > 10
    assert not bodies(all_of(some.sequences)) & bodies(all_of(held[0].sequences))


def test_processes_and_the_exact_number_change_nothing(
    config: Config, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    some = tokens_of(changed(config, max_sequences=40), words)
    again = tokens_of(changed(config, max_sequences=40, cache=str(tmp_path / "other"), workers=2), words)
    near = tokens_of(changed(config, max_sequences=41, cache=str(tmp_path / "third")), words)
    assert some.digest == again.digest == near.digest


def test_too_few_rows_are_made_up_for(
    config: Config, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the files hold less text than their size tells."""
    monkeypatch.setattr(work_module, "expected_tokens", lambda shard: 100 * expected_tokens(shard))
    assert len(tokens_of(changed(config, max_sequences=3000), words).sequences) >= 3000
    everything = changed(config, max_sequences=10**6)
    assert tokens_of(everything, words).digest == tokens_of(config, words).digest


def test_of_a_text_too_large_to_read_some_units_are_read(config: Config) -> None:
    source = corpus_text(*parts(config)).sources[0]
    work = [Work(Shard((f"{number}.jsonl",), size=40 << 20), source) for number in range(1000)]
    per_unit = expected_tokens(work[0].shard)
    assert fraction_needed(work, per_unit) == FEWEST / 1000 and fraction_needed(work, 1000 * per_unit) == 1
    fraction = fraction_needed(work, 100 * per_unit)
    assert fraction == pytest.approx(0.15, abs=0.0011)
    units, fewer = some_of(work, fraction), some_of(work, 0.01)
    assert len(units) in (150, 151) and len(fewer) == 10 and all(unit.trains for unit in units)
    assert {unit.shard for unit in fewer} < {unit.shard for unit in units}, "of less are among those of more"
    assert [unit.shard for unit in work if unit in units] == [unit.shard for unit in units], "in the order of the text"
    small = some_of(work[:20], 0.5)  # less than a GiB: the others are read for what is held out of them
    assert len(small) == 20 and sum(unit.trains for unit in small) == 10
    assert some_of(work, 1.0) == work


def test_where_nobody_knows_the_size_all_is_read(config: Config) -> None:
    source = find_source(config.corpus, "corpus", config.data)
    assert source is not None
    known = [Work(Shard((f"{number}.jsonl",), size=1 << 30), source) for number in range(100)]
    assert fraction_needed(known, 1000) == FEWEST / 100
    assert fraction_needed([*known, Work(Shard(("a.jsonl",)), source)], 1000) == 1
    assert fraction_needed([], 1000) == 1


def test_how_much_of_the_text_is_used_is_known(config: Config, words: PreTrainedTokenizerFast) -> None:
    few, everything = (tokens_of(changed(config, max_sequences=count), words) for count in (40, None))
    assert few.used < 1 and everything.used == 1
    assert few.held_out == everything.held_out == len(tokens_of(config, words, "heldout").sequences) > 0
    assert fraction_used(few, 40) == pytest.approx(few.used * 40 / len(few.sequences))
    assert fraction_used(everything, len(everything.sequences)) is None
