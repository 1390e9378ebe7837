"""Orders and batches: every sequence once an epoch, nothing lost by resuming on other ranks, and mixtures."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from job import composed
from text import some_text
from tiny import (
    LENGTH,
    VOCAB,
    all_of,
    changed,
    make_batches,
    make_masks,
    make_rows,
    make_tokenizer,
    parts,
    records,
    text_config,
)
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config
from distill.data import batches as batches_module
from distill.data import order as order_module
from distill.data.batch import Batch
from distill.data.batches import WINDOWS_AHEAD, Batches, prefetch
from distill.data.collate.mlm import IGNORE
from distill.data.order import FullShuffle, Mixture, Order, WindowedShuffle, order_of, quotas
from distill.data.sequence_format import masked_format
from distill.data.sequence_store import FEWEST_FILES, StackedSequences, choose_sequences, sample_numbers, subsample
from distill.data.tokens import corpus_texts, prepare, prepare_mixture
from distill.runs.check import check
from distill.runtime.errors import SettingError


def starts_of_sizes(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def windowed(blocks: int = 24, rows: int = 40, window: int = 6, seed: int = 3) -> WindowedShuffle:
    """The last block of every third, which ends a shard, is shorter."""
    return WindowedShuffle(starts_of_sizes([rows - 17 * (each % 3 == 2) for each in range(blocks)]), window, seed)


def whole(order: Order, epoch: int) -> np.ndarray:
    return order.numbers(epoch, np.arange(len(order)))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 45), st.integers(0, 9), st.integers(0, 2))
def test_every_row_once_an_epoch(sizes: list[int], window: int, seed: int, epoch: int) -> None:
    order = WindowedShuffle(starts_of_sizes(sizes), window, seed)
    assert np.array_equal(np.sort(whole(order, epoch)), np.arange(sum(sizes)))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 500), st.integers(1, 400))
def test_windows_cover_all_files_and_none_is_too_large(files: int, window: int) -> None:
    bounds = WindowedShuffle(np.arange(files + 1), window, 0).plan(1).edges  # files of one sequence
    assert bounds[0] == 0 and bounds[-1] == files
    assert np.diff(bounds).min() >= 1 and np.diff(bounds).max() <= window
    assert np.diff(bounds).max() - np.diff(bounds).min() <= 1


def test_any_position_is_known_without_what_came_before() -> None:
    order, other = windowed(), windowed()
    for epoch in (0, 1, 5):
        expected = whole(order, epoch)
        positions = np.random.default_rng(epoch).permutation(len(order))[:100]
        assert np.array_equal(other.numbers(epoch, positions), expected[positions])
    assert not np.array_equal(whole(order, 1), whole(order, 2))
    assert not np.array_equal(whole(order, 1), whole(windowed(seed=4), 1))


def test_a_window_is_shuffled_whole_and_alone() -> None:
    order = windowed()
    plan = order.plan(1)
    numbers = whole(order, 1)
    assert len(plan.edges) == 5
    for begin, end in pairwise(plan.edges):
        first, last = np.searchsorted(plan.starts, [begin, end])
        rows = [np.arange(order.starts[b], order.starts[b + 1]) for b in plan.files[first:last]]
        assert np.array_equal(np.sort(numbers[begin:end]), np.sort(np.concatenate(rows)))
        neighbours = np.abs(np.diff(numbers[begin:end])) == 1
        assert neighbours.mean() < 0.05


class Stored(np.ndarray):
    """Sequences that lie in blocks of ten."""

    @property
    def starts(self) -> np.ndarray:
        return np.append(np.arange(0, len(self), 10), len(self))


def test_a_corpus_that_fits_is_shuffled_as_a_whole() -> None:
    rows = np.zeros((100, 8), np.uint16).view(Stored)
    assert isinstance(order_of(rows, 100 * 16, 0), FullShuffle)
    order = order_of(rows, 100 * 16 - 1, 0)
    assert isinstance(order, WindowedShuffle) and order.window == 9 and order.identity is not None
    tiny = order_of(rows, 1, 0)
    assert isinstance(tiny, WindowedShuffle) and tiny.window == 1
    assert isinstance(order_of(np.zeros((100, 8), np.uint16), 1, 0), FullShuffle)


def test_batches_of_all_ranks_are_those_of_one(tokenizer: Any) -> None:
    rows = make_rows(53, shortest=5)
    order = WindowedShuffle(starts_of_sizes([10, 10, 3, 10, 10, 10]), 2, 0)

    def step(number: int, rank: int, size: int) -> dict[int, list[int]]:
        masks = make_masks(tokenizer, rows)
        batches = make_batches(rows, masks, 4, 1, 0, rank=rank, size=size, sequences=12, order=order)
        assert batches.steps_per_epoch == 5
        window = batches.window(number)
        return {int(id): ids.tolist() for batch in window for id, ids in zip(batch.row_ids, batch.ids, strict=True)}

    for number in (0, 4, 7):
        parts = [step(number, rank, 5) for rank in range(5)]
        assert sum(map(len, parts)) == (12 if number % 5 < 4 else 5)
        assert {id: ids for part in parts for id, ids in part.items()} == step(number, 0, 1)


# --- some of many sequences: from few files where they are many

STORED = np.arange(2 * 40_004, dtype=np.uint16).reshape(-1, 2).view(Stored)


def test_of_few_sequences_any_and_of_many_those_of_some_files_are_chosen() -> None:
    assert np.array_equal(choose_sequences(STORED, 50, "one", STORED.nbytes), sample_numbers(len(STORED), 50, "one"))
    assert choose_sequences(STORED, None, "x", 1) is None and choose_sequences(STORED, len(STORED), "x", 1) is None
    for most in (50, 300, 20_000, 40_003):
        chosen, other = (choose_sequences(STORED, most, purpose, 1000) for purpose in ("one", "another"))
        assert len(chosen) == most and (np.diff(chosen) > 0).all() and chosen[-1] < len(STORED)
        assert len(np.unique(chosen // 10)) <= max(FEWEST_FILES, 1.25 * most // 10 + 2)
        assert np.array_equal(chosen, choose_sequences(STORED, most, "one", 1000)) and not np.array_equal(chosen, other)


def test_a_choice_is_in_memory_or_refused() -> None:
    small = subsample(STORED, 100, "training rows", 1000)
    assert isinstance(small, np.ndarray) and small.shape == (100, 2)
    with pytest.raises(SettingError, match=r"corpus\.max_sequences=3000: more than fit.*=1000\); give 250 at most"):
        subsample(STORED, 3000, "training rows", 1000)
    assert subsample(STORED, None, "training rows", 1000) is STORED


ROWS = make_rows(53, shortest=5)
CPU = torch.device("cpu")


def make(
    tokenizer: Any, batch_size: int = 4, accumulate: int = 2, rank: int = 0, size: int = 1, seed: int = 0, **more: Any
) -> Batches:
    return make_batches(ROWS, make_masks(tokenizer, ROWS), batch_size, accumulate, seed, rank=rank, size=size, **more)


def targets_of(batch: Batch) -> torch.Tensor:
    """[B, S], IGNORE where nothing is to be predicted."""
    flat = torch.full((batch.ids.numel(),), IGNORE)
    flat[batch.labels["mlm"].positions] = batch.labels["mlm"].targets
    return flat.view(batch.ids.shape)


def lines(windows: list[list[Batch]]) -> Counter[tuple[int, ...]]:
    """Every sequence that the batches hold, with its mask and its targets."""
    return Counter(
        tuple(torch.cat([row, targets]).tolist())
        for window in windows
        for batch in window
        for row, targets in zip(batch.ids, targets_of(batch), strict=True)
    )


def rows_of(batch: Batch) -> list[tuple[int, ...]]:
    """The sequences before they were masked."""
    targets = targets_of(batch)
    return [*map(tuple, torch.where(targets == IGNORE, batch.ids, targets).tolist())]


def originals(*windows: list[Batch]) -> Counter[tuple[int, ...]]:
    return Counter(row for window in windows for batch in window for row in rows_of(batch))


def test_a_dummy_reads_nothing_that_its_rank_does_not_read(tokenizer: Any) -> None:
    """Sequence 0 may lie in a file that would be fetched for it alone. Nothing in a dummy counts."""
    made = make(tokenizer, 1, 4, 2, 3, equal_windows=True)
    last = made.steps_per_epoch - 1
    read = Mock(wraps=made.sequences, shape=made.sequences.shape)
    read.__getitem__ = Mock(side_effect=made.sequences.__getitem__)
    made = replace(made, sequences=read)
    window = made.window(last)
    dealt = {int(row) for batch in window if not batch.is_dummy for row in batch.row_ids}
    dummies = [batch for batch in window if batch.is_dummy]
    assert dummies and not any(batch.num_valid + len(batch.targets.positions) for batch in dummies)
    assert {int(row) for call in read.__getitem__.call_args_list for row in call.args[0]} <= dealt


@pytest.mark.parametrize("size", [1, 2, 3, 7, 11, 14])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_same_rows_in_a_step_where_ranks_do_not_divide_them(tokenizer: Any, size: int, batch_size: int) -> None:
    """With the sequences of a step given: micro-batches follow from them, and some ranks have one less, or none."""
    whole = make(tokenizer, 11, 1)
    ranks = [make(tokenizer, batch_size, rank=rank, size=size, sequences=11) for rank in range(size)]
    assert {b.steps_per_epoch for b in ranks} == {5} and {b.sequences_per_step for b in ranks} == {11}
    for step in (0, 3, 4, 5, 9):
        windows = [batches.window(step) for batches in ranks]
        assert lines(windows) == lines([whole.window(step)])
        shares = [sum(len(batch.ids) for batch in window) for window in windows]
        assert max(shares) - min(shares) <= 1
        assert [len(window) for window in windows] == [-(-share // batch_size) for share in shares]
        if step % 5 != 4:  # the last of an epoch is short
            assert max(map(len, windows)) == ranks[0].step_shape.micro_batches


def test_every_row_once_an_epoch_and_the_last_window_is_short(tokenizer: Any) -> None:
    batches = make(tokenizer)
    for epoch in range(2):
        windows = [batches.window(epoch * 7 + step) for step in range(7)]
        assert originals(*windows) == Counter(tuple(row.tolist()) for row in ROWS)
        assert [[len(b.ids) for b in window] for window in windows] == [[4, 4]] * 6 + [[4, 1]]


@pytest.mark.parametrize("static", [False, True])
def test_epochs_differ_in_order_and_masks_but_not_in_rows(tokenizer: Any, static: bool) -> None:
    """Static masks are those of the first epoch."""
    batches = make(tokenizer, 53, 1, static=static)
    first, second = batches.window(0), batches.window(1)
    assert not torch.equal(first[0].ids, second[0].ids) and originals(first) == originals(second)
    assert (lines([first]) == lines([second])) == static
    assert lines([first]) == lines([make(tokenizer, 53, 1).window(0)])
    assert not torch.equal(first[0].ids, make(tokenizer, 53, 1, seed=1).window(0)[0].ids)


def test_dropout_is_keyed_by_seed_epoch_and_row(tokenizer: Any) -> None:
    batches = make(tokenizer, 53, 1)
    first, second = batches.window(0)[0], batches.window(1)[0]
    of_first = dict(zip(first.row_ids.tolist(), first.dropout_keys, strict=True))
    of_second = dict(zip(second.row_ids.tolist(), second.dropout_keys, strict=True))
    assert len(set(of_first.values()) | set(of_second.values())) == 2 * 53
    small = make(tokenizer, 2, 3, rank=1, size=2)
    part = small.window(2)[0]
    assert [of_first[row] for row in part.row_ids.tolist()] == list(part.dropout_keys)


@pytest.mark.parametrize("threads", [0, 1, 2, 7])
def test_window_has_no_memory_and_stream_gives_the_windows(tokenizer: Any, threads: int) -> None:
    batches = replace(make(tokenizer), threads=threads)
    backwards = {step: batches.window(step) for step in reversed(range(16))}
    for start, stop in ((0, 16), (5, 16), (13, 14), (4, 4)):
        streamed = list(batches.stream(start, stop, CPU))
        assert len(streamed) == stop - start
        for step, window in enumerate(streamed, start):
            for one, other in zip(window, backwards[step], strict=True):
                assert torch.equal(one.ids, other.ids) and torch.equal(targets_of(one), targets_of(other))
                assert np.array_equal(one.row_ids, other.row_ids)


@pytest.mark.parametrize("threads", [0, 2])
def test_stream_can_be_left_early_and_hands_on_errors(tokenizer: Any, threads: int) -> None:
    stream = replace(make(tokenizer), threads=threads).stream(0, 10**9, CPU)
    next(stream)
    stream.close()
    broken = replace(make(tokenizer), threads=threads)
    object.__setattr__(broken, "sequences", np.full((53, LENGTH), VOCAB + 5))  # ids that the masker does not know
    with pytest.raises(IndexError):
        next(broken.stream(0, 3, CPU))


@pytest.mark.parametrize("threads", [0, 1, 6])
def test_windows_come_in_order_and_few_are_ahead(threads: int) -> None:
    """Storage that is slow and uneven."""
    lock, under_way, most_under_way, taken, farthest = threading.Lock(), 0, 0, 0, 0
    all_at_work = threading.Barrier(max(threads, 1), timeout=60)  # a thread of a busy machine may come late

    def prepare(step: int) -> int:
        nonlocal under_way, most_under_way, farthest
        with lock:
            under_way += 1
            most_under_way, farthest = max(most_under_way, under_way), max(farthest, step - taken)
        if step < 5 + all_at_work.parties:
            all_at_work.wait()
        time.sleep(0.001 + 0.003 * (step % 3))
        with lock:
            under_way -= 1
        return step

    for window in prefetch(prepare, range(5, 65), threads):
        assert window == 5 + taken
        taken += 1
    assert taken == 60 and most_under_way == max(threads, 1)
    assert farthest <= 5 + max(WINDOWS_AHEAD, threads)


def test_leaving_early_prepares_no_further_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window that is under way when the loop leaves comes after it has cancelled the others."""
    begun, cancelled = list[int](), threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(False, cancel_futures=cancel_futures)
            cancelled.set()
            super().shutdown(wait)

    def prepare(step: int) -> int:
        begun.append(step)
        assert step == 0 or cancelled.wait(60)
        return step

    monkeypatch.setattr(batches_module, "ThreadPoolExecutor", Pool)
    windows = iter(prefetch(prepare, range(10**9), 1))
    assert next(windows) == 0
    windows.close()  # type: ignore[attr-defined]
    assert begun in ([0], [0, 1])


SIZES = pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        ((300, 700, 50), (0.3, 0.6, 0.1)),
        ((1000, 10), (1.0, 1.0)),
        ((5, 3), (0.2, 0.8)),
        ((900, 600), (0.002, 0.998)),
    ],
)


def mixed(sizes: tuple[int, ...], weights: tuple[float, ...], seed: int = 7) -> Mixture:
    orders = tuple(FullShuffle(size, number) for number, size in enumerate(sizes))
    return Mixture(tuple("abcd"[: len(sizes)]), weights, orders, tuple(10.0 for _ in sizes), seed)


def source_of(order: Mixture, numbers: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(order.sizes), numbers, side="right")


@pytest.fixture
def small_strata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "STRATUM", 64)


# --- the order


def test_quotas_are_shares_rounded_with_the_same_sum() -> None:
    assert quotas([0.3, 0.7], 10).tolist() == [3, 7]
    assert quotas([1, 1, 1], 10).tolist() == [4, 3, 3]
    draw = np.random.default_rng(0)
    for _ in range(100):
        weights, rows = draw.random(5) + 1e-3, int(draw.integers(0, 1000))
        found, exact = quotas(weights.tolist(), rows), weights / weights.sum() * rows
        assert found.sum() == rows and np.abs(found - exact).max() < 1
        up, down = (exact % 1)[found > exact], (exact % 1)[found <= exact]
        assert not len(up) or not len(down) or up.min() >= down.max(), "the largest remainders"


@SIZES
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


@SIZES
@pytest.mark.usefixtures("small_strata")
def test_a_position_is_known_without_those_before_it(sizes: tuple[int, ...], weights: tuple[float, ...]) -> None:
    order, draw = mixed(sizes, weights), np.random.default_rng(0)
    for epoch in (0, 3):
        numbers, some = order.numbers(epoch, np.arange(len(order))), draw.integers(0, len(order), 40)
        assert np.array_equal(order.numbers(epoch, some), numbers[some])
        assert [int(order.numbers(epoch, some[at : at + 1])[0]) for at in range(5)] == numbers[some[:5]].tolist()
    assert not np.array_equal(order.numbers(0, some), order.numbers(1, some))
    assert not np.array_equal(order.numbers(0, some), mixed(sizes, weights, 8).numbers(0, some)) or len(order) < 10


@SIZES
@pytest.mark.usefixtures("small_strata")
def test_the_mix_is_even_all_along_and_counted(sizes: tuple[int, ...], weights: tuple[float, ...]) -> None:
    order = mixed(sizes, weights)
    sources = source_of(order, order.numbers(2, np.arange(len(order))))
    places = {0, 1, 63, 64, 65, len(order) // 2, len(order) - 1, len(order)}
    for positions in (place for place in places if place <= len(order)):
        counted = 2 * order.quotas + np.bincount(sources[:positions], minlength=len(sizes))
        fed = order.fed(2, positions).values()
        assert [each.sequences for each in fed] == counted.tolist()
        assert [each.passes for each in fed] == pytest.approx(counted / np.array(sizes))
        assert [each.tokens for each in fed] == (10 * counted).tolist()
    for positions in range(0, len(order), 64):  # at the ends of strata to the sequence, up to those that do not fit
        counted = np.bincount(sources[:positions], minlength=len(sizes))
        assert np.abs(counted - positions * order.quotas / len(order)).max() < len(sizes)


# --- batches of it


def test_stacked_rows_are_those_of_their_stores() -> None:
    draw = np.random.default_rng(0)
    stores = [draw.integers(0, 1 << 16, (count, 4)).astype(kind) for count, kind in ((5, "u2"), (3, "u4"), (7, "u2"))]
    stacked, whole = StackedSequences(stores), np.concatenate(stores)
    numbers = draw.integers(0, 15, 40)
    assert stacked.shape == whole.shape and len(stacked) == 15 and stacked.dtype == np.uint32
    assert np.array_equal(stacked[numbers], whole[numbers]) and stacked[numbers[:0]].shape == (0, 4)
    stores[2] = records(stores[2], loss_mask=draw.random(stores[2].shape) < 0.5, inner=stores[2] > 1 << 15)
    mixed = StackedSequences(stores)[numbers]  # of which only one store has prompts
    assert np.array_equal(mixed["id"], whole[numbers]) and mixed["id"].dtype == np.uint32
    for name, usual in (("loss_mask", True), ("inner", False)):
        expected = np.concatenate([np.full((8, 4), usual), stores[2][name]])
        assert np.array_equal(mixed[name], expected[numbers])


def batches_of(rows: np.ndarray, **given: Any) -> Batches:
    masks = make_masks(make_tokenizer(), rows)
    return make_batches(rows, masks, 4, 2, seed=3, order=mixed((12, 8), (0.2, 0.8)), **given)


def test_ranks_share_a_step_and_a_resume_on_others_loses_nothing(rows: np.ndarray) -> None:
    alone = batches_of(rows, sequences=7)
    assert alone.steps_per_epoch == 3
    steps = [np.concatenate([batch.row_ids for batch in alone.window(step)]) for step in range(6)]
    for step, window in enumerate(steps):
        for size in (2, 3):
            ranks = [batches_of(rows, sequences=7, rank=rank, size=size).window(step) for rank in range(size)]
            assert sorted(np.concatenate([batch.row_ids for each in ranks for batch in each])) == sorted(window)
    assert np.bincount(np.concatenate(steps[:3]), minlength=20)[12:].tolist() == [2] * 8  # twice in an epoch of 20


@pytest.mark.parametrize("static", [False, True])
def test_a_row_that_comes_again_has_other_masks_and_dropout(rows: np.ndarray, static: bool) -> None:
    seen: dict[int, list[Any]] = {}
    for batch in batches_of(rows, sequences=20, static=static).window(0):
        for place, row in enumerate(batch.row_ids):
            seen.setdefault(int(row), []).append((batch.ids[place].tolist(), batch.dropout_keys[place]))
    again = [found for found in seen.values() if len(found) == 2]
    assert len(again) == 8 and all(first[1] != second[1] for first, second in again)
    different = sum(first[0] != second[0] for first, second in again)
    assert different == 0 if static else different > 4


# --- the sequences of a corpus


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two sources: one of 60 documents with 2 copies, and one of 12, held out by blocks."""
    for name, seeds in (("many", [*range(60), 3, 5]), ("few", range(100, 112))):
        (tmp_path / name).mkdir()
        for number, seed in enumerate(seeds):
            (tmp_path / name / f"{number:03d}.txt").write_text(some_text(seed, 300))
    sources = {
        "many": {"kind": "text", "path": str(tmp_path / "many"), "weight": 1, "document": "file"},
        "few": {"kind": "text", "path": str(tmp_path / "few"), "weight": 3},
    }
    given = {"sequence_length": 32, "heldout": 0.2, "workers": 1, "cache": str(tmp_path / "cache")}
    return text_config(kind="mixture", sources=sources, duplicates="count", **given)


def test_a_mixture_is_its_sources_weighted(config: Config, words: PreTrainedTokenizerFast) -> None:
    tokens, rows, order = prepare_mixture(*parts(config), words, masked_format, seed=0)
    texts = corpus_texts(*parts(config))
    alone = [prepare(text, words, *parts(config), "train") for text in texts.values()]
    assert np.array_equal(all_of(rows), np.concatenate([all_of(part.sequences) for part in alone]))
    assert len(order) == len(rows) and order.quotas.tolist() == quotas([1, 3], len(rows)).tolist()
    fed = all_of(rows)[order.numbers(0, np.arange(len(order)))]
    exact = np.bincount(fed.reshape(-1).astype(np.int64), minlength=len(words))
    assert np.abs(tokens.counts - exact).max() < 0.15 * exact.max()  # all but the choice of the sequences
    assert tokens.counts.sum() == pytest.approx(exact.sum(), rel=1e-3)
    assert tokens.tokens == pytest.approx((fed != words.pad_token_id).sum(), rel=0.02)
    assert tokens.documents == sum(each.documents for each in alone)
    assert tokens.duplicates == {"documents": 74, "exact": 2}
    assert "% many (62 text files" in tokens.name and "% few (12 text files" in tokens.name


def test_corpus_rows_are_shared_by_weight(config: Config, words: PreTrainedTokenizerFast) -> None:
    made = [prepare_mixture(*parts(changed(config, max_sequences=400)), words, masked_format, seed=n) for n in (0, 5)]
    (tokens, rows, order), other = made
    few = len(tokens.sources["few"].sequences)
    assert few < 300 and order.sizes.tolist() == [100, few] and len(rows) == len(order) == 100 + few
    assert np.array_equal(all_of(other.sequences), all_of(rows)), "the choice does not depend on the seed"
    assert other.tokens.digest == tokens.digest


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["corpus.sources={a: {kind: text, path: T, weight: 1}}"], "corpus.sources: is for a mixture, but corpus.kind"),
        (["corpus=mixture", "corpus.path=T"], "corpus.path=T: each source of a mixture has its own"),
        (["corpus=mixture"], "corpus=mixture: needs two sources or more; give corpus.sources='{wiki: {kind: wikitext"),
        (["corpus=mixture", "corpus.sources={a-b: {kind: text, weight: 1}}"], "no name of a source; take letters"),
        (["+recipe=mixture", "corpus.sources.wiki.path=T"], "corpus.sources.wiki.path=T: no such file or folder"),
        (["+recipe=mixture", "evaluate.sets=[heldout,heldout_wiki]", "+evaluate.sources.heldout_wiki={kind: bundled}"],
         "evaluate.sets: names heldout_wiki, the held-out set of a source of the mixture"),
        (["+recipe=mixture", "corpus.sources.wiki={kind: chat, weight: 1}"], "corpus.sources.wiki: has prompts"),
    ],
)  # fmt: skip
def test_what_cannot_be_mixed_is_one_line(given: list[str], expected: str) -> None:
    with pytest.raises(SettingError) as error:
        check(composed(*given))
    assert expected in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(SettingError, match=r"corpus.sources.a.weight=1e-06 is too small: of 1,010 sequences an epoch"):
        mixed((1000, 10), (1e-6, 1.0))
