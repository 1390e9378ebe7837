"""Next-token targets, positions and documents of a sequence, against a loop over its positions."""

import numpy as np
import pytest
from tiny import records
from tokenizers.processors import TemplateProcessing
from vocabularies import END as END_TEXT
from vocabularies import vocabulary_of

from distill.data.batch import PADDING, Batch
from distill.data.collate.clm import CausalLM, causal_lm
from distill.data.sequence_format import SequenceFormat, causal_format, first_token

START, END, PAD = 1, 2, 40
# [document start, end]: Llama has both, GPT-2 an end alone.
BOTH, END_ALONE = (
    SequenceFormat(None, None, START, END, None, PAD, 1),
    SequenceFormat(None, None, None, END, None, PAD, 1),
)


def some_rows(seed: int, padded: bool) -> np.ndarray:
    """[6, 11] ids with ends of documents anywhere, at both ends of a sequence and side by side too."""
    random = np.random.default_rng(seed)
    rows = random.integers(3, 40, (6, 11))
    rows[random.random(rows.shape) < 0.3] = END
    if padded:
        for row, length in zip(rows, (11, 10, 5, 1, 7, 11), strict=True):
            row[length:] = PAD
    return rows


def naive(row: np.ndarray, packed: bool) -> tuple[list[int], list[int], list[int | None]]:
    """Position, document and target of each column, None where nothing is to be predicted."""
    positions, documents, position, document = [], [], 0, 0
    for column, id_ in enumerate(row):
        before = row[column - 1] if column else None
        if before is not None and ((packed and before == END) or (id_ == PAD and before != PAD)):
            position, document = 0, document + 1
        positions.append(position)
        documents.append(document)
        position += 1
    targets: list[int | None] = []
    for column in range(len(row)):
        last = column + 1 == len(row) or documents[column + 1] != documents[column] or row[column + 1] == PAD
        targets.append(None if last else int(row[column + 1]))
    return positions, documents, targets


def collate(rows: np.ndarray, rows_format: SequenceFormat = BOTH, packed: bool = True) -> Batch:
    numbers = np.arange(len(rows))
    return CausalLM(rows_format, packed).collate(rows, numbers.astype(np.uint64), numbers + 7)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows_format", [BOTH, END_ALONE])
def test_batches_are_those_of_a_loop(rows_format: SequenceFormat, packed: bool, padded: bool) -> None:
    for seed in range(5):
        rows = some_rows(seed, padded)
        batch = collate(rows, rows_format, packed)
        assert ("position_ids" in batch.inputs) == packed and list(batch.labels) == ["clm"]
        found = dict(zip(*(each.tolist() for each in batch.targets), strict=True))
        expected = {}
        for number, row in enumerate(rows):
            positions, documents, targets = naive(row, packed)
            assert CausalLM(rows_format, packed).documents(rows)[number].tolist() == documents
            if packed:
                assert batch.inputs["position_ids"][number].tolist() == positions
            expected |= {number * 11 + column: id_ for column, id_ in enumerate(targets) if id_ is not None}
        assert found == expected and PAD not in found.values()
        valid = rows != PAD
        assert batch.num_valid == valid.sum() and batch.row_ids.tolist() == list(range(7, 13))
        np.testing.assert_array_equal(batch.ids.numpy(), np.where(valid, rows, 0))
        if valid.all():
            assert batch.documents is None and batch.valid_positions is None
        else:
            assert batch.documents is not None and batch.valid_positions is not None
            np.testing.assert_array_equal(batch.documents.numpy(), np.where(valid, 0, PADDING))
            np.testing.assert_array_equal(batch.valid_positions.numpy(), np.flatnonzero(valid))


def test_models_that_expect_a_first_token_get_it_in_every_sequence() -> None:
    """A sequence that continues a document begins with it too; nothing else differs, and padding stays padding."""
    rows = np.array([[START, 5, 6, 7], [8, 9, END, START], [END, START, 5, 6], [PAD, PAD, PAD, PAD]])
    numbers = np.arange(len(rows))
    plain, given = (
        CausalLM(BOTH, True, first).collate(rows, numbers.astype(np.uint64), numbers) for first in (None, START)
    )
    assert given.ids.tolist() == [[START, 5, 6, 7], [START, 9, END, START], [START, START, 5, 6], [0, 0, 0, 0]]
    for one, other in zip(plain.targets, given.targets, strict=True):
        assert one.tolist() == other.tolist()
    assert plain.inputs["position_ids"].tolist() == given.inputs["position_ids"].tolist()
    assert CausalLM(BOTH, True, START).identity != CausalLM(BOTH, True).identity


def test_a_conversation_stays_as_its_template_has_written_it() -> None:
    """Templates such as Zephyr's write no beginning-of-text token, though the tokenizer puts one before other text."""
    rows = records([[5, 6, 7], [5, 6, 7]], inner=[[True, False, False], [False] * 3])
    batch = CausalLM(BOTH, True, START).collate(rows, np.arange(2, dtype=np.uint64), np.arange(2))
    assert batch.ids.tolist() == [[5, 6, 7], [START, 6, 7]]


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
