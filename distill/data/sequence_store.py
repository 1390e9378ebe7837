"""Sequences of tokens by number: what training and evaluation read, wherever the sequences lie.

A token is its id. Where some documents have prompts, it is a record of `id`, `loss_mask`, whether it is a target, and
`inner`: whether it stands inside a document although its id ends documents elsewhere, fills up sequences, or would give
way to a beginning-of-text token, which a chat template has not written.

N sequences, S positions.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

INNER = -1  # for the id of an inner token


def token_dtype(ids: Any, prompts: bool) -> np.dtype:
    """Of a token with an id of this type, in a record where some documents have prompts."""
    return np.dtype([("id", ids), ("loss_mask", np.bool_), ("inner", np.bool_)] if prompts else ids)


def ids_of(tokens: np.ndarray) -> np.ndarray:
    """The ids of tokens, in their shape, int64."""
    return np.ascontiguousarray(tokens["id"] if tokens.dtype.names else tokens, np.int64)


def outer_ids(tokens: np.ndarray) -> np.ndarray:
    """The ids of tokens, to find ends of documents and padding by: `INNER` for those that stand inside a document."""
    return np.where(tokens["inner"], INNER, ids_of(tokens)) if tokens.dtype.names else tokens


def loss_mask_of(tokens: np.ndarray) -> np.ndarray:
    """Which tokens are targets, in their shape."""
    return tokens["loss_mask"] if tokens.dtype.names else np.broadcast_to(np.True_, tokens.shape)


def recorded(tokens: np.ndarray) -> np.ndarray:
    """The same tokens as records, all of which are targets where they were ids alone."""
    if tokens.dtype.names:
        return tokens
    records = np.zeros(tokens.shape, token_dtype(tokens.dtype, prompts=True))
    records["id"], records["loss_mask"] = tokens, True
    return records


def padded(rows: Sequence[np.ndarray], length: int, pad_id: int) -> np.ndarray:
    """Rows of tokens of one type, each with padding behind it: [len(rows), length]."""
    tokens = np.zeros((len(rows), length), rows[0].dtype)
    (tokens["id"] if tokens.dtype.names else tokens)[:] = pad_id
    for row, given in zip(tokens, rows, strict=True):
        row[: len(given)] = given
    return tokens


class SequenceStore(Protocol):
    """Sequences of one length, numbered from 0. A NumPy array of two dimensions is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, S)."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """That of a token."""
        ...

    def __len__(self) -> int:
        """N."""
        ...

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        """The sequences of these numbers [n] int64, in their order: [n, S]."""
        ...


def starts_of(sequences: SequenceStore) -> np.ndarray | None:
    """[B + 1] int64: the first sequence of each stored block, then N; None: they are one piece."""
    starts: np.ndarray | None = getattr(sequences, "starts", None)
    return starts


def expect(sequences: SequenceStore, numbers: np.ndarray) -> None:
    """Announce the sequences that will be read soon, [n] int64: a store may fetch their blocks, in this order."""
    if (prepare := getattr(sequences, "expect", None)) is not None:
        prepare(numbers)


def sequence_bytes(sequences: SequenceStore) -> int:
    """The bytes of a sequence."""
    dtype: np.dtype = sequences.dtype
    return int(sequences.shape[1]) * dtype.itemsize
