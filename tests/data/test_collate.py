"""What collators make of sequences: next tokens, masks, swapped segments, and pairs of segments."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import book
from reading import prepared
from tiny import CLS, MASK, PAD, SEP, SPECIAL, VOCAB, WORDS, make_masks, make_rows, records, text_config
from tokenizers.processors import TemplateProcessing
from vocabularies import END as END_TEXT
from vocabularies import vocabulary_of

from distill.config.settings import MaskingConfig
from distill.data.batch import PADDING, Batch
from distill.data.collate.clm import CausalLM, causal_lm
from distill.data.collate.mlm import IGNORE, MaskedLM, masked_lm
from distill.data.collate.mlm_sop import MaskedLMAndOrder, arrange
from distill.data.segment_pairs import PairWriter, sentences
from distill.data.sequence_format import SequenceFormat, causal_format, first_token, paired_format
from distill.data.sources.gutenberg import clean
from distill.runtime.seed import key

START, END, FILL = 1, 2, 40
# [document start, end]: Llama has both, GPT-2 an end alone.
BOTH, END_ALONE = (SequenceFormat(None, None, start, END, None, FILL, 1) for start in (START, None))


def some_rows(seed: int, padded: bool) -> np.ndarray:
    """[6, 11] ids with ends of documents anywhere, at both ends of a sequence and side by side too."""
    random = np.random.default_rng(seed)
    rows = random.integers(3, 40, (6, 11))
    rows[random.random(rows.shape) < 0.3] = END
    if padded:
        for row, length in zip(rows, (11, 10, 5, 1, 7, 11), strict=True):
            row[length:] = FILL
    return rows


def naive(row: np.ndarray, packed: bool) -> tuple[list[int], list[int], list[int | None]]:
    """Position, document and target of each column, None where nothing is to be predicted."""
    positions, documents, position, document = [], [], 0, 0
    for column, id_ in enumerate(row):
        before = row[column - 1] if column else None
        if before is not None and ((packed and before == END) or (id_ == FILL and before != FILL)):
            position, document = 0, document + 1
        positions.append(position)
        documents.append(document)
        position += 1
    targets: list[int | None] = []
    for column in range(len(row)):
        last = column + 1 == len(row) or documents[column + 1] != documents[column] or row[column + 1] == FILL
        targets.append(None if last else int(row[column + 1]))
    return positions, documents, targets


def collated(rows: np.ndarray, collator: CausalLM) -> Batch:
    numbers = np.arange(len(rows))
    return collator.collate(rows, numbers.astype(np.uint64), numbers + 7)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows_format", [BOTH, END_ALONE])
def test_batches_are_those_of_a_loop(rows_format: SequenceFormat, packed: bool, padded: bool) -> None:
    for seed in range(5):
        rows = some_rows(seed, padded)
        batch = collated(rows, CausalLM(rows_format, packed))
        assert ("position_ids" in batch.inputs) == packed and list(batch.labels) == ["clm"]
        found = dict(zip(*(each.tolist() for each in batch.targets), strict=True))
        expected, starts = {}, list[int]()
        for number, row in enumerate(rows):
            positions, documents, targets = naive(row, packed)
            assert CausalLM(rows_format, packed).documents(rows)[number].tolist() == documents
            if packed:
                assert batch.inputs["position_ids"][number].tolist() == positions
                starts += [number * 11 + column for column, position in enumerate(positions) if position == 0]
            expected |= {number * 11 + column: id_ for column, id_ in enumerate(targets) if id_ is not None}
        assert found == expected and FILL not in found.values()
        lengths = batch.inputs["document_lengths"]
        assert lengths.sum() == rows.size and (not packed or [0, *lengths.cumsum(0).tolist()[:-1]] == starts)
        valid = rows != FILL
        assert batch.num_valid == valid.sum() and batch.row_ids.tolist() == list(range(7, 13))
        np.testing.assert_array_equal(batch.ids.numpy(), np.where(valid, rows, 0))
        assert (batch.documents is None) == (batch.valid_positions is None) == valid.all()
        if batch.documents is not None and batch.valid_positions is not None:
            np.testing.assert_array_equal(batch.documents.numpy(), np.where(valid, 0, PADDING))
            np.testing.assert_array_equal(batch.valid_positions.numpy(), np.flatnonzero(valid))


def test_models_that_expect_a_first_token_get_it_in_every_sequence() -> None:
    """A sequence that continues a document begins with it too; nothing else differs, and padding stays padding."""
    rows = np.array([[START, 5, 6, 7], [8, 9, END, START], [END, START, 5, 6], [FILL, FILL, FILL, FILL]])
    plain, given = (collated(rows, CausalLM(BOTH, True, first)) for first in (None, START))
    assert given.ids.tolist() == [[START, 5, 6, 7], [START, 9, END, START], [START, START, 5, 6], [0, 0, 0, 0]]
    for one, other in zip(plain.targets, given.targets, strict=True):
        assert one.tolist() == other.tolist()
    assert plain.inputs["position_ids"].tolist() == given.inputs["position_ids"].tolist()
    assert CausalLM(BOTH, True, START).identity != CausalLM(BOTH, True).identity
    # A conversation stays as its template has written it: Zephyr's writes no beginning-of-text token.
    rows = records([[5, 6, 7], [5, 6, 7]], inner=[[True, False, False], [False] * 3])
    assert collated(rows, CausalLM(BOTH, True, START)).ids.tolist() == [[5, 6, 7], [START, 6, 7]]


def test_who_expects_a_first_token_is_seen_by_the_tokenizer() -> None:
    llama, gpt2 = vocabulary_of("llama"), vocabulary_of("gpt2")
    assert first_token(llama) is None and first_token(gpt2) is None
    start, end = llama.bos_token_id, llama.eos_token_id
    llama.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{llama.bos_token} $A", special_tokens=[(llama.bos_token, start)]
    )
    assert causal_lm(llama, True) == CausalLM(causal_format(llama), True, start) and start != end
    # One token for both ends, as in OPT: no token marks where a document begins, so its text would be lost.
    gpt2.backend_tokenizer.post_processor = TemplateProcessing(single=f"{END_TEXT} $A", special_tokens=[(END_TEXT, 0)])
    assert gpt2.encode("a")[0] == gpt2.bos_token_id == gpt2.eos_token_id and first_token(gpt2) is None


FIRST = len(SPECIAL)


def apply(mask: MaskedLM, rows: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return mask.mask(rows.astype(np.int64), key(0, "mask", epoch, np.arange(len(rows))))


def chosen(tokenizer: Any, rows: np.ndarray, **settings: Any) -> np.ndarray:
    """Which positions are predicted, [B, S]."""
    return apply(make_masks(tokenizer, rows, **settings), rows)[1] != IGNORE


def is_near(seen: float, expected: float, count: int) -> bool:
    """Whether a fraction of so many draws is within 4.5 standard errors of what is expected."""
    return abs(seen - expected) < 4.5 * np.sqrt(expected * (1 - expected) / count)


@pytest.mark.parametrize("share", [0.01, 0.15, 0.4, 1.0])
def test_share_of_every_row_is_exact(tokenizer: Any, share: float) -> None:
    rows = make_rows(300, 40, shortest=3)
    maskable = (rows >= FIRST).sum(1)
    found = chosen(tokenizer, rows, mlm_probability=share).sum(1)
    assert np.array_equal(found, np.maximum(np.rint(share * maskable), 1))


def test_special_tokens_are_never_chosen_nor_drawn(tokenizer: Any) -> None:
    rows = make_rows(400, 30, shortest=3)
    inputs, targets = apply(make_masks(tokenizer, rows, mlm_probability=1.0, mask=0.0, keep=0.0), rows)
    special = rows < FIRST
    assert (targets[special] == IGNORE).all() and np.array_equal(inputs[special], rows[special])
    assert np.array_equal(targets[~special], rows[~special]) and inputs[~special].min() >= FIRST
    drawn = np.bincount(inputs[~special], minlength=VOCAB)[FIRST:]
    expected = drawn.sum() / len(drawn)
    assert ((drawn - expected) ** 2 / expected).sum() < 75  # chi-squared, 38 degrees of freedom, 0.03 %


@pytest.mark.parametrize("settings", [{}, {"whole_words": True}, {"ngrams": 3}])
def test_row_without_ordinary_tokens_has_no_targets(tokenizer: Any, settings: dict[str, Any]) -> None:
    rows = np.array([[CLS, SEP, PAD, PAD], [CLS, 7, SEP, PAD]], np.uint16)
    inputs, targets = apply(make_masks(tokenizer, rows, **settings), rows)
    assert (targets == IGNORE).sum(1).tolist() == [4, 3] and inputs[0].tolist() == [CLS, SEP, PAD, PAD]


def test_fates_have_their_shares(tokenizer: Any) -> None:
    rows = make_rows(2000, 64)
    inputs, targets = apply(make_masks(tokenizer, rows, mlm_probability=0.5), rows)
    picked = targets != IGNORE
    assert np.array_equal(inputs[~picked], rows[~picked]) and np.array_equal(targets[picked], rows[picked])
    assert is_near((inputs[picked] == MASK).mean(), 0.8, picked.sum())
    kept = 0.1 + 0.1 / (VOCAB - FIRST)  # a random token may be the same one
    assert is_near((inputs[picked] == rows[picked]).mean(), kept, picked.sum())


@pytest.mark.parametrize("smoothing", [0.0, 0.7])
def test_choice_follows_the_weights(tokenizer: Any, smoothing: float) -> None:
    """One of two tokens is drawn from each sequence: the first with the chance w1 / (w1 + w2), w = count^-smoothing."""
    frequent, rare, trials = 6, 7, 20_000
    rows = np.tile(np.array([CLS, frequent, rare, SEP], np.uint16), (trials, 1))
    counts = np.zeros(VOCAB, np.int64)
    counts[frequent], counts[rare] = 1000, 10
    mask = masked_lm(MaskingConfig(mlm_probability=0.5, smoothing=smoothing), tokenizer, counts)
    targets = apply(mask, rows)[1]
    weights = np.array([1000.0, 10.0]) ** -smoothing
    assert is_near((targets[:, 1] == frequent).mean(), weights[0] / weights.sum(), trials)
    assert ((targets != IGNORE).sum(1) == 1).all()


@pytest.mark.parametrize("whole_words", [False, True])
def test_mask_of_a_row_alone_is_its_mask_in_a_batch(tokenizer: Any, whole_words: bool) -> None:
    rows = make_rows(50, 24, shortest=4)
    mask = make_masks(tokenizer, rows, whole_words=whole_words)
    batch = apply(mask, rows, epoch=3)
    for number in (0, 17, 49):
        end = int((rows[number] != PAD).sum())  # nor does the padding after it matter
        alone = mask.mask(rows[number : number + 1, :end].astype(np.int64), key(0, "mask", 3, np.array([number])))
        assert all(np.array_equal(one[0], all_[number, :end]) for one, all_ in zip(alone, batch, strict=True))


# --- whole words and n-grams


def words_of(row: np.ndarray, is_continuation: np.ndarray) -> list[list[int]]:
    """The positions of each word of a sequence."""
    words: list[list[int]] = []
    for position, token in enumerate(row):
        if token >= FIRST:
            joins = is_continuation[token] and position and row[position - 1] >= FIRST
            words[-1].append(position) if joins else words.append([position])
    return words


def test_whole_words_stay_whole(tokenizer: Any) -> None:
    rows = make_rows(300, 40, shortest=4)
    mask = make_masks(tokenizer, rows, whole_words=True, mlm_probability=0.3)
    assert mask.is_continuation.tolist() == [t.startswith("##") for t in tokenizer.convert_ids_to_tokens(range(VOCAB))]
    picked = apply(mask, rows)[1] != IGNORE
    longest = 0
    for row, own in zip(rows, picked, strict=True):
        words = words_of(row, mask.is_continuation)
        whole = [word for word in words if own[word].any()]
        assert whole and all(own[word].all() for word in whole) and own.sum() == sum(map(len, whole))
        longest = max(longest, *map(len, whole))
        assert own.sum() <= max(1, np.rint(0.3 * sum(map(len, words)))) or len(whole) == 1
    assert longest >= 3
    # Near the share that was asked for: only what the last word would overrun is missing.
    assert 0.26 < picked.sum() / (rows >= FIRST).sum() <= 0.31


@pytest.mark.parametrize(("family", "word"), [("roberta", "\u0120the"), ("modernbert", "\u0120the"), ("bert", "the")])
def test_numbers_signs_in_a_vocabulary_of_bytes_are_text(family: str, word: str) -> None:
    """RoBERTa's and ModernBERT's vocabularies have a token ##, as every text may."""
    tokenizer = vocabulary_of(family)
    tokenizer.add_tokens(["##"])
    for settings in ({"whole_words": True}, {"ngrams": 3}):
        mask = masked_lm(MaskingConfig(**settings), tokenizer, np.ones(len(tokenizer), np.int64))
        inside = tokenizer.convert_tokens_to_ids(["##a" if family == "bert" else "a", "##", word])
        assert mask.is_continuation[inside].tolist() == [True, True, False]


def word_rows(count: int, length: int = 66) -> np.ndarray:
    """Sequences of whole words only, so that a run of chosen positions is a run of words."""
    rows = np.random.default_rng(3).integers(FIRST, FIRST + len(WORDS), (count, length))
    rows[:, 0], rows[:, -1] = CLS, SEP
    return rows


def test_lengths_of_ngrams_are_drawn_as_published(tokenizer: Any) -> None:
    masks = make_masks(tokenizer, word_rows(4), ngrams=3)
    lengths = masks._ngram_lengths(key(0, "position", np.arange(200_000)))
    shares = np.bincount(lengths, minlength=4)[1:] / len(lengths)
    np.testing.assert_allclose(shares, np.array([6, 3, 2]) / 11, atol=0.005)


def test_words_of_ngrams_stay_whole_and_the_cap_holds(tokenizer: Any) -> None:
    rows = make_rows(300, 60)
    picked = chosen(tokenizer, rows, ngrams=3, mlm_probability=0.3, max_predictions=6)
    assert picked.sum(1).max() <= 6 and (picked.sum(1) >= 4).mean() > 0.9 and not picked[rows < FIRST].any()
    inner = (rows[:, 1:] >= FIRST + len(WORDS)) & (rows[:, :-1] >= FIRST)  # a piece that continues the word before it
    assert np.array_equal(picked[:, 1:][inner], picked[:, :-1][inner])
    assert (chosen(tokenizer, word_rows(50), mlm_probability=0.5, max_predictions=4).sum(1) == 4).all()


def test_no_ngram_reaches_over_a_special_token(tokenizer: Any) -> None:
    rows = word_rows(2000, 9)
    rows[:, 4] = SEP  # three words on either side
    picked = chosen(tokenizer, rows, ngrams=3, mlm_probability=0.5, smoothing=0.0)
    assert not picked[:, 4].any() and (picked.sum(1) == 3).all()
    assert picked[:, 1:4].all(1).any() and (picked[:, 3] & picked[:, 5]).any()


# --- the order of two segments


def pair_rows(count: int, length: int = 40) -> np.ndarray:
    """Sequences [CLS] A [SEP] B [SEP] with padding, of random ids."""
    draw = np.random.default_rng(0)
    rows = np.full((count, length), PAD)
    for row in rows:
        a, b = draw.integers(1, length // 2 - 1, 2)
        ids = draw.integers(FIRST, VOCAB, a + b)
        row[: a + b + 3] = [CLS, *ids[:a], SEP, *ids[a:], SEP]
    return rows


def arranged_plainly(row: np.ndarray, swaps: bool) -> tuple[list[int], list[int]]:
    """The sequence with its segments swapped, or not, and its segment numbers, by list operations."""
    ids = row.tolist()
    middle = ids.index(SEP)
    end = ids.index(SEP, middle + 1)
    segments, padding = [ids[1:middle], ids[middle + 1 : end]], ids[end + 1 :]
    first, second = reversed(segments) if swaps else segments
    numbers = [0] * (len(first) + 2) + [1] * (len(second) + 1) + [0] * len(padding)
    return [CLS, *first, SEP, *second, SEP, *padding], numbers


@pytest.mark.parametrize("swaps", [True, False])
def test_segments_are_swapped_as_lists_would_be(swaps: bool) -> None:
    rows = pair_rows(200)
    found = arrange(rows, SEP, np.full(200, swaps))
    for row, ids, segments in zip(rows, *found, strict=True):
        assert (ids.tolist(), segments.tolist()) == arranged_plainly(row, swaps)
        assert np.array_equal(arrange(ids[None], SEP, np.full(1, swaps))[0][0], row)


@pytest.mark.parametrize("swaps", [True, False])
def test_half_of_the_rows_are_swapped_anew_in_every_epoch(tokenizer: Any, swaps: bool) -> None:
    """Or none, which then is not predicted."""
    rows = pair_rows(2000)
    numbers, masks = np.arange(len(rows)), make_masks(tokenizer, rows, mask=0.0, keep=1.0)  # words are left as they are
    collator = MaskedLMAndOrder(masks, SEP, swaps)
    batches = [collator.collate(rows, key(0, "mask", epoch, numbers), numbers) for epoch in (0, 1)]
    swapped = [batch.labels["sop"].targets.numpy() if swaps else np.zeros(len(rows)) for batch in batches]
    for batch, labels in zip(batches, swapped, strict=True):
        ids, segments = arrange(rows, SEP, labels.astype(bool))
        assert np.array_equal(batch.ids.numpy(), ids)
        assert np.array_equal(batch.inputs["token_type_ids"].numpy(), segments)
        assert list(batch.labels) == ["mlm", *["sop"] * swaps], "the tokens to predict come first"
    assert not swaps or (0.46 < swapped[0].mean() < 0.54 and 0.4 < (swapped[0] != swapped[1]).mean() < 0.6)


FORMAT = SequenceFormat(CLS, SEP, None, None, SEP, PAD, 8, pairs=True)


def written(documents: list[list[list[int]]], length: int = 24) -> tuple[np.ndarray, PairWriter]:
    """The sequences [N, length] of documents of sentences of ids."""
    file = io.BytesIO()
    writer = PairWriter(file, FORMAT, length, np.dtype(np.uint16))
    for number, document in enumerate(documents):
        writer.add(f"document {number}", document)
    return np.frombuffer(file.getvalue(), np.uint16).reshape(-1, length).astype(int), writer


def numbered(count: int, draw: np.random.Generator, first: int = 10) -> list[list[int]]:
    """A document whose ids count upwards, in sentences of 1 to 9 ids."""
    cuts = np.cumsum(draw.integers(1, 10, count))
    return [list(range(first + int(a), first + int(b))) for a, b in zip(np.append(0, cuts), cuts, strict=False)]


def segments(row: np.ndarray, separator: int = SEP) -> tuple[list[int], list[int]]:
    middle, end = np.flatnonzero(row == separator)
    return row[1:middle].tolist(), row[middle + 1 : end].tolist()


def test_both_segments_are_consecutive_and_of_one_document() -> None:
    draw = np.random.default_rng(0)
    documents = [numbered(60, draw, 10 + 1000 * number) for number in range(8)]
    rows, writer = written(documents)
    assert len(rows) == writer.sequences > 60 and writer.tokens == (rows != PAD).sum()
    kept = 0
    for row in rows:
        first, second = segments(row)
        assert row[0] == CLS and (row[len(first) + len(second) + 3 :] == PAD).all()
        assert first == list(range(first[0], first[-1] + 1)) and second == list(range(second[0], second[-1] + 1))
        assert first[0] // 1000 == second[-1] // 1000, "one document"
        assert 0 <= second[0] - first[-1] - 1 <= 9, "consecutive, but for what did not fit"
        kept += len(first) + len(second)
    assert writer.dropped == sum(len(ids) for document in documents for ids in document) - kept


def test_one_row_in_ten_is_of_a_random_length() -> None:
    draw = np.random.default_rng(1)
    rows, _ = written([numbered(600, draw) for _ in range(30)], length=100)
    used = (rows != PAD).sum(1)
    # Of lengths between 8 and 97, and some ids more to the end of a sentence; the last of a document is short too.
    assert 0.07 < (used < 90).mean() < 0.14 and (used == 100).mean() > 0.85


def test_where_a_row_is_cut_is_drawn_evenly() -> None:
    rows, _ = written([[[10, 11, 12, 13, 14, 15, 16] for _ in range(900)]])
    lengths = [len(first) for first, second in map(segments, rows) if len(first) + len(second) == 21]
    # Full sequences are of three sentences of seven ids.
    assert {7, 14} == set(lengths) and 0.4 < lengths.count(7) / len(lengths) < 0.6


def test_full_stops_do_not_show_which_segment_came_first() -> None:
    """Swapped or not, as many sequences end their first segment with a sentence as end their second with one."""
    stop, draw = 7, np.random.default_rng(2)
    said = [[*range(10, 10 + length), stop] for length in draw.integers(3, 30, 6000)]
    rows, _ = written([said[start : start + 200] for start in range(0, 6000, 200)], length=64)
    for at, mark in ((-1, stop), (0, 10)):  # the end and the beginning of a sentence
        shown = np.array([[segment[at] == mark for segment in segments(row)] for row in rows])
        only_first, only_second = (shown[:, 0] & ~shown[:, 1]).sum(), (shown[:, 1] & ~shown[:, 0]).sum()
        assert 0.4 < only_first / (only_first + only_second) < 0.6


def test_a_lone_sentence_is_left_out_and_counted() -> None:
    rows, writer = written([[[10, 11, 12, 13, 14, 15, 16, 17, 18]], [[10, 11], [12]]])
    assert len(rows) == 0 and writer.dropped == 12


def test_rows_of_a_text_are_its_sentences_in_order(tmp_path: Path, words: Any) -> None:
    def joined(ids: list[int]) -> str:
        return "".join(f" {number}" for number in ids) + " "

    path = tmp_path / "book.txt"
    path.write_text(book(0))
    given = {"sequence_length": 32, "heldout": 0.0, "workers": 1, "cache": str(tmp_path / "cache")}
    tokens = prepared(text_config(kind="gutenberg", path=str(path), **given), words, "all", paired_format)
    text = joined(words(clean(path.read_text()), add_special_tokens=False).input_ids)
    assert len(tokens.sequences) > 50
    for row in tokens.sequences[np.arange(50)]:
        assert all(joined(segment) in text for segment in segments(row, words.sep_token_id))


@pytest.mark.parametrize(
    "expected",
    [
        ["He came.", " She left!", ' "Why?" asked Tom.'],
        ["Mr. Smith met Dr. Jones.", " They spoke of J. S. Bach."],
        ["It cost 3.50 pounds.", " 1815 was cold."],
        ['She said "Go."', " Then he went."],
        ["A title", "\n\nA paragraph without an end"],
        ["one. two. three"],
        ["\u5929\u6c17\u3002", "\u96e8\u3002"],
    ],
)
def test_sentences_end_where_a_reader_would_end_them(expected: list[str]) -> None:
    assert list(sentences("".join(expected))) == expected
    assert list(sentences("  \n ")) == list(sentences("")) == []
