"""Shards: the sequences of a plain build whoever makes them, read from files, a cache and storage out of order."""

import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from job import ROOT, Shelf, assert_same, is_alive, results, wait_for
from object_store import forget_servers, serving
from shards import (
    CAUSAL,
    MASKED,
    VOCABULARY,
    assert_same_rows,
    packing,
    prepare,
    read_rows,
    source_of,
    start,
    write_text,
)
from stored import Answer, Faulty, folder_of_files, forwarded, open_rows, write_shards

from distill.config.settings import DataConfig
from distill.data import build_tokens, remote, shards
from distill.data.batches import prefetch
from distill.data.build_tokens import Host, this_host
from distill.data.disk_cache import workers
from distill.data.file_maps import MOST
from distill.data.remote import retried
from distill.data.sequence_store import ids_of, loss_mask_of
from distill.data.shards import PARTS, Shards, read_index
from distill.data.sources import _files
from distill.data.storage import Folder, fetch_file
from distill.runtime.errors import Interrupted, SettingError, StorageFailed
from distill.runtime.signals import handled

SHARD = 4000  # bytes: a shard for each file of the small text
pytestmark = pytest.mark.usefixtures("small_units")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sequences in one file of each part, made by one process of one unit."""
    place = tmp_path_factory.mktemp("plain")
    prepare(text, place, place / "scratch")
    return place


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- what is written


def test_one_file_is_the_rows_and_the_index_describes_it(plain: Path) -> None:
    index = read_index(Folder(str(plain), "data.tokens"))
    for part in PARTS:
        file, found = plain / f"{part}-00000.bin", index.part(part)
        content = file.read_bytes()
        assert read_rows(plain, part).tobytes() == content
        assert found.files == [(file.name, len(content) // 32, sha256(file))]
        assert found.sequences == len(content) // 32
        assert index.digest(part) == hashlib.sha256(f"uint16 16\n{sha256(file)}".encode()).hexdigest()
    assert 0.1 < index.heldout.documents / 240 < 0.3 and index.made.text == "a small text"
    assert {path.name for path in plain.iterdir()} == {"index.json", *(f"{part}-00000.bin" for part in PARTS)}


@pytest.mark.parametrize(("count", "hosts"), [(3, 1), (1, 2), (2, 2)])
def test_any_number_of_processes_and_hosts_makes_the_same(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, hosts: int
) -> None:
    monkeypatch.setattr(build_tokens, "FEW_BYTES", 0)
    monkeypatch.setattr(build_tokens, "POLL", 0.05)
    place, given = tmp_path / "place", {"shard_bytes": SHARD, "workers": count}
    with ThreadPoolExecutor() as pool:
        made = [
            pool.submit(prepare, text, place, tmp_path / f"scratch{host}", host=Host(host, hosts), **given)
            for host in range(hosts)
        ]
        index, *others = (each.result() for each in made)
    assert all(other == index for other in others) and not (place / "parts").exists()
    assert_same_rows(place, plain)
    for part in PARTS:
        found, rows = index.part(part), read_rows(plain, part)
        assert len(found.files) == 6 and all(sha256(place / file.name) == file.sha256 for file in found.files)
        np.testing.assert_array_equal(found.counts, np.bincount(rows.ravel(), minlength=VOCABULARY))
        assert found.tokens == (rows != 0).sum()


def test_a_folder_that_another_host_removes_while_it_is_made_is_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `build_tokens` awaits it of a host that is done."""

    def mkdir(path: object, mode: int) -> None:
        raise FileExistsError(path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(FileNotFoundError):
        Folder(str(tmp_path), "data.out").write("index.json", b"{}")


@pytest.mark.parametrize("form", ["pairs", "prompts", "causal"])
def test_every_format_of_rows_is_the_same_in_shards(text: Path, tmp_path: Path, form: str) -> None:
    source = source_of(text, prompt="prompt") if form == "prompts" else source_of(text)
    rows = packing(format=CAUSAL, prompts=form == "prompts", cross_documents=True)
    if form == "pairs":
        rows = packing(format=replace(MASKED, pairs=True))
    prepare(source, tmp_path / "whole", tmp_path / "scratch", rows)
    index = prepare(source, tmp_path / "shards", tmp_path / "scratch", rows, shard_bytes=SHARD)
    assert_same_rows(tmp_path / "whole", tmp_path / "shards")
    found = read_rows(tmp_path / "shards", "train")
    assert bool(loss_mask_of(found).all()) == (form != "prompts") and len(found) > 100 and len(index.train.files) == 6
    np.testing.assert_array_equal(index.train.counts, np.bincount(ids_of(found).ravel(), minlength=VOCABULARY))


# --- several hosts, and death


def test_a_host_is_known_by_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (name for names in build_tokens.HOSTS.values() for name in names):
        monkeypatch.delenv(name, raising=False)
    assert this_host() == (0, 1)
    for given, host in (
        ({"SLURM_NODEID": "0"}, (0, 1)),  # as in the shell of a batch script, which is no step
        ({"SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "3"}, (3, 4)),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}, (1, 2)),
    ):
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert this_host() == host


def killed_in_the_middle(text: Path, place: Path, scratch: Path, count: int = 1, **hosts: int) -> None:
    killed = start(text, str(place), scratch, count, waits=True, **hosts)
    wait_for(lambda: len(list(place.glob("parts/*.json"))) >= 2, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (place / "index.json").exists()


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_command_resumes_after_a_kill(count: int, tmp_path: Path) -> None:
    text, place = write_text(tmp_path / "text", files=6 if count == 1 else 40), tmp_path / "place"
    killed_in_the_middle(text, place, tmp_path / "a", count)
    done = [place / f"train-{path.stem}.bin" for path in place.glob("parts/*.json")]
    kept = {path: path.stat().st_mtime_ns for path in done}
    again = start(text, str(place), tmp_path / "a", count)
    assert again.wait(500) == 0, again.communicate()
    assert {path: path.stat().st_mtime_ns for path in done} == kept
    prepare(text, tmp_path / "plain", tmp_path / "scratch")
    assert_same_rows(place, tmp_path / "plain")


def test_the_share_of_a_killed_host_is_made_by_the_next_command(text: Path, plain: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    first = start(text, str(place), tmp_path / "a", host=0, hosts=2)
    killed_in_the_middle(text, place, tmp_path / "b", host=1, hosts=2)
    wait_for(lambda: {"00000", "00002", "00004"} <= {path.stem for path in place.glob("parts/*.json")}, first)
    first.kill()
    assert {int(line) for line in first.communicate()[0].split()} == {0, 2, 4}
    prepare(text, place, tmp_path / "c", shard_bytes=SHARD)
    assert_same_rows(place, plain)


def test_a_host_that_waits_for_one_that_is_gone_ends(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_tokens, "POLL", 0.01)
    monkeypatch.setattr(build_tokens, "PATIENCE", 0.1)
    with pytest.raises(StorageFailed, match="start the same command again to resume"):
        prepare(text, tmp_path / "place", tmp_path / "scratch", host=Host(0, 2), shard_bytes=SHARD)
    assert sorted(path.stem for path in (tmp_path / "place").glob("parts/*.json")) == ["00000", "00002", "00004"]


def test_who_waits_goes_on_while_shards_come_and_until_the_index_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every look there is a shard more, after nearly the patience; then another host has written the index."""
    folder, now = Folder(str(tmp_path), "data.tokens"), [0.0]
    tasks = [build_tokens.Task(folder, tmp_path, packing(), number, number, ()) for number in range(6)]
    (tmp_path / "parts").mkdir()

    def pause(*_: object) -> None:
        now[0] += 0.9 * build_tokens.PATIENCE
        done = len(list((tmp_path / "parts").iterdir()))
        (tmp_path / ("index.json" if done == 4 else tasks[done].record)).touch()

    monkeypatch.setattr(build_tokens, "pause", pause)
    monkeypatch.setattr(build_tokens, "time", SimpleNamespace(monotonic=lambda: now[0]))
    build_tokens._finish(tasks, "a text", None)
    assert now[0] > 4 * build_tokens.PATIENCE and (tmp_path / "index.json").read_bytes() == b""


def test_a_run_whose_shards_another_one_finishes_takes_them(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs without numbers prepare one text in one folder, each with a cache of its own."""
    make, place, begun = build_tokens.pack, tmp_path / "place", list[int]()

    def overtaken(*arguments: Any) -> Any:
        begun.append(1)
        if len(begun) == 2:
            prepare(text, place, tmp_path / "other", shard_bytes=SHARD)
        return make(*arguments)

    monkeypatch.setattr(build_tokens, "pack", overtaken)
    index = prepare(text, place, tmp_path / "scratch", shard_bytes=SHARD)
    assert_same_rows(place, plain)
    assert index.train.files and not (place / "parts").exists()


def test_another_division_of_the_text_writes_other_files(text: Path, plain: Path, tmp_path: Path) -> None:
    """Two runs with other data.shard_bytes may prepare a text in one folder: neither spoils what the other reads."""
    place = tmp_path / "place"
    first = prepare(text, place, tmp_path / "a", shard_bytes=SHARD)
    prepare(text, place, tmp_path / "b", shard_bytes=3 * SHARD)
    assert_same_rows(place, plain)
    assert all(sha256(place / file.name) == file.sha256 for file in first.train.files)


# --- processes


def test_a_killed_worker_is_one_clear_line() -> None:
    killed = pytest.raises(SettingError, match=r"^data\.workers=2: a process .* was killed")
    with killed, workers(DataConfig(workers=2)) as pool:
        assert pool is not None
        pool.submit(os.kill, pool.submit(os.getpid).result(), signal.SIGKILL).result()


PROGRAM = """
import os, sys, time
from distill.config.settings import DataConfig
from distill.data.disk_cache import workers
print("once", [name for name in ("torch", "transformers", "datasets", "hydra") if name in sys.modules], flush=True)
with workers(DataConfig(workers=2)) as pool:
    print(pool.submit(os.getpid).result(), __file__, flush=True)
    time.sleep(500)
"""


def test_processes_do_not_run_the_program_again_and_end_with_it(tmp_path: Path) -> None:
    """A program without `if __name__ == "__main__"` starts them, loads nothing heavy, and is killed."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-u", "program.py"]
    program = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None and program.stdout.readline() == "once []\n"
    worker, file = program.stdout.readline().split()
    assert Path(file).name == "program.py" and is_alive(int(worker))
    program.kill()
    program.wait()
    wait_for(lambda: not is_alive(int(worker)))


COUNT, FILE = 1003, 50  # sequences; 21 files
ROWS = np.random.default_rng(0).integers(0, 300, (COUNT, 16)).astype(np.uint16)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder, ROWS, FILE)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.01)


def cached(place: Path | str, folder: Path, files: float = 100) -> Shards:
    """The sequences of a folder or URL through a cache with room for so many files."""
    local = {"local": str(folder), "local_bytes": int(files * FILE * ROWS[0].nbytes), "shuffle_bytes": 100}
    return open_rows(place, DataConfig(cache=str(folder / "cache"), **local))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "shards").iterdir() if len(path.name) == 64)


def some(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, COUNT, 300)


def test_the_sequences_are_the_same_wherever_they_lie(place: Path, tmp_path: Path) -> None:
    for store in (open_rows(place, DataConfig(cache=str(tmp_path))), cached(place, tmp_path / "node")):
        assert store.shape == ROWS.shape and len(store) == COUNT and store.dtype == ROWS.dtype
        assert store.starts.tolist() == [*range(0, COUNT, FILE), COUNT]
        for numbers in (some(), np.array([COUNT - 1]), np.array([], np.int64), np.arange(COUNT)):
            np.testing.assert_array_equal(store[numbers], ROWS[numbers])
    assert not (tmp_path / "shards").exists() and len(files(tmp_path / "node")) == 21
    shutil.rmtree(tmp_path / "node" / "shards")  # under a run, which fills it again
    np.testing.assert_array_equal(store[some()], ROWS[some()])


def test_few_files_stay_open(tmp_path: Path) -> None:
    """Of two stores of 251 files each, where a process may open little more than are mapped at once."""
    write_shards(tmp_path / "many", ROWS, 4)
    stores = [open_rows(tmp_path / "many", DataConfig(cache=str(tmp_path))), cached(tmp_path / "many", tmp_path)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + MOST + 10, hard))
    try:
        for store in stores:
            np.testing.assert_array_equal(store[some()], ROWS[some()])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_cache_is_bounded_and_what_was_used_last_stays(place: Path, tmp_path: Path) -> None:
    for seed in range(3):
        np.testing.assert_array_equal(cached(place, tmp_path, files=4)[some(seed)], ROWS[some(seed)])
        assert 3 <= len(files(tmp_path)) <= 4
    for number in (0, 1, 2, 0, 3):  # file 0 is used again
        last = cached(place, tmp_path / "other", files=3)
        last[np.array([number * FILE])]
    assert {path.name for path in files(tmp_path / "other")} == {last.files[number].sha256 for number in (0, 2, 3)}


def read_in_process(place: str, folder: str, counter: str, seed: int) -> None:
    def counted(name: str, setting: str, target: Path) -> None:
        with open(counter, "a") as file:
            file.write(f"{name}\n")
        time.sleep(0.01)
        fetch_file(name, setting, target)

    shards.fetch_file = counted  # type: ignore[attr-defined]
    Path(counter).with_suffix(f".{seed}").write_text(json.dumps(cached(place, Path(folder))[some(seed)].tolist()))


def test_each_file_is_fetched_by_one_process_of_a_machine(place: Path, tmp_path: Path) -> None:
    counter, context = tmp_path / "fetched", multiprocessing.get_context("fork")
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
        assert json.loads(counter.with_suffix(f".{seed}").read_text()) == ROWS[some(seed)].tolist()


# --- storage over HTTP


def test_storage_with_faults(place: Path, tmp_path: Path, lines: list[str]) -> None:
    """Resets, 503s, half answers and wrong bytes: all sequences come, and all are right."""
    pytest.importorskip("aiohttp")
    server = Faulty(folder_of_files(place), whole=True)
    with server.serving() as url:
        store = cached(url, tmp_path, files=6)
        server.share = 0.4
        for seed in range(6):
            np.testing.assert_array_equal(store[some(seed)], ROWS[some(seed)])
    assert sum(server.faults.values()) > 30 and min(server.faults.values()) > 3 and len(server.faults) == 5
    assert any("trying again" in line for line in lines)


def test_damage_behind_a_url_is_named_by_its_file(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    source = folder_of_files(place)

    def answered_wrongly(method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        found = source(method, path, headers, body)
        return found._replace(body=found.body[:-1] + b"!") if path.endswith("00002.bin") and found.body else found

    with Faulty(answered_wrongly).serving() as url:
        store = cached(url, tmp_path)
        assert np.array_equal(store[np.arange(100)], ROWS[:100])
        for _ in range(2):
            with pytest.raises(SettingError, match=rf"^{url}/train-00002\.bin is damaged \(.*SHA-256 differs"):
                store[np.array([2 * FILE])]


SOON = 25.0  # seconds: a second, on a machine that may be busy with something else; else all would wait for 30
AFTER = 0.3  # seconds until the signal comes


@contextmanager
def ends_soon_after_a_signal() -> Iterator[None]:
    timer = threading.Timer(AFTER, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    begun = time.monotonic()
    yield
    assert AFTER * 0.9 < time.monotonic() - begun < AFTER + SOON
    timer.join()


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pause takes its longest."""
    monkeypatch.setattr(remote.random, "uniform", lambda low, high: 30.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Faulty, Shards]]:
    """A server of files, and the sequences that are read from it."""
    pytest.importorskip("aiohttp")
    write_shards(tmp_path / "s", np.arange(3200, dtype=np.uint16).reshape(200, 16), 10)
    made = Faulty(folder_of_files(tmp_path / "s"))
    with made.serving() as url:
        yield made, open_rows(url, DataConfig(cache=str(tmp_path / "c"), local_bytes=1 << 20, shuffle_bytes=100))


@pytest.mark.usefixtures("long_pauses")
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_loop_ends_with_the_step_under_way(server: tuple[Faulty, Shards], threads: int) -> None:
    """Storage that refuses all, sequences that are not in the cache: the loop gets no window, the signal is kept."""
    faulty, store = server
    first = store[np.arange(10)]
    faulty.share = 1.0
    windows = prefetch(lambda step: store[np.arange(10 * step, 10 * step + 10)], range(9), threads)
    with pytest.raises(Interrupted) as error, handled() as signals, signals.deferred():
        np.testing.assert_array_equal(next(windows), first)
        with ends_soon_after_a_signal():
            assert next(windows, None) is None
        assert signals.requests()[0] == 1
    assert error.value.status == 143


@pytest.mark.usefixtures("long_pauses")
@pytest.mark.parametrize("threads", [0, 1])
def test_outside_of_the_loop_a_signal_raises(threads: int) -> None:
    """As while the first window is waited for: it must not be taken for the end of the run."""

    def out_of_order(step: int) -> Any:
        return retried(lambda: (_ for _ in ()).throw(OSError("503")), "s3://a/b")

    with pytest.raises(Interrupted), handled(), ends_soon_after_a_signal():
        next(prefetch(out_of_order, range(2), threads), None)
        pytest.fail("went on")


def test_a_request_without_an_answer_and_processes_are_given_up(server: tuple[Faulty, Shards]) -> None:
    """The processes would sleep for a minute."""
    faulty, store = server
    faulty.rate = 1.0  # byte a second
    with pytest.raises(Interrupted), handled(), ends_soon_after_a_signal():
        store[np.array([150])]
    with pytest.raises(Interrupted), handled(), ends_soon_after_a_signal(), workers(DataConfig(workers=2)) as pool:
        assert pool is not None
        list(pool.map(time.sleep, [60, 60]))


# --- whole runs on sequences in object storage: the student is that of a disk, bitwise

# Files of about 3 kB, of which two make a window, and four are kept on the machine: it fetches all the time.
SMALL = ["data.shard_bytes=3000", "data.shuffle_bytes=6000", "data.local_bytes=12500", "corpus.max_sequences=null"]
RUN = [*SMALL, "train.epochs=null", "train.steps=45", "train.save_every=5", "evaluate.pseudo_perplexity.fraction=0"]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    pytest.importorskip("moto")
    with serving("rows") as url:
        yield url


@pytest.fixture(scope="module")
def local(shelf: Shelf) -> Iterator[Path]:
    """The folder of a run on plain shards of this machine."""
    folder = shelf.root / "local_rows"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_files, "SHARD_BYTES", 1)
        assert shelf.run(folder, *RUN, f"data.cache={shelf.root / 'small'}") == 0
        yield folder


@pytest.fixture
def proxy(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """Between the runs and the S3 server."""
    host, port = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://").split(":")
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.01)
    made = Faulty(forwarded(host, int(port)))
    with made.serving() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        forget_servers()
        yield made
    forget_servers()


def stored(shelf: Shelf, bucket: str) -> list[str]:
    """Sequences in the bucket, and a cache of their files on this machine."""
    places = {"tokens": f"{bucket}/tokens", "local": shelf.root / "node", "cache": shelf.root / "other"}
    return [*RUN, *(f"data.{name}={place}" for name, place in places.items())]


@pytest.mark.slow
def test_the_student_does_not_depend_on_where_rows_lie(shelf: Shelf, local: Path, bucket: str, proxy: Faulty) -> None:
    """Files on a disk, in storage, and the same behind storage that fails."""
    sound, broken = shelf.root / "sound", shelf.root / "broken"
    assert shelf.run(sound, *stored(shelf, bucket)) == 0  # prepares the sequences, too
    assert_same(sound, local)
    assert results(sound)["evaluation"] == results(local)["evaluation"]
    proxy.share = 0.3
    assert shelf.run(broken, *stored(shelf, bucket)) == 0
    assert_same(broken, local)
    assert proxy.faults
    assert sum(file.stat().st_size for file in (shelf.root / "node" / "shards").iterdir()) <= 12_500


@pytest.mark.slow  # the S3 library tries several times in each of the eight attempts
def test_a_run_whose_storage_goes_away_goes_on_when_it_is_back(
    shelf: Shelf, local: Path, bucket: str, proxy: Faulty, capfd: pytest.CaptureFixture[Any]
) -> None:
    folder, source = shelf.root / "interrupted", proxy.source

    def until_a_checkpoint(*request: Any) -> Answer:
        if any(folder.glob("checkpoints/*")):
            proxy.last = proxy.requests
        return source(*request)

    proxy.source = until_a_checkpoint
    assert shelf.run(folder, *stored(shelf, bucket)) == 74
    said = capfd.readouterr().err
    assert "storage has failed 12 times, at last with" in said.splitlines()[-1] and "Traceback" not in said
    assert any(folder.glob("checkpoints/*"))
    proxy.source, proxy.last = source, 1 << 60
    assert shelf.run(folder, *stored(shelf, bucket)) == 0
    assert_same(folder, local)
