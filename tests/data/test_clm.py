"""Next-token targets, positions and documents of a sequence, against a loop over its positions."""

import numpy as np
import pytest

from distill.data.batch import PADDING, Batch
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import SequenceFormat

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


def test_a_row_without_a_target() -> None:
    """A document of one token, and one that is cut off after its first: nothing to learn, and nothing that breaks."""
    batch = collate(np.array([[END, END, END], [5, PAD, PAD]]))
    assert len(batch.targets.positions) == 0 and batch.num_valid == 4


def test_what_decides_the_targets_is_the_identity() -> None:
    assert len({CausalLM(each, packed).identity for each in (BOTH, END_ALONE) for packed in (False, True)}) == 4
    assert CausalLM(BOTH, True).identity == CausalLM(BOTH, True).identity
