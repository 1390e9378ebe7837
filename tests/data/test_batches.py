"""Batches: the same rows in a step for every split, each row once an epoch, and windows without memory."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import LENGTH, PAD, VOCAB, make_masker, make_rows

from distill.data.batches import Batch, Batches, make_batch, num_workers, some_rows
from distill.data.collate.mlm import IGNORE
from distill.seed import key

ROWS = make_rows(53, shortest=5)
CPU = torch.device("cpu")


def make(
    tokenizer: Any, batch_size: int = 4, accumulate: int = 2, rank: int = 0, size: int = 1, seed: int = 0
) -> Batches:
    return Batches(ROWS, make_masker(tokenizer, ROWS), PAD, batch_size, accumulate, seed, rank, size)


def lines(windows: list[list[Batch]]) -> Counter[tuple[int, ...]]:
    """Every row that the batches hold, with its mask and its targets."""
    return Counter(
        tuple(torch.cat([row, targets]).tolist())
        for window in windows
        for batch in window
        for row, targets in zip(batch.inputs, batch.targets.view(batch.inputs.shape), strict=True)
    )


def originals(window: list[Batch]) -> Counter[tuple[int, ...]]:
    rows = []
    for batch in window:
        targets = batch.targets.view(batch.inputs.shape)
        rows += torch.where(targets == IGNORE, batch.inputs, targets).tolist()
    return Counter(map(tuple, rows))


SPLITS = [(size, rows) for size in (1, 2, 3, 6, 12) for rows in (1, 2, 4, 12) if 12 % (size * rows) == 0]


@pytest.mark.parametrize(("size", "batch_size"), SPLITS)
def test_same_rows_in_a_step_for_every_split(tokenizer: Any, size: int, batch_size: int) -> None:
    whole = make(tokenizer, 12, 1)
    ranks = [make(tokenizer, batch_size, 12 // (size * batch_size), rank, size) for rank in range(size)]
    assert {b.steps_per_epoch for b in ranks} == {5} and {b.rows_per_step for b in ranks} == {12}
    for step in (0, 3, 4, 5, 9):
        windows = [batches.window(step) for batches in ranks]
        assert lines(windows) == lines([whole.window(step)])
        shares = [sum(len(batch.inputs) for batch in window) for window in windows]
        assert max(shares) - min(shares) <= 1
        assert all(len(batch.inputs) <= batch_size for window in windows for batch in window)


def test_every_row_once_an_epoch_and_the_last_window_is_short(tokenizer: Any) -> None:
    batches = make(tokenizer)
    expected = Counter(tuple(row.tolist()) for row in ROWS)
    for epoch in range(2):
        windows = [batches.window(epoch * 7 + step) for step in range(7)]
        assert sum((originals(window) for window in windows), Counter()) == expected
        assert [[len(b.inputs) for b in window] for window in windows] == [[4, 4]] * 6 + [[4, 1]]


def test_fewer_rows_than_a_step(tokenizer: Any) -> None:
    batches = make(tokenizer, 16, 50)
    assert batches.steps_per_epoch == 1
    assert [len(b.inputs) for b in batches.window(0)] == [16, 16, 16, 5]
    ranks = [make(tokenizer, 1, 1, rank, 60) for rank in range(60)]
    assert [len(b.window(0)) for b in ranks] == [1] * 53 + [0] * 7


def test_epochs_differ_in_order_and_masks_but_not_in_rows(tokenizer: Any) -> None:
    batches = make(tokenizer, 53, 1)
    first, second = batches.window(0)[0], batches.window(1)[0]
    assert not torch.equal(first.inputs, second.inputs)
    assert originals([first]) == originals([second]) and lines([[first]]) != lines([[second]])
    assert not torch.equal(first.inputs, make(tokenizer, 53, 1, seed=1).window(0)[0].inputs)


def test_static_masks_are_the_same_in_every_epoch(tokenizer: Any) -> None:
    batches = Batches(ROWS, make_masker(tokenizer, ROWS, static=True), PAD, 53, 1, 0)
    first, second = batches.window(0), batches.window(1)
    assert lines([first]) == lines([second]) and not torch.equal(first[0].inputs, second[0].inputs)
    assert lines([first]) == lines([make(tokenizer, 53, 1).window(0)])


def test_what_the_teacher_said_comes_with_the_rows(tokenizer: Any) -> None:
    def taught(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return numbers[:, None].astype(np.int32), np.zeros((len(numbers), 2), np.float16)

    batches = replace(make(tokenizer), taught=taught)
    window = next(batches.stream(0, 1, CPU))
    plain = make(tokenizer).window(0)
    for batch, without in zip(window, plain, strict=True):
        assert batch.top_ids is not None and batch.top_log_probs is not None and without.top_ids is None
        targets = batch.targets.view(batch.inputs.shape)
        rows = torch.where(targets == IGNORE, batch.inputs, targets)
        assert rows.tolist() == ROWS[batch.top_ids[:, 0].numpy()].tolist()


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("workers", [0, 1, 2, 7])
def test_window_has_no_memory_and_stream_gives_the_windows(tokenizer: Any, workers: int) -> None:
    batches = replace(make(tokenizer), workers=workers)
    backwards = {step: batches.window(step) for step in reversed(range(16))}
    for start, stop in ((0, 16), (5, 16), (13, 14), (4, 4)):
        streamed = list(batches.stream(start, stop, CPU))
        assert len(streamed) == stop - start
        for step, window in enumerate(streamed, start):
            assert same(window, backwards[step])


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_can_be_left_early_and_hands_on_errors(tokenizer: Any, workers: int) -> None:
    stream = replace(make(tokenizer), workers=workers).stream(0, 10**9, CPU)
    next(stream)
    stream.close()
    broken = replace(make(tokenizer), workers=workers)
    object.__setattr__(broken, "rows", np.full((53, LENGTH), VOCAB + 5))  # ids that the masker does not know
    with pytest.raises(IndexError):
        next(broken.stream(0, 3, CPU))


def test_places_of_a_batch(tokenizer: Any) -> None:
    numbers = np.arange(6)
    ids = ROWS[numbers].astype(np.int64)
    batch = make_batch(ids, key(0, "mask", 0, numbers), make_masker(tokenizer, ROWS), PAD)
    assert batch.targets.shape == (6 * LENGTH,) and batch.inputs.shape == (6, LENGTH)
    assert batch.masked.tolist() == [i for i, t in enumerate(batch.targets.tolist()) if t != IGNORE]
    assert batch.real is not None and batch.attention is not None
    assert batch.real.tolist() == [i for i, t in enumerate(ids.reshape(-1)) if t != PAD]
    assert batch.attention.tolist() == (ids != PAD).tolist()
    assert (batch.num_targets, batch.num_positions) == (len(batch.masked), int((ids != PAD).sum()))
    full = make_batch(make_rows(3).astype(np.int64), key(0, "x", numbers[:3]), make_masker(tokenizer, ROWS), PAD)
    assert full.real is None and full.attention is None and full.num_positions == 3 * LENGTH


def test_some_rows_is_a_fixed_choice_in_the_old_order() -> None:
    numbers = np.arange(100)
    chosen = some_rows(numbers, 10, "training rows")
    assert len(chosen) == 10 and (np.diff(chosen) > 0).all()
    assert np.array_equal(chosen, some_rows(numbers, 10, "training rows"))
    assert not np.array_equal(chosen, some_rows(numbers, 10, "other rows"))
    assert some_rows(numbers, None, "x") is numbers and some_rows(numbers, 100, "x") is numbers


def test_workers_follow_the_cores_of_a_rank_unless_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, local_size, expected in ((2, 1, 1), (16, 1, 4), (16, 2, 2), (16, 8, 1), (4, 8, 1), (128, 1, 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert num_workers(None, local_size) == expected
        assert num_workers(0, local_size) == 0 and num_workers(9, local_size) == 9
