"""The index of shards: numbering through all shards, and what is stored."""

import numpy as np
import pytest

from distill.data.shards.index import Block, Layout, ShardIndex

LAYOUT = Layout("train", "uint16", 8, "zstd")


def index() -> ShardIndex:
    shards = [
        [Block(9, 9, 5, 0, 70, b"a" * 32), Block(9, 9, 2, 70, 30, b"b" * 32)],
        [Block(9, 9, 4, 0, 64, b"c" * 32)],
    ]
    return ShardIndex.of_shards(LAYOUT, shards)


def test_rows_are_numbered_through_all_shards():
    blocks = [index().block(number) for number in range(3)]
    assert blocks == [
        Block(0, 0, 5, 0, 70, b"a" * 32), Block(0, 5, 2, 70, 30, b"b" * 32), Block(1, 7, 4, 0, 64, b"c" * 32)
    ]  # fmt: skip
    assert (index().num_sequences, index().num_shards, len(index())) == (11, 2, 3)
    assert index().block_of(np.arange(11)).tolist() == [0] * 5 + [1] * 2 + [2] * 4


def test_what_is_stored_is_read_back():
    back = ShardIndex.from_bytes(index().as_bytes())
    assert back.layout == LAYOUT and back.digests.tobytes() == index().digests.tobytes()
    assert [back.block(number) for number in range(3)] == [index().block(number) for number in range(3)]


@pytest.mark.parametrize("data", [b"", b"{}", b"PK\x03\x04 cut short"])
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError):
        ShardIndex.from_bytes(data)


def test_the_names_of_shards():
    assert LAYOUT.shard_name(3) == "train-00003.rows.zst"
    assert Layout("heldout", "uint32", 8).shard_name(12) == "heldout-00012.rows"
