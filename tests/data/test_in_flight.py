"""Blocks on their way take a bounded part of the memory, and leave room to those that somebody waits for."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from stored import write_shards

from distill.config.settings import DataConfig
from distill.data import remote
from distill.data.shards import fetch
from distill.data.shards.block_store import BlockStore
from distill.data.shards.fetch import Blocks
from distill.data.shards.in_flight import InFlight, bytes_in_flight
from distill.data.shards.index import Block, Layout
from distill.data.shards.open import open_sequences


def test_room_is_given_and_taken_back() -> None:
    room, most = InFlight(100), [0]

    def take(num_bytes: int) -> None:
        with room.room_for(num_bytes, ahead=False):
            most.append(room.taken)
            time.sleep(0.002)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, [40, 30, 60, 100, 10, 250] * 8))  # the last one is more than all of it
    assert room.taken == 0 and max(each for each in most if each != 250) <= 100 and 250 in most


def test_what_is_fetched_ahead_leaves_room() -> None:
    room, waiting = InFlight(100), threading.Event()
    with room.room_for(30, ahead=True), room.room_for(30, ahead=True):

        def take(ahead: bool) -> None:
            with room.room_for(30, ahead):
                waiting.set()

        late = threading.Thread(target=take, args=(True,))
        late.start()
        assert not waiting.wait(0.1)
        take(ahead=False)
        assert waiting.is_set()
    late.join(5)
    assert not late.is_alive() and room.taken == 0


def test_room_comes_back_after_a_failure() -> None:
    room = InFlight(100)
    with pytest.raises(OSError), room.room_for(90, ahead=False):
        raise OSError
    assert room.taken == 0


@pytest.mark.parametrize(("compression", "expected"), [(None, 3000), ("zstd", 1000 + 4096)])
def test_a_block_counts_with_all_that_is_made_of_it(compression: str | None, expected: int) -> None:
    block = Block(0, 0, 64, 0, 1000, b"")
    assert bytes_in_flight(block, Layout("train", "uint16", 32, compression)) == expected


def test_pieces_that_have_come_are_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that is cut short, then a wrong byte in the block, of which all pieces come anew."""
    rows = np.arange(320, dtype=np.uint16).reshape(20, 16)
    index = write_shards(tmp_path, rows, 20, 20)
    asked: list[tuple[int, int]] = []

    def faulty(name: str, start: int, stop: int) -> bytes:
        asked.append((start, stop))
        data = (tmp_path / Path(name).name).read_bytes()[start:stop]
        return {2: data[:5], 3: b"x" + data[1:]}.get(len(asked), data)

    monkeypatch.setattr(fetch, "PIECE", 300)
    monkeypatch.setattr(fetch, "read_range", faulty)
    monkeypatch.setattr(remote, "pause", lambda seconds, signals: None)
    blocks = Blocks("s3://bucket", index.layout)
    assert bytes(blocks.plain(index.block(0))) == rows.tobytes() and blocks.failures == 2
    assert asked == [(0, 300), (300, 600), (300, 600), (600, 640), (0, 300), (300, 600), (600, 640)]


def test_a_store_that_needs_many_blocks_fetches_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(6400, dtype=np.uint16).reshape(400, 16)
    write_shards(tmp_path / "s", rows, 10, 100, "zstd")
    running, most, lock, plain = [0], [0], threading.Lock(), Blocks.plain

    def counted(self: Blocks, block: Block, attempts: int = 1) -> memoryview:
        with lock:
            running[0] += 1
            most.append(running[0])
        time.sleep(0.005)
        try:
            return plain(self, block, attempts)
        finally:
            with lock:
                running[0] -= 1

    monkeypatch.setattr(Blocks, "plain", counted)
    for num_bytes, at_once in ((1, 1), (1 << 30, 12)):
        cache = DataConfig(cache=str(tmp_path / str(at_once)), local_bytes=1 << 20, shuffle_bytes=100)
        store = open_sequences(str(tmp_path / "s"), "train", cache)
        assert isinstance(store, BlockStore)
        store.cache._in_flight.max_bytes = num_bytes
        most[:] = [0]
        store.expect(store.starts[:-1])
        np.testing.assert_array_equal(store[np.arange(400)], rows)
        store.close()
        assert (max(most) == 1) is (at_once == 1) and max(most) <= at_once
