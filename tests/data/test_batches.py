"""Batches: the same sequences in a step for every split, each sequence once an epoch, and windows without memory."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tiny import LENGTH, VOCAB, make_batches, make_masks, make_rows

from distill.data import batches as module
from distill.data.batch import Batch
from distill.data.batches import WINDOWS_AHEAD, Batches, num_threads, prefetch
from distill.data.collate.mlm import IGNORE

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


def originals(window: list[Batch]) -> Counter[tuple[int, ...]]:
    rows = []
    for batch in window:
        targets = targets_of(batch)
        rows += torch.where(targets == IGNORE, batch.ids, targets).tolist()
    return Counter(map(tuple, rows))


def test_a_dummy_reads_nothing_that_its_rank_does_not_read(tokenizer: Any) -> None:
    """Sequence 0 may lie in a block that would be fetched for it alone."""
    made = make(tokenizer, 1, 4, 2, 3, equal_windows=True)
    last = made.steps_per_epoch - 1
    read = Mock(wraps=made.sequences, shape=made.sequences.shape)
    read.__getitem__ = Mock(side_effect=made.sequences.__getitem__)
    made = replace(made, sequences=read)
    window = made.window(last)
    dealt = {int(row) for batch in window if not batch.is_dummy for row in batch.row_ids}
    assert any(batch.is_dummy for batch in window)
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
    expected = Counter(tuple(row.tolist()) for row in ROWS)
    for epoch in range(2):
        windows = [batches.window(epoch * 7 + step) for step in range(7)]
        assert sum((originals(window) for window in windows), Counter()) == expected
        assert [[len(b.ids) for b in window] for window in windows] == [[4, 4]] * 6 + [[4, 1]]


def test_epochs_differ_in_order_and_masks_but_not_in_rows(tokenizer: Any) -> None:
    batches = make(tokenizer, 53, 1)
    first, second = batches.window(0)[0], batches.window(1)[0]
    assert not torch.equal(first.ids, second.ids)
    assert originals([first]) == originals([second]) and lines([[first]]) != lines([[second]])
    assert not torch.equal(first.ids, make(tokenizer, 53, 1, seed=1).window(0)[0].ids)


def test_static_masks_are_the_same_in_every_epoch(tokenizer: Any) -> None:
    batches = make_batches(ROWS, make_masks(tokenizer, ROWS), 53, 1, 0, static=True)
    first, second = batches.window(0), batches.window(1)
    assert lines([first]) == lines([second]) and not torch.equal(first[0].ids, second[0].ids)
    assert lines([first]) == lines([make(tokenizer, 53, 1).window(0)])


@pytest.mark.parametrize("threads", [0, 2])
def test_what_is_read_ahead_comes_with_its_rows(tokenizer: Any, threads: int) -> None:
    batches = replace(make(tokenizer), threads=threads)
    window = next(batches.stream(0, 1, CPU, lambda batch: batch.with_teacher_data(ids=torch.from_numpy(batch.row_ids))))
    for batch, without in zip(window, make(tokenizer).window(0), strict=True):
        assert not without.teacher_data
        targets = targets_of(batch)
        rows = torch.where(targets == IGNORE, batch.ids, targets)
        assert rows.tolist() == ROWS[batch.teacher_data["ids"].numpy()].tolist()


def test_dropout_is_keyed_by_seed_epoch_and_row(tokenizer: Any) -> None:
    batches = make(tokenizer, 53, 1)
    first, second = batches.window(0)[0], batches.window(1)[0]
    of_first = dict(zip(first.row_ids.tolist(), first.dropout_keys, strict=True))
    of_second = dict(zip(second.row_ids.tolist(), second.dropout_keys, strict=True))
    assert len(set(of_first.values()) | set(of_second.values())) == 2 * 53
    small = make(tokenizer, 2, 3, rank=1, size=2)
    part = small.window(2)[0]
    assert [of_first[row] for row in part.row_ids.tolist()] == list(part.dropout_keys)


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.ids, b.ids)
        and torch.equal(targets_of(a), targets_of(b))
        and np.array_equal(a.row_ids, b.row_ids)
        and (a.documents is None) == (b.documents is None)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("threads", [0, 1, 2, 7])
def test_window_has_no_memory_and_stream_gives_the_windows(tokenizer: Any, threads: int) -> None:
    batches = replace(make(tokenizer), threads=threads)
    backwards = {step: batches.window(step) for step in reversed(range(16))}
    for start, stop in ((0, 16), (5, 16), (13, 14), (4, 4)):
        streamed = list(batches.stream(start, stop, CPU))
        assert len(streamed) == stop - start
        for step, window in enumerate(streamed, start):
            assert same(window, backwards[step])


@pytest.mark.parametrize("threads", [0, 2])
def test_stream_can_be_left_early_and_hands_on_errors(tokenizer: Any, threads: int) -> None:
    stream = replace(make(tokenizer), threads=threads).stream(0, 10**9, CPU)
    next(stream)
    stream.close()
    broken = replace(make(tokenizer), threads=threads)
    object.__setattr__(broken, "sequences", np.full((53, LENGTH), VOCAB + 5))  # ids that the masker does not know
    with pytest.raises(IndexError):
        next(broken.stream(0, 3, CPU))


def test_threads_follow_the_cores_of_a_rank_unless_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, local_size, expected in ((2, 1, 1), (16, 1, 4), (16, 2, 2), (16, 8, 1), (4, 8, 1), (128, 1, 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert num_threads(None, local_size) == expected
        assert num_threads(0, local_size) == 0 and num_threads(9, local_size) == 9


# --- windows ahead


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

    monkeypatch.setattr(module, "ThreadPoolExecutor", Pool)
    windows = iter(prefetch(prepare, range(10**9), 1))
    assert next(windows) == 0
    windows.close()  # type: ignore[attr-defined]
    assert begun in ([0], [0, 1])
