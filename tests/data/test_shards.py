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
from stored import FAULTS, Faulty, folder_of_files, open_rows, write_shards

from distill.config.settings import DataConfig
from distill.data import remote, shards
from distill.data.file_maps import MOST
from distill.data.shards import AT_ONCE, Shards
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
    np.testing.assert_array_equal(cached(place, tmp_path)[np.arange(COUNT)], rows)
    assert sum("is damaged; it is fetched again" in line for line in lines) == 3


@pytest.mark.parametrize("change", [spoil, lambda path: os.truncate(path, 40)], ids=["changed", "cut"])
def test_a_file_that_changes_after_it_was_checked_is_checked_again(
    rows: np.ndarray, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    write_shards(tmp_path / "place", rows, FILE)
    plain, through_cache = open_rows(tmp_path / "place", DataConfig()), cached(tmp_path / "place", tmp_path / "node")
    for store in (plain, through_cache):
        np.testing.assert_array_equal(store[np.arange(COUNT)], rows)
    change(tmp_path / "node/shards" / through_cache.files[1].sha256)
    np.testing.assert_array_equal(through_cache[np.arange(COUNT)], rows)
    change(tmp_path / "place/train-00001.bin")
    with pytest.raises(StorageFailed, match=r"train-00001.bin is damaged .* restore that file"):
        plain[np.array([FILE])]
    np.testing.assert_array_equal(plain[np.arange(FILE)], rows[:FILE])


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

    shards.fetch_file = counted  # type: ignore[attr-defined]
    store = cached(place, Path(folder))
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


def test_the_files_of_a_read_are_fetched_at_the_same_time(
    rows: np.ndarray, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(AT_ONCE)

    def fetch(name: str, setting: str, target: Path) -> None:
        together.wait(300)
        fetch_file(name, setting, target)

    monkeypatch.setattr(shards, "fetch_file", fetch)
    numbers = np.arange(0, 2 * AT_ONCE * FILE, FILE)
    np.testing.assert_array_equal(cached(place, tmp_path)[numbers], rows[numbers])


# --- faults


def test_storage_over_http_with_faults(rows: np.ndarray, place: Path, tmp_path: Path, lines: list[str]) -> None:
    """Resets, 503s, half answers and wrong bytes: all sequences come, and all are right."""
    pytest.importorskip("aiohttp")
    server = Faulty(folder_of_files(place), whole=True)
    with server.serving() as url:
        store = cached(url, tmp_path, files=6)
        server.share = 0.4
        for seed in range(6):
            np.testing.assert_array_equal(store[some(seed=seed)], rows[some(seed=seed)])
    assert sum(server.faults.values()) > 30 and min(server.faults.values()) > 3 and len(server.faults) == 5
    assert any("trying again" in line for line in lines)


def test_storage_that_stays_away_ends_in_one_line_and_resumes(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    server = Faulty(folder_of_files(place), kinds=tuple(kind for kind in FAULTS if kind != "wrong"), whole=True)
    with server.serving() as url:
        store = cached(url, tmp_path)
        server.share = 1.0
        with pytest.raises(StorageFailed, match=r"train-000\d\d\.bin: storage has failed 12 times, at last with "):
            store[some()]
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


@pytest.mark.parametrize("local", [False, True])
def test_damage_of_files_is_noticed_before_they_are_used(
    local: bool, rows: np.ndarray, place: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "shards here"
    shutil.copytree(place, folder)
    spoil(folder / "train-00001.bin")
    (folder / "train-00002.bin").unlink()
    store = cached(folder, tmp_path) if local else open_rows(folder, DataConfig(cache=str(tmp_path)))
    assert np.array_equal(store[np.arange(50)], rows[:50])
    for number, reason in ((1, "is damaged"), (2, "cannot be (read|fetched)")):
        with pytest.raises((StorageFailed, SettingError), match=rf"train-0000{number}\.bin {reason}"):
            store[np.array([number * FILE])]


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(SettingError, match=r"data\.tokens=gs://.*pip install 'distill-kd\[gcs\]'"):
        open_rows("gs://bucket/tokens", DataConfig(cache=str(tmp_path)))
