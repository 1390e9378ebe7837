"""Rows of several sources in fixed shares: every position by itself, every pass whole, no row lost by a resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import composed
from text import some_text
from tiny import all_of, change, make_batches, make_masks, parts, records, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config
from distill.data import order as module
from distill.data.batches import Batches
from distill.data.order import FullShuffle, Mixture, WindowedShuffle, quotas
from distill.data.sequence_format import masked_format
from distill.data.sequence_store import StackedSequences
from distill.data.tokens import corpus_texts, prepare, prepare_mixture
from distill.runs.check import check
from distill.runtime.errors import SettingError

SIZES = [
    ((300, 700, 50), (0.3, 0.6, 0.1)),
    ((1000, 10), (1.0, 1.0)),
    ((5, 3), (0.2, 0.8)),
    ((900, 600), (0.002, 0.998)),
]


def mixed(sizes: tuple[int, ...], weights: tuple[float, ...], seed: int = 7) -> Mixture:
    orders = tuple(FullShuffle(size, number) for number, size in enumerate(sizes))
    return Mixture(tuple("abcd"[: len(sizes)]), weights, orders, tuple(10.0 for _ in sizes), seed)


def source_of(order: Mixture, numbers: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(order.sizes), numbers, side="right")


@pytest.fixture
def small_strata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRATUM", 64)


# --- the order


def test_quotas_are_shares_rounded_with_the_same_sum() -> None:
    assert quotas([0.3, 0.7], 10).tolist() == [3, 7]
    assert quotas([1, 1, 1], 10).tolist() == [4, 3, 3]
    draw = np.random.default_rng(0)
    for _ in range(100):
        weights, rows = draw.random(5) + 1e-3, int(draw.integers(0, 1000))
        found = quotas(weights.tolist(), rows)
        assert found.sum() == rows and np.abs(found - weights / weights.sum() * rows).max() < 1


@pytest.mark.parametrize(("sizes", "weights"), SIZES)
@pytest.mark.usefixtures("small_strata")
def test_every_pass_of_a_source_shows_each_row_once(sizes: tuple[int, ...], weights: tuple[float, ...]) -> None:
    order = mixed(sizes, weights)
    everything = np.arange(len(order))
    shown: dict[tuple[int, int], list[int]] = {}
    last = [-1] * len(sizes)
    for epoch in range(4):
        numbers, passes = order.numbers(epoch, everything), order.passes(epoch, everything)
        sources = source_of(order, numbers)
        assert np.bincount(sources, minlength=len(sizes)).tolist() == order.quotas.tolist()
        for source, number, each in zip(sources, numbers, passes, strict=True):
            shown.setdefault((int(source), int(each)), []).append(int(number))
            last[source] = max(last[source], int(each))
    begins = np.cumsum([0, *sizes])
    for (source, each), numbers in shown.items():
        whole = range(begins[source], begins[source + 1])
        assert len(set(numbers)) == len(numbers) and set(numbers) <= set(whole)
        assert each == last[source] or sorted(numbers) == list(whole)


@pytest.mark.parametrize(("sizes", "weights"), SIZES)
@pytest.mark.usefixtures("small_strata")
def test_a_position_is_known_without_those_before_it(sizes: tuple[int, ...], weights: tuple[float, ...]) -> None:
    order = mixed(sizes, weights)
    draw = np.random.default_rng(0)
    for epoch in (0, 3):
        numbers = order.numbers(epoch, np.arange(len(order)))
        some = draw.integers(0, len(order), 40)
        assert np.array_equal(order.numbers(epoch, some), numbers[some])
        one = [int(order.numbers(epoch, some[at : at + 1])[0]) for at in range(5)]
        assert one == numbers[some[:5]].tolist()
    assert not np.array_equal(order.numbers(0, some), order.numbers(1, some))
    assert not np.array_equal(order.numbers(0, some), mixed(sizes, weights, 8).numbers(0, some)) or len(order) < 10


@pytest.mark.parametrize(("sizes", "weights"), SIZES)
@pytest.mark.usefixtures("small_strata")
def test_the_mix_is_even_all_along_and_counted(sizes: tuple[int, ...], weights: tuple[float, ...]) -> None:
    order = mixed(sizes, weights)
    sources = source_of(order, order.numbers(2, np.arange(len(order))))
    for positions in sorted({0, 1, 63, 64, 65, len(order) // 2, len(order) - 1, len(order)}):
        if positions > len(order):
            continue
        counted = np.bincount(sources[:positions], minlength=len(sizes))
        fed = order.fed(2, positions)
        assert [each.sequences for each in fed.values()] == (2 * order.quotas + counted).tolist()
        assert [each.passes for each in fed.values()] == pytest.approx((2 * order.quotas + counted) / np.array(sizes))
        assert [each.tokens for each in fed.values()] == [10 * each.sequences for each in fed.values()]
    for positions in range(0, len(order), 64):  # at the ends of strata to the sequence, up to those that do not fit
        counted = np.bincount(sources[:positions], minlength=len(sizes))
        assert np.abs(counted - positions * order.quotas / len(order)).max() < len(sizes)


def test_a_weight_without_a_row_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"corpus.sources.a.weight=1e-06 is too small: of 1,010 sequences an epoch none"
    ):
        mixed((1000, 10), (1e-6, 1.0))


@pytest.mark.usefixtures("small_strata")
def test_a_large_source_is_shuffled_in_windows_within_the_mixture() -> None:
    """Two sources of 40 and 90 files of 100 sequences each, in windows of eight files."""
    orders = tuple(WindowedShuffle(np.arange(0, 100 * files + 1, 100), 8, files) for files in (40, 90))
    order = Mixture(("a", "b"), (1.0, 2.0), orders, (1.0, 1.0), 0)
    for begin in range(0, 12_000, 400):
        assert len(np.unique(order.numbers(1, np.arange(begin, begin + 100)) // 100)) <= 32
    assert "40 files of at most 100 sequences" in order.identity


# --- batches of it


def test_stacked_rows_are_those_of_their_stores() -> None:
    draw = np.random.default_rng(0)
    stores = [draw.integers(0, 1 << 16, (count, 4)).astype(kind) for count, kind in ((5, "u2"), (3, "u4"), (7, "u2"))]
    stacked, whole = StackedSequences(stores), np.concatenate(stores)
    numbers = draw.integers(0, 15, 40)
    assert stacked.shape == whole.shape and len(stacked) == 15
    assert np.array_equal(stacked[numbers], whole[numbers]) and stacked[numbers].dtype == np.uint32
    assert stacked.dtype == np.uint32 and stacked[numbers[:0]].shape == (0, 4)
    stores[2] = records(stores[2], loss_mask=draw.random(stores[2].shape) < 0.5, inner=stores[2] > 1 << 15)
    mixed = StackedSequences(stores)[numbers]  # of which only one store has prompts
    assert np.array_equal(mixed["id"], whole[numbers]) and mixed["id"].dtype == np.uint32
    for name, usual in (("loss_mask", True), ("inner", False)):
        expected = np.concatenate([np.full((8, 4), usual), stores[2][name]])
        assert np.array_equal(mixed[name], expected[numbers])


def rows_of(rows: np.ndarray, **given: Any) -> Batches:
    from tiny import make_tokenizer

    return make_batches(
        rows, make_masks(make_tokenizer(), rows), 4, 2, seed=3, order=mixed((12, 8), (0.2, 0.8)), **given
    )


def test_ranks_share_a_step_and_a_resume_on_others_loses_nothing(rows: np.ndarray) -> None:
    alone = rows_of(rows, sequences=7)
    epochs = [[batch.row_ids for batch in alone.window(step)] for step in range(2 * alone.steps_per_epoch)]
    assert alone.steps_per_epoch == 3
    for step, window in enumerate(epochs):
        for size in (2, 3):
            ranks = [rows_of(rows, sequences=7, rank=rank, size=size).window(step) for rank in range(size)]
            found = np.concatenate([batch.row_ids for each in ranks for batch in each])
            assert sorted(found) == sorted(np.concatenate(window))
    small = np.concatenate([np.concatenate(window) for window in epochs[:3]])
    assert np.bincount(small, minlength=20)[12:].tolist() == [2] * 8  # twice in an epoch of 20 sequences


def test_a_row_that_comes_again_has_other_masks_and_dropout(rows: np.ndarray) -> None:
    batches = rows_of(rows, sequences=20)
    window = batches.window(0)
    seen: dict[int, list[Any]] = {}
    for batch in window:
        for place, row in enumerate(batch.row_ids):
            seen.setdefault(int(row), []).append((batch.ids[place].tolist(), batch.dropout_keys[place]))
    again = [found for found in seen.values() if len(found) == 2]
    assert len(again) == 8 and all(first[1] != second[1] for first, second in again)
    assert sum(first[0] != second[0] for first, second in again) > 4
    static = rows_of(rows, sequences=20, static=True).window(0)
    by_sequence: dict[int, set[str]] = {}
    for batch in static:
        for place, row in enumerate(batch.row_ids):
            by_sequence.setdefault(int(row), set()).add(str(batch.ids[place].tolist()))
    assert all(len(found) == 1 for found in by_sequence.values())


# --- the sequences of a corpus


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two sources: one of 60 documents with 2 copies, and one of 12, held out by blocks."""
    for name, seeds in (("many", [*range(60), 3, 5]), ("few", range(100, 112))):
        folder = tmp_path / name
        folder.mkdir()
        for number, seed in enumerate(seeds):
            (folder / f"{number:03d}.txt").write_text(some_text(seed, 300))
    sources = {
        "many": {"kind": "text", "path": str(tmp_path / "many"), "weight": 1, "document": "file"},
        "few": {"kind": "text", "path": str(tmp_path / "few"), "weight": 3},
    }
    given = {"sequence_length": 32, "heldout": 0.2, "workers": 1, "cache": str(tmp_path / "cache")}
    given["duplicates"] = "count"
    return text_config(kind="mixture", sources=sources, **given)


def test_a_mixture_is_its_sources_weighted(config: Config, words: PreTrainedTokenizerFast) -> None:
    tokens, rows, order = prepare_mixture(*parts(config), words, masked_format, seed=0)
    texts = corpus_texts(*parts(config))
    alone = {name: prepare(text, words, *parts(config), "train") for name, text in texts.items()}
    assert np.array_equal(
        rows[np.arange(len(rows))], np.concatenate([all_of(part.sequences) for part in alone.values()])
    )
    assert len(order) == len(rows) and order.quotas.tolist() == quotas([1, 3], len(rows)).tolist()
    fed = order.numbers(0, np.arange(len(order)))
    exact = np.bincount(rows[fed].reshape(-1).astype(np.int64), minlength=len(words))
    assert np.abs(tokens.counts - exact).max() < 0.15 * exact.max()  # all but the choice of the sequences
    assert tokens.counts.sum() == pytest.approx(exact.sum(), rel=1e-3)
    assert tokens.tokens == pytest.approx((rows[fed] != words.pad_token_id).sum(), rel=0.02)
    assert tokens.documents == sum(each.documents for each in alone.values())
    assert tokens.duplicates == {"documents": 74, "exact": 2}
    assert "% many (62 text files" in tokens.name and "% few (12 text files" in tokens.name


def test_corpus_rows_are_shared_by_weight(config: Config, words: PreTrainedTokenizerFast) -> None:
    config = change(config, "corpus.max_sequences", 400)
    tokens, rows, order = prepare_mixture(*parts(config), words, masked_format, seed=0)
    few = len(tokens.sources["few"].sequences)
    assert few < 300 and order.sizes.tolist() == [100, few] and len(rows) == len(order) == 100 + few
    other = prepare_mixture(*parts(config), words, masked_format, seed=5)
    assert np.array_equal(other.sequences[np.arange(50)], rows[np.arange(50)]), "the choice does not depend on the seed"
    assert other.tokens.digest == tokens.digest


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["corpus.sources={a: {kind: text, path: T, weight: 1}}"], "corpus.sources: is for a mixture, but corpus.kind"),
        (["corpus=mixture", "corpus.path=T"], "corpus.path=T: each source of a mixture has its own"),
        (["corpus=mixture"], "corpus=mixture: needs two sources or more; give corpus.sources='{wiki: {kind: wikitext"),
        (["corpus=mixture", "corpus.sources={a: {kind: text, weight: 0}}"], "corpus.sources.a.weight=0: "),
        (["corpus=mixture", "corpus.sources={a-b: {kind: text, weight: 1}}"], "no name of a source; take letters"),
        (["+recipe=mixture", "corpus.sources.wiki.path=T"], "corpus.sources.wiki.path=T: no such file or folder"),
        (["+recipe=mixture", "evaluate.sets=[heldout,heldout_wiki]", "+evaluate.sources.heldout_wiki={kind: bundled}"],
         "evaluate.sets: names heldout_wiki, the held-out set of a source of the mixture"),
        (["+recipe=mixture", "objective=classes", "teacher=none", "corpus.heldout=0", "corpus.fallback=false"],
         "corpus=mixture: is for text"),
        (["+recipe=mixture", "corpus.sources.wiki={kind: chat, weight: 1}"], "corpus.sources.wiki: has prompts"),
    ],
)  # fmt: skip
def test_what_cannot_be_mixed_is_one_line(given: list[str], expected: str) -> None:
    with pytest.raises(SettingError) as error:
        check(composed(*given))
    assert expected in str(error.value) and "\n" not in str(error.value)
