"""Swapped segments with their labels and segment numbers, and masked n-grams."""

from typing import Any

import numpy as np
import tiny
from tiny import CLS, PAD, SEP, SPECIAL, VOCAB, WORDS

from distill.config.settings import MaskingConfig
from distill.data.collate.mlm import IGNORE, masked_lm
from distill.data.collate.mlm_sop import MaskedLMAndOrder, arrange
from distill.runtime.seed import key

FIRST = len(SPECIAL)


def pair_rows(count: int, length: int = 40, seed: int = 0) -> np.ndarray:
    """Sequences [CLS] A [SEP] B [SEP] with padding, of random ids."""
    draw = np.random.default_rng(seed)
    rows = np.full((count, length), PAD)
    for row in rows:
        a, b = draw.integers(1, length // 2 - 1, 2)
        ids = draw.integers(FIRST, VOCAB, a + b)
        row[: a + b + 3] = [CLS, *ids[:a], SEP, *ids[a:], SEP]
    return rows


def swapped_plainly(row: np.ndarray) -> tuple[list[int], list[int]]:
    """The sequence with its segments swapped and its segment numbers, by list operations."""
    ids = row.tolist()
    middle = ids.index(SEP)
    end = ids.index(SEP, middle + 1)
    a, b = ids[1:middle], ids[middle + 1 : end]
    padding = ids[end + 1 :]
    return [CLS, *b, SEP, *a, SEP, *padding], [0] * (len(b) + 2) + [1] * (len(a) + 1) + [0] * len(padding)


def test_segments_are_swapped_as_lists_would_be() -> None:
    rows = pair_rows(200)
    ids, numbers = arrange(rows, SEP, np.ones(200, bool))
    for row, own, segment in zip(rows, ids, numbers, strict=True):
        assert (own.tolist(), segment.tolist()) == swapped_plainly(row)
        again, _ = arrange(own[None], SEP, np.ones(1, bool))
        assert np.array_equal(again[0], row)
    kept, numbers = arrange(rows, SEP, np.zeros(200, bool))
    assert np.array_equal(kept, rows)
    for row, segment in zip(rows, numbers, strict=True):
        middle, end = np.flatnonzero(row == SEP)
        assert segment.tolist() == [0] * (middle + 1) + [1] * (end - middle) + [0] * (len(row) - end - 1)


def collator(tokenizer: Any, rows: np.ndarray, swaps: bool = True) -> MaskedLMAndOrder:
    counts = np.bincount(rows.reshape(-1), minlength=VOCAB)
    words = masked_lm(MaskingConfig(mlm_probability=0.15, mask=0.0, keep=1.0, smoothing=0.0), tokenizer, counts)
    return MaskedLMAndOrder(words, SEP, swaps)


def test_half_of_the_rows_are_swapped_anew_in_every_epoch(tokenizer: Any) -> None:
    rows = pair_rows(2000)
    numbers = np.arange(len(rows))
    batches = [collator(tokenizer, rows).collate(rows, key(0, "mask", epoch, numbers), numbers) for epoch in (0, 1)]
    labels = [batch.labels["sop"].targets.numpy() for batch in batches]
    assert 0.46 < labels[0].mean() < 0.54 and 0.4 < (labels[0] != labels[1]).mean() < 0.6
    for batch, swapped in zip(batches, labels, strict=True):
        ids, segments = arrange(rows, SEP, swapped.astype(bool))
        assert np.array_equal(batch.ids.numpy(), ids), "with keep=1 words are left as they are"
        assert np.array_equal(batch.inputs["token_type_ids"].numpy(), segments)
    assert next(iter(batches[0].labels)) == "mlm", "the tokens to predict come first"


def test_without_the_order_nothing_is_swapped(tokenizer: Any) -> None:
    rows = pair_rows(50)
    batch = collator(tokenizer, rows, swaps=False).collate(rows, key(0, "mask", np.arange(50)), np.arange(50))
    assert "sop" not in batch.labels and np.array_equal(batch.ids.numpy(), rows)


# --- n-grams


def chosen_ngrams(tokenizer: Any, rows: np.ndarray, **settings: Any) -> np.ndarray:
    """Which positions are predicted, [B, S]."""
    counts = np.bincount(rows.reshape(-1), minlength=VOCAB)
    masks = masked_lm(MaskingConfig(**{"smoothing": 0.0, **settings}), tokenizer, counts)
    return masks.mask(rows, key(0, "mask", np.arange(len(rows))))[1] != IGNORE


def word_rows(count: int, length: int = 66) -> np.ndarray:
    """Sequences of whole words only, so that a run of chosen positions is a run of words."""
    draw = np.random.default_rng(3)
    rows = draw.integers(FIRST, FIRST + len(WORDS), (count, length))
    rows[:, 0], rows[:, -1] = CLS, SEP
    return rows


def test_drawn_lengths_are_exact(tokenizer: Any) -> None:
    rows = word_rows(4)
    counts = np.bincount(rows.reshape(-1), minlength=VOCAB)
    masks = masked_lm(MaskingConfig(ngrams=3), tokenizer, counts)
    lengths = masks._ngram_lengths(key(0, "position", np.arange(200_000)))
    shares = np.bincount(lengths, minlength=4)[1:] / len(lengths)
    np.testing.assert_allclose(shares, np.array([6, 3, 2]) / 11, atol=0.005)


def test_words_stay_whole_and_the_cap_holds(tokenizer: Any) -> None:
    rows = tiny.make_rows(300, 60).astype(np.int64)
    chosen = chosen_ngrams(tokenizer, rows, ngrams=3, mlm_probability=0.3, max_predictions=6)
    assert chosen.sum(1).max() <= 6 and (chosen.sum(1) >= 4).mean() > 0.9
    pieces = np.isin(rows, np.arange(FIRST + len(WORDS), VOCAB))
    inner = pieces[:, 1:] & (rows[:, :-1] >= FIRST)  # a piece that continues the word before it
    assert np.array_equal(chosen[:, 1:][inner], chosen[:, :-1][inner])
    assert not chosen[rows < FIRST].any()


def test_no_ngram_reaches_over_a_special_token(tokenizer: Any) -> None:
    rows = word_rows(2000, 9)
    rows[:, 4] = SEP  # three words on either side
    chosen = chosen_ngrams(tokenizer, rows, ngrams=3, mlm_probability=0.5)
    assert not chosen[:, 4].any() and (chosen.sum(1) == 3).all()
    assert chosen[:, 1:4].all(1).any() and (chosen[:, 3] & chosen[:, 5]).any()


def test_a_cap_without_ngrams(tokenizer: Any) -> None:
    chosen = chosen_ngrams(tokenizer, word_rows(50), mlm_probability=0.5, max_predictions=4)
    assert (chosen.sum(1) == 4).all()
