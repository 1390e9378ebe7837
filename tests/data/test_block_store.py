"""Sequences through a cache of blocks: the right ones, a bounded folder, one fetch for all processes, clear ends."""

import json
import multiprocessing
import os
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored import FAULTS, Faulty, folder_of_files, write_shards

from distill.config.settings import DataConfig
from distill.data import remote
from distill.data.sequence_store import SequenceStore, starts_of
from distill.data.shards.block_store import BlockStore
from distill.data.shards.fetch import Blocks
from distill.data.shards.index import Block
from distill.data.shards.open import open_sequences, read_index
from distill.data.shards.plain import PlainShards
from distill.runtime.errors import Damaged, SettingError, StorageFailed

COUNT, BLOCK = 1003, 50  # sequences; 21 blocks in 3 shards
BLOCK_BYTES = BLOCK * 32 + 32  # of a file of the cache


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    """Numbers that a compressor shortens."""
    return np.random.default_rng(0).integers(0, 300, (COUNT, 16)).astype(np.uint16)


@pytest.fixture(scope="module")
def places(rows: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    folder = tmp_path_factory.mktemp("shards")
    for compression in (None, "zstd"):
        write_shards(folder / str(compression), rows, BLOCK, 400, compression)
    return {compression: folder / str(compression) for compression in (None, "zstd")}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.01)


def settings(folder: Path, blocks: int = 100, **more: object) -> DataConfig:
    return DataConfig(**{"cache": str(folder), "local_bytes": blocks * BLOCK_BYTES, "shuffle_bytes": 1000, **more})


def open_store(place: Path | str, folder: Path, blocks: int = 100) -> BlockStore:
    store = open_sequences(str(place), "train", settings(folder, blocks))
    assert isinstance(store, BlockStore)
    return store


def files(folder: Path) -> list[os.DirEntry[str]]:
    return list(os.scandir(folder / "blocks" / "files"))


def some(count: int = 300, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, COUNT, count)


def test_every_kind_of_store_gives_the_rows(rows: np.ndarray, places: dict[str | None, Path], tmp_path: Path) -> None:
    write_shards(tmp_path / "one", rows, BLOCK, COUNT)
    cache = settings(tmp_path)
    small = settings(tmp_path, shuffle_bytes=rows.nbytes, local_bytes=2 * rows.nbytes)
    stores: list[tuple[SequenceStore, type]] = [
        (open_sequences(str(places[None]), "train", cache), PlainShards),
        (open_sequences(str(places["zstd"]), "train", cache), BlockStore),
        (open_sequences(str(tmp_path / "one"), "train", cache), PlainShards),
        (open_sequences(str(tmp_path / "one"), "train", small), PlainShards),
    ]
    for store, kind in stores:
        assert isinstance(store, kind) and store.shape == rows.shape and len(store) == COUNT
        assert store.dtype == rows.dtype
        for numbers in (some(), np.array([COUNT - 1]), np.array([], np.int64), np.arange(COUNT)):
            np.testing.assert_array_equal(store[numbers], rows[numbers])
    first, second = (starts_of(store) for store, _ in stores[:2])
    assert first is not None and second is not None and np.array_equal(first, second)  # wherever they lie


def test_shards_too_large_for_the_local_disk_are_read_in_blocks(
    rows: np.ndarray, places: dict[str | None, Path], tmp_path: Path
) -> None:
    store = open_sequences(str(places[None]), "train", settings(tmp_path / "c", 5, local=str(tmp_path / "nvme")))
    np.testing.assert_array_equal(store[some()], rows[some()])
    assert len(files(tmp_path / "nvme")) == 5


def test_the_cache_is_bounded_whatever_is_read(
    rows: np.ndarray, places: dict[str | None, Path], tmp_path: Path
) -> None:
    store = open_store(places["zstd"], tmp_path, blocks=4)
    for seed in range(5):
        np.testing.assert_array_equal(store[some(seed=seed)], rows[some(seed=seed)])
        sizes = [file.stat().st_size for file in files(tmp_path)]
        assert len(sizes) == 4 and sum(sizes) <= 4 * BLOCK_BYTES
        assert len(store._files) <= 5  # what is evicted is let go


def test_a_block_that_is_evicted_while_it_comes_is_let_go(
    places: dict[str | None, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(places["zstd"], tmp_path, blocks=2)
    get, mapped, evicted = store.cache.get, threading.Event(), threading.Event()

    def late(block: Block, *arguments: Any) -> memoryview:
        view = get(block, *arguments)
        if block.first == 0:
            mapped.set()
            assert evicted.wait(10)
        return view

    monkeypatch.setattr(store.cache, "get", late)
    store.expect(np.array([0]))
    assert mapped.wait(10)
    for block in (1, 2):
        store[np.array([block * BLOCK])]
    evicted.set()
    store.close()
    assert set(store._files) == {1, 2}


def test_what_was_used_last_stays(places: dict[str | None, Path], tmp_path: Path) -> None:
    store = open_store(places["zstd"], tmp_path, blocks=3)
    for block in (0, 1, 2):
        store[np.array([block * BLOCK])]
    other = open_store(places["zstd"], tmp_path, blocks=3)
    other[np.array([0])]  # block 0 is opened again
    other[np.array([3 * BLOCK])]
    names = {file.name.removesuffix(".block") for file in files(tmp_path)}
    assert names == {store.index.block(block).digest.hex() for block in (0, 2, 3)}


def test_a_damaged_file_of_the_cache_is_fetched_again(
    rows: np.ndarray, places: dict[str | None, Path], tmp_path: Path, lines: list[str]
) -> None:
    open_store(places["zstd"], tmp_path)[np.arange(COUNT)]
    first, second, third = sorted(file.path for file in files(tmp_path))[:3]
    content = bytearray(Path(first).read_bytes())
    content[100] ^= 1
    Path(first).write_bytes(content)
    Path(second).write_bytes(b"")
    Path(third).write_bytes(content[:-40])
    (tmp_path / "blocks" / "files" / ".half.block.new").write_bytes(b"x")  # of a process that was killed
    np.testing.assert_array_equal(open_store(places["zstd"], tmp_path)[np.arange(COUNT)], rows)
    assert sum("is damaged; it is fetched again" in line for line in lines) == 3
    assert ".new" not in " ".join(os.listdir(tmp_path / "blocks" / "files"))


def read_in_process(place: str, folder: str, counter: str, seed: int) -> None:
    plain = Blocks.plain

    def counted(self: Blocks, block: Block, attempts: int = 1) -> memoryview:
        with open(counter, "a") as file:
            file.write(f"{block.first}\n")
        time.sleep(0.01)
        return plain(self, block, attempts)

    Blocks.plain = counted  # type: ignore[method-assign]
    store = open_store(place, Path(folder))
    store.expect(np.arange(0, COUNT, BLOCK))
    found = store[some(seed=seed)]
    Path(counter).with_suffix(f".{seed}").write_text(json.dumps(found.tolist()))


def test_each_block_is_fetched_by_one_process_of_a_node(
    rows: np.ndarray, places: dict[str | None, Path], tmp_path: Path
) -> None:
    counter = tmp_path / "fetched"
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=read_in_process, args=(str(places["zstd"]), str(tmp_path), str(counter), seed))
        for seed in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    fetched = counter.read_text().split()
    assert len(fetched) == len(set(fetched)) == 21
    for seed in range(3):
        assert json.loads(counter.with_suffix(f".{seed}").read_text()) == rows[some(seed=seed)].tolist()


def test_blocks_are_fetched_ahead_and_what_is_needed_comes_first(
    rows: np.ndarray, places: dict[str | None, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    allowed = threading.Event()
    plain = Blocks.plain

    def slow(self: Blocks, block: Block, attempts: int = 1) -> memoryview:
        begun.append(block.first // BLOCK)
        if threading.current_thread().name.startswith("blocks-ahead"):
            allowed.wait(10)
        return plain(self, block, attempts)

    monkeypatch.setattr(Blocks, "plain", slow)
    store = open_store(places["zstd"], tmp_path)
    store.expect(store.starts[:-1])
    np.testing.assert_array_equal(store[np.array([COUNT - 1])], rows[[-1]])  # the others are still on their way
    assert len(begun) <= 5 and 20 in begun
    store.expect(store.starts[:6])  # of the others only those under way come
    allowed.set()
    deadline = time.monotonic() + 10
    while store._expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(store._files) == {*range(6), 20}
    store.close()


def test_storage_over_http_with_faults(
    rows: np.ndarray, places: dict[str | None, Path], tmp_path: Path, lines: list[str]
) -> None:
    """Resets, 503s, half answers and wrong bytes: all sequences come, and all are right."""
    pytest.importorskip("aiohttp")
    server = Faulty(folder_of_files(places["zstd"]), share=0.4)
    with server.serving() as url:
        server.share = 0.0
        store = open_store(url, tmp_path, blocks=6)
        server.share = 0.4
        for seed in range(6):
            store.expect(np.arange(0, COUNT, BLOCK))
            np.testing.assert_array_equal(store[some(seed=seed)], rows[some(seed=seed)])
        store.close()
    assert sum(server.faults.values()) > 30 and min(server.faults.values()) > 3 and len(server.faults) == 5
    assert any("trying again" in line for line in lines)


def test_storage_that_stays_away_ends_in_one_line_soon(places: dict[str | None, Path], tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    # Without the wrong byte, which is the same each time: where it comes six times of twelve, the block is damaged.
    server = Faulty(folder_of_files(places["zstd"]), kinds=tuple(kind for kind in FAULTS if kind != "wrong"))
    with server.serving() as url:
        store = open_store(url, tmp_path)
        server.share = 1.0
        store.expect(store.starts[:-1])
        with pytest.raises(StorageFailed, match=r"train-0000\d\.rows\.zst: storage has failed 12 times, at last with "):
            store[some()]
        begun = time.monotonic()
        store.expect(np.zeros(0, np.int64))
        server.share = 0.0
        assert len(store[np.array([3])]) == 1  # and resumes when it is back
        store.close()
        assert time.monotonic() - begun < 2 and server.requests < 21 * 12


def test_a_missing_shard_is_named_at_once(places: dict[str | None, Path], tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    numbers = np.arange(1600, dtype=np.uint16).reshape(100, 16)
    index = write_shards(folder, numbers, 10, 50, "zstd")
    (folder / index.layout.shard_name(1)).unlink()
    store = open_store(folder, tmp_path)
    assert len(store[np.array([0, 49])]) == 2
    with pytest.raises(StorageFailed, match=r"train-00001\.rows\.zst cannot be read \(FileNotFoundError"):
        store[np.array([50])]
    plain = write_shards(tmp_path / "plain", numbers, 10, 50)
    mapped = open_sequences(str(tmp_path / "plain"), "train", settings(tmp_path))
    with (tmp_path / "plain" / plain.layout.shard_name(1)).open("ab") as file:
        file.write(b"x")
    with pytest.raises(StorageFailed, match=r"has 1,601 bytes instead of 1,600"):
        mapped[np.array([50])]


def test_damage_in_storage_is_found(rows: np.ndarray, tmp_path: Path) -> None:
    index = write_shards(tmp_path / "s", rows, BLOCK, 400, "zstd")
    shard = tmp_path / "s" / index.layout.shard_name(0)
    content = bytearray(shard.read_bytes())
    content[index.block(2).offset + 7] ^= 1
    shard.write_bytes(content)
    store = open_store(tmp_path / "s", tmp_path)
    assert np.array_equal(store[np.arange(100)], rows[:100])
    with pytest.raises(SettingError, match=DAMAGED):
        store[np.array([2 * BLOCK])]


DAMAGED = r"/train-00000\.rows\.zst is damaged \(the [\d,]+ bytes from [\d,]+ are not .* came 6 times\): restore that"


def test_damage_behind_a_url_is_named_by_its_file(places: dict[str | None, Path], tmp_path: Path) -> None:
    """Status 2, whichever block of those on their way is found out first; a network that spoils bytes is status 74."""
    pytest.importorskip("aiohttp")
    shard = (tmp_path / "s") / "train-00000.rows.zst"
    shutil.copytree(places["zstd"], shard.parent)
    content = bytearray(shard.read_bytes())
    index = read_index(str(shard.parent), "train")
    for block in (2, 3, 4):
        content[index.block(block).offset + 7] ^= 1
    shard.write_bytes(content)
    draw = random.Random(0)

    def spoilt(data: bytes) -> bytes:
        at = draw.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]

    with Faulty(folder_of_files(shard.parent)).serving() as url:
        store = open_store(url, tmp_path)
        store.expect(store.starts[:-1])
        for _ in range(2):
            with pytest.raises(SettingError, match=f"^{url}{DAMAGED}"):
                store[np.arange(2 * BLOCK, 5 * BLOCK)]
        store.close()
    source = folder_of_files(places["zstd"])
    server = Faulty(source)
    with server.serving() as url:
        store = open_store(url, tmp_path / "other")
        server.source = lambda *request: (answer := source(*request))._replace(body=spoilt(answer.body))
        with pytest.raises(StorageFailed, match=r"failed 12 times.* are not those that were written"):
            store[np.array([2 * BLOCK])]
        store.close()


def test_a_full_cache_says_so(places: dict[str | None, Path], tmp_path: Path) -> None:
    store = open_sequences(str(places["zstd"]), "train", settings(tmp_path, local_bytes=1000, shuffle_bytes=500))
    with pytest.raises(
        StorageFailed, match=r"data\.cache=.*: no room for a block of 1\.\d+ kB.*data\.local_bytes=1000: raise data"
    ):
        store[np.array([0])]


def test_an_index_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "train.index").write_bytes(b"no index")
    with pytest.raises(Damaged, match=r"train\.index is damaged \(not an index of shards"):
        read_index(str(tmp_path), "train")


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(SettingError, match=r"data\.tokens=gs://.*pip install 'distill-kd\[gcs\]'"):
        open_sequences("gs://bucket/tokens", "train", settings(tmp_path))
