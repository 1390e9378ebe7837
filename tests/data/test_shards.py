"""Sequences from files of this machine and through its cache: the right ones, bounded, fetched once, clear ends."""

import json
import multiprocessing
import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import wait_for
from stored import FAULTS, Faulty, folder_of_files, open_rows, write_shards

from distill.config.settings import DataConfig
from distill.data import node_cache, remote
from distill.data.file_maps import MOST
from distill.data.shards import Shards
from distill.data.storage import fetch_file
from distill.runtime.errors import SettingError, StorageFailed

COUNT, FILE = 1003, 50  # sequences; 21 files
FILE_BYTES = FILE * 32


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 300, (COUNT, 16)).astype(np.uint16)


@pytest.fixture(scope="module")
def place(rows: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder, rows, FILE)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.01)


def cached(place: Path | str, folder: Path, files: float = 100) -> Shards:
    """The sequences of a folder or URL through a cache with room for so many files."""
    local = {"local": str(folder), "local_bytes": int(files * FILE_BYTES), "shuffle_bytes": 100}
    return open_rows(place, DataConfig(cache=str(folder / "cache"), **local))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "shards").iterdir() if len(path.name) == 64)


def some(count: int = 300, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, COUNT, count)


def spoil(path: Path, at: int = 100) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_the_sequences_are_the_same_wherever_they_lie(rows: np.ndarray, place: Path, tmp_path: Path) -> None:
    stores = [open_rows(place, DataConfig(cache=str(tmp_path))), cached(place, tmp_path / "node")]
    for store in stores:
        assert store.shape == rows.shape and len(store) == COUNT and store.dtype == rows.dtype
        assert store.starts.tolist() == [*range(0, COUNT, FILE), COUNT]
        for numbers in (some(), np.array([COUNT - 1]), np.array([], np.int64), np.arange(COUNT)):
            np.testing.assert_array_equal(store[numbers], rows[numbers])
    assert not (tmp_path / "shards").exists() and len(files(tmp_path / "node")) == 21


def test_few_files_stay_open(rows: np.ndarray, tmp_path: Path) -> None:
    """Of two stores of 251 files each, where a process may open little more than are mapped at once."""
    write_shards(tmp_path / "many", rows, 4)
    stores = [open_rows(tmp_path / "many", DataConfig(cache=str(tmp_path))), cached(tmp_path / "many", tmp_path)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + MOST + 10, hard))
    try:
        for store in stores:
            np.testing.assert_array_equal(store[some()], rows[some()])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_cache_is_bounded_and_what_was_used_last_stays(rows: np.ndarray, place: Path, tmp_path: Path) -> None:
    for seed in range(3):
        store = cached(place, tmp_path, files=4)
        np.testing.assert_array_equal(store[some(seed=seed)], rows[some(seed=seed)])
        sizes = [path.stat().st_size for path in files(tmp_path)]
        assert 3 <= len(sizes) <= 4 and sum(sizes) <= 4 * FILE_BYTES
    for number in (0, 1, 2):
        cached(place, tmp_path / "other", files=3)[np.array([number * FILE])]
    last = cached(place, tmp_path / "other", files=3)
    last[np.array([0])]  # file 0 is used again
    last[np.array([3 * FILE])]
    assert {path.name for path in files(tmp_path / "other")} == {last.files[number].sha256 for number in (0, 2, 3)}


def test_what_a_run_reads_all_along_is_evicted_last(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fetched and checked once, at the beginning."""
    monkeypatch.setattr(node_cache, "NOTED", 0.0)
    store = cached(place, tmp_path, files=3)
    for number in (0, 1, 2, 0, 3, 0, 4):
        store[np.array([number * FILE])]
    assert {path.name for path in files(tmp_path)} == {store.files[number].sha256 for number in (0, 3, 4)}


def test_what_is_evicted_or_damaged_in_the_cache_is_fetched_again(
    rows: np.ndarray, place: Path, tmp_path: Path, lines: list[str]
) -> None:
    store = cached(place, tmp_path)
    store[np.arange(COUNT)]
    first, second, third, fourth = files(tmp_path)[:4]
    spoil(first)
    second.write_bytes(b"")
    third.write_bytes(third.read_bytes()[:-40])
    fourth.unlink()
    for reader in (store, cached(place, tmp_path)):  # the one that has checked them already, and another process
        np.testing.assert_array_equal(reader[np.arange(COUNT)], rows)
    assert sum("is damaged; it is fetched again" in line for line in lines) == 3


def test_a_shard_without_room_evicts_no_other(place: Path, tmp_path: Path) -> None:
    cached(place, tmp_path, files=3)[np.array([0, FILE, 2 * FILE])]
    before = files(tmp_path)
    with pytest.raises(StorageFailed, match=r"raise data\.local_bytes"):
        cached(place, tmp_path, files=0.5)[np.array([3 * FILE])]
    assert files(tmp_path) == before and len(before) == 3


def test_a_disk_that_reads_back_other_bytes_ends_the_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = list[str]()

    def fetch(name: str, setting: str, target: Path) -> None:
        fetched.append(name)
        fetch_file(name, setting, target)

    def move(source: Path, target: Path) -> None:
        spoil(source)  # behind the check of what came
        os.rename(source, target)

    monkeypatch.setattr(node_cache, "fetch_file", fetch)
    monkeypatch.setattr(node_cache.os, "replace", move)
    with pytest.raises(StorageFailed, match=r"reads back otherwise than it was written, 3 times: give data\.local="):
        cached(place, tmp_path)[np.array([0])]
    assert len(fetched) == 3


def test_a_cache_that_is_removed_under_a_run_is_filled_again(rows: np.ndarray, place: Path, tmp_path: Path) -> None:
    store = cached(place, tmp_path)
    store[np.array([0])]
    shutil.rmtree(tmp_path / "shards")
    np.testing.assert_array_equal(store[some()], rows[some()])


def read_in_process(place: str, folder: str, counter: str, seed: int) -> None:
    def counted(name: str, setting: str, target: Path) -> None:
        with open(counter, "a") as file:
            file.write(f"{name}\n")
        time.sleep(0.01)
        fetch_file(name, setting, target)

    node_cache.fetch_file = counted  # type: ignore[attr-defined]
    store = cached(place, Path(folder))
    store.expect(np.arange(0, COUNT, FILE))
    Path(counter).with_suffix(f".{seed}").write_text(json.dumps(store[some(seed=seed)].tolist()))


def test_each_file_is_fetched_by_one_process_of_a_machine(rows: np.ndarray, place: Path, tmp_path: Path) -> None:
    counter = tmp_path / "fetched"
    context = multiprocessing.get_context("fork")
    arguments = [(str(place), str(tmp_path), str(counter), seed) for seed in range(3)]
    processes = [context.Process(target=read_in_process, args=given) for given in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    fetched = counter.read_text().split()
    assert len(fetched) == len(set(fetched)) == 21
    for seed in range(3):
        assert json.loads(counter.with_suffix(f".{seed}").read_text()) == rows[some(seed=seed)].tolist()


def test_files_are_fetched_ahead_and_what_is_needed_comes_first(
    rows: np.ndarray, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    allowed = threading.Event()

    def slow(name: str, setting: str, target: Path) -> None:
        begun.append(Path(name).name)
        if threading.current_thread().name.startswith("shards"):
            allowed.wait(300)
        fetch_file(name, setting, target)

    monkeypatch.setattr(node_cache, "fetch_file", slow)
    store = cached(place, tmp_path)
    store.expect(store.starts[:-1])
    np.testing.assert_array_equal(store[np.array([COUNT - 1])], rows[[-1]])  # the others are still on their way
    assert len(begun) <= 5 and "train-00020.bin" in begun
    store.expect(store.starts[:6])  # of the others only those under way come
    allowed.set()
    wait_for(lambda: len(files(tmp_path)) >= 7)
    store.expect(np.zeros(0, np.int64))
    assert set(begun) == {f"train-{number:05d}.bin" for number in (*range(6), 20)}


def test_an_epoch_after_the_cache_has_evicted_is_fetched_ahead_again(place: Path, tmp_path: Path) -> None:
    store = cached(place, tmp_path, files=6)
    for first in (0, 3, 6, 9, 0):
        store.expect(store.starts[first : first + 3])
        ahead = [tmp_path / "shards" / file.sha256 for file in store.files[first : first + 3]]
        wait_for(lambda ahead=ahead: all(file.exists() for file in ahead))


# --- faults


def test_storage_over_http_with_faults(rows: np.ndarray, place: Path, tmp_path: Path, lines: list[str]) -> None:
    """Resets, 503s, half answers and wrong bytes: all sequences come, and all are right."""
    pytest.importorskip("aiohttp")
    server = Faulty(folder_of_files(place), whole=True)
    with server.serving() as url:
        store = cached(url, tmp_path, files=6)
        server.share = 0.4
        for seed in range(6):
            store.expect(np.arange(0, COUNT, FILE))
            np.testing.assert_array_equal(store[some(seed=seed)], rows[some(seed=seed)])
        store.expect(np.zeros(0, np.int64))
    assert sum(server.faults.values()) > 30 and min(server.faults.values()) > 3 and len(server.faults) == 5
    assert any("trying again" in line for line in lines)


def test_storage_that_stays_away_ends_in_one_line_and_resumes(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    server = Faulty(folder_of_files(place), kinds=tuple(kind for kind in FAULTS if kind != "wrong"), whole=True)
    with server.serving() as url:
        store = cached(url, tmp_path)
        server.share = 1.0
        store.expect(store.starts[:-1])
        with pytest.raises(StorageFailed, match=r"train-000\d\d\.bin: storage has failed 12 times, at last with "):
            store[some()]
        store.expect(np.zeros(0, np.int64))
        server.share = 0.0
        assert len(store[np.array([3])]) == 1


def answered_wrongly(place: Path) -> Callable[..., Any]:
    source = folder_of_files(place)

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        found = source(method, path, headers, body)
        return found._replace(body=found.body[:-1] + b"!") if path.endswith("00002.bin") and found.body else found

    return answer


def test_damage_behind_a_url_is_named_by_its_file(rows: np.ndarray, place: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with Faulty(answered_wrongly(place)).serving() as url:
        store = cached(url, tmp_path)
        assert np.array_equal(store[np.arange(100)], rows[:100])
        for _ in range(2):
            with pytest.raises(SettingError, match=rf"^{url}/train-00002\.bin is damaged \(.*SHA-256 differs"):
                store[np.array([2 * FILE])]


@pytest.mark.parametrize("remade", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_damage_of_files_is_noticed_before_they_are_used(
    local: bool, remade: bool, rows: np.ndarray, place: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "shards here"
    shutil.copytree(place, folder)
    spoil(folder / "train-00001.bin")
    (folder / "train-00002.bin").unlink()
    store = cached(folder, tmp_path) if local else open_rows(folder, DataConfig(cache=str(tmp_path)), remade)
    assert np.array_equal(store[np.arange(50)], rows[:50])
    for number, reason in ((1, "is damaged"), (2, "is (missing|damaged .it is missing)")):
        with pytest.raises((StorageFailed, SettingError), match=rf"train-0000{number}\.bin {reason}"):
            store[np.array([number * FILE])]
    assert (folder / "damaged-train-00001.bin").exists() == (remade and not local)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "zeros": lambda path: path.open("r+b").write(bytes(path.stat().st_size)),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "replaced": lambda path: (path.with_suffix(".new").write_bytes(bytes(1600)), path.with_suffix(".new").rename(path)),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_changed_under_a_run_is_noticed(damage: str, rows: np.ndarray, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "s")
    store = open_rows(tmp_path / "s", DataConfig(cache=str(tmp_path)))
    np.testing.assert_array_equal(store[some()], rows[some()])
    DAMAGES[damage](path := tmp_path / "s" / "train-00003.bin")
    with pytest.raises(StorageFailed, match=rf"^{path} is (damaged|missing)"):
        store[np.array([3 * FILE])]
    shutil.copy(place / path.name, path)  # restored, it is read as before
    np.testing.assert_array_equal(store[some()], rows[some()])


def test_a_full_cache_says_so(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = DataConfig(cache=str(tmp_path), local=str(tmp_path), local_bytes=1000, shuffle_bytes=500)
    with pytest.raises(
        StorageFailed, match=r"data\.local=.*: no room for a shard of 1\.\d+ kB.*local_bytes=1000: raise"
    ):
        open_rows(place, small)[np.array([0])]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node_cache, "fetch_file", full)
    with pytest.raises(
        StorageFailed, match=r"data\.local=.*No space left on device for .*train-00000\.bin: make room there"
    ):
        cached(place, tmp_path / "other")[np.array([0])]


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(SettingError, match=r"data\.tokens=gs://.*pip install 'distill-kd\[gcs\]'"):
        open_rows("gs://bucket/tokens", DataConfig(cache=str(tmp_path)))
