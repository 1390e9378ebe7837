"""Sequences of tokens by number: what training and evaluation read, wherever the sequences lie.

A token is its id. Where some documents have prompts, it is a record of `id`, `loss_mask`, whether it is a target, and
`inner`: whether it stands inside a document although its id ends documents elsewhere, fills up sequences, or would give
way to a beginning-of-text token, which a chat template has not written.

N sequences, S positions.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from distill.runtime.errors import SettingError
from distill.runtime.seed import key, shuffled

INNER = -1  # for the id of an inner token
FEWEST_FILES = 16  # that the sequences are chosen from
DENSE = 1.25  # times as many files as would do
LARGE = 4 << 30  # bytes from which some files are chosen first; not a setting, as the sequences would depend on it


class SequenceStore(Protocol):
    """Sequences of one length, numbered from 0. A NumPy array of two dimensions is one.

    A store of files has `starts`: the first sequence of each file [B], then N.
    """

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
    """[B + 1] int64; None for a store without files."""
    starts: np.ndarray | None = getattr(sequences, "starts", None)
    return starts


def sequence_bytes(sequences: SequenceStore) -> int:
    """The bytes of a sequence."""
    dtype: np.dtype = sequences.dtype
    return int(sequences.shape[1]) * dtype.itemsize


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


class StackedSequences:
    """The sequences of several stores, numbered through in their order."""

    def __init__(self, stores: Sequence[SequenceStore]) -> None:
        self.stores = stores
        self._offsets = np.cumsum([0, *(len(store) for store in stores)])

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), self.stores[0].shape[1]

    @property
    def dtype(self) -> np.dtype:
        """That of the widest ids of the stores, in records where any store has them."""
        types = [store.dtype for store in self.stores]
        widest = np.result_type(*(type_["id"] if type_.names else type_ for type_ in types))
        return token_dtype(widest, any(type_.names for type_ in types))

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        """[n, S]; where only some stores have records, all tokens of the others are targets."""
        tokens = np.zeros((len(numbers), self.shape[1]), self.dtype)
        of_store = np.searchsorted(self._offsets, numbers, side="right") - 1
        for number, store in enumerate(self.stores):
            if len(here := np.flatnonzero(of_store == number)):
                found = store[numbers[here] - self._offsets[number]]
                tokens[here] = recorded(found) if tokens.dtype.names else found
        return tokens


def sample_numbers(total: int, limit: int | None, purpose: str) -> np.ndarray | None:
    """The numbers of at most `limit` of the sequences, in order; None: all. The choice depends on `purpose` alone."""
    if limit is None or limit >= total:
        return None
    return np.sort(shuffled(np.arange(limit), total, key(0, purpose)))


def choose_sequences(
    sequences: SequenceStore, limit: int | None, purpose: str, large: int = LARGE
) -> np.ndarray | None:
    """As `sample_numbers`; where they take more than `large` bytes, from some of their files, so that few are read."""
    starts, total = starts_of(sequences), len(sequences)
    if limit is None or starts is None or limit >= total or total * sequence_bytes(sequences) <= large:
        return sample_numbers(total, limit, purpose)
    sizes = np.diff(starts)
    count = min(len(sizes), max(FEWEST_FILES, math.ceil(DENSE * limit * len(sizes) / total)))
    files = np.sort(shuffled(np.arange(count), len(sizes), key(0, f"blocks of {purpose}")))
    numbers = np.concatenate([np.arange(starts[file], starts[file + 1]) for file in files])
    chosen = sample_numbers(len(numbers), limit, purpose)
    return numbers if chosen is None else numbers[chosen]


def subsample(sequences: SequenceStore, limit: int | None, purpose: str, max_bytes: int = 1 << 62) -> SequenceStore:
    """At most `limit` of the sequences, in their old order and in memory; all of them where they are.

    Raises:
        SettingError: they would take more than `max_bytes` (`data.shuffle_bytes`).
    """
    numbers = choose_sequences(sequences, limit, purpose)
    if numbers is None:
        return sequences
    if len(numbers) * sequence_bytes(sequences) > max_bytes:
        raise SettingError(
            f"more than fit into memory (data.shuffle_bytes={max_bytes})", setting="corpus.max_sequences", value=limit,
            cure=f"give {max_bytes // sequence_bytes(sequences)} at most, or null for all, or raise data.shuffle_bytes",
        )  # fmt: skip
    return sequences[numbers]
