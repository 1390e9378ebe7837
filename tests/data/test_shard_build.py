"""Shards are the sequences of a plain build, whatever number of processes and hosts make them, or are killed."""

import hashlib
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from job import wait_for
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

from distill.data import build_tokens
from distill.data.build_tokens import Host, this_host
from distill.data.heldout import HeldOut
from distill.data.sequence_store import ids_of, loss_mask_of
from distill.data.shards import PARTS, read_index
from distill.data.sources import Shard, _files
from distill.data.storage import Folder
from distill.data.work import Work, divide, work_of
from distill.runtime.errors import StorageFailed

ROOT = Path(__file__).resolve().parents[2]
SMALL = 4000  # bytes: a shard for each file of the small text


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is a unit of work, and may be a shard."""
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sequences in one file of each part, made by one process."""
    place = tmp_path_factory.mktemp("plain")
    prepare(text, place, place / "scratch")
    return place


# --- what is written


def test_one_file_is_the_rows_and_the_index_describes_it(plain: Path) -> None:
    index = read_index(Folder(str(plain), "data.tokens"))
    for part in PARTS:
        content, found = (plain / f"{part}-00000.bin").read_bytes(), index.part(part)
        assert read_rows(plain, part).tobytes() == content
        digest = hashlib.sha256(content).hexdigest()
        assert (
            found.files == [(f"{part}-00000.bin", len(content) // 32, digest)] and found.sequences == len(content) // 32
        )
        assert index.digest(part) == hashlib.sha256(f"uint16 16\n{digest}".encode()).hexdigest()
    assert 0.1 < index.heldout.documents / 240 < 0.3 and index.made.text == "a small text"
    names = {"index.json"} | {f"{part}{end}" for part in PARTS for end in (".counts.npy", "-00000.bin")}
    assert {path.name for path in plain.iterdir()} == names


@pytest.mark.parametrize(("workers", "hosts"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_any_number_of_processes_and_hosts_makes_the_same(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, hosts: int
) -> None:
    monkeypatch.setattr(build_tokens, "FEW_BYTES", 0)
    monkeypatch.setattr(build_tokens, "POLL", 0.05)
    place = tmp_path / "place"
    with ThreadPoolExecutor() as pool:
        made = [
            pool.submit(
                prepare,
                text,
                place,
                tmp_path / f"scratch{host}",
                host=Host(host, hosts),
                shard_bytes=SMALL,
                workers=workers,
            )
            for host in range(hosts)
        ]
        index, *others = (each.result() for each in made)
    assert all(other == index for other in others) and not (place / "parts").exists()
    assert_same_rows(place, plain)
    for part in PARTS:
        assert len(index.part(part).files) == 6
        for file in index.part(part).files:
            assert hashlib.sha256((place / file.name).read_bytes()).hexdigest() == file.sha256
        rows = read_rows(plain, part)
        counts = np.load(place / f"{part}.counts.npy")
        np.testing.assert_array_equal(counts, np.bincount(rows.ravel(), minlength=VOCABULARY))
        assert index.part(part).tokens == (rows != 0).sum()


@pytest.mark.parametrize("form", ["pairs", "prompts", "causal"])
def test_every_format_of_rows_is_the_same_in_shards(text: Path, tmp_path: Path, form: str) -> None:
    source = source_of(text, prompt="prompt") if form == "prompts" else source_of(text)
    rows = {
        "pairs": packing(format=replace(MASKED, pairs=True)),
        "prompts": packing(format=CAUSAL, prompts=True, cross_documents=True),
        "causal": packing(format=CAUSAL, cross_documents=True),
    }[form]
    prepare(source, tmp_path / "whole", tmp_path / "scratch", rows)
    assert len(prepare(source, tmp_path / "shards", tmp_path / "scratch", rows, shard_bytes=SMALL).train.files) == 6
    assert_same_rows(tmp_path / "whole", tmp_path / "shards")
    found = read_rows(tmp_path / "shards", "train")
    ids = ids_of(found)
    assert bool(loss_mask_of(found).all()) == (form != "prompts") and len(found) > 100
    counts = np.load(tmp_path / "shards" / "train.counts.npy")
    np.testing.assert_array_equal(counts, np.bincount(ids.ravel(), minlength=VOCABULARY))


def test_a_part_without_rows_has_no_file(text: Path, tmp_path: Path) -> None:
    index = prepare(text, tmp_path / "place", tmp_path / "scratch", packing(0.0), shard_bytes=SMALL)
    assert index.heldout.sequences == 0 and index.heldout.files == [] and len(index.train.files) == 6
    assert not list((tmp_path / "place").glob("heldout-*")) and len(read_rows(tmp_path / "place", "heldout")) == 0


# --- the division of the work, and the held-out rule


def test_shards_are_consecutive_and_of_about_the_size(text: Path) -> None:
    units = work_of([source_of(text)])
    assert divide(units, np.dtype(np.uint16), 3 * SMALL) == [range(n, n + 2) for n in (0, 2, 4)]
    assert len(divide(units, np.dtype(np.uint32), 3 * SMALL)) == 6  # sequences of twice the size
    assert divide([], np.dtype(np.uint16), SMALL) == [range(0)]


def test_a_text_that_is_no_giant_has_a_shard_for_each_of_many_processes() -> None:
    source = source_of(ROOT / "README.md", "text")
    units = [Work(Shard((f"{number}.txt",), size=1 << 20), source) for number in range(1000)]
    assert 60 <= len(divide(units, np.dtype(np.uint16), 64 << 20)) <= 67
    assert len(divide(units[:8], np.dtype(np.uint16), 64 << 20)) == 4  # of a MiB, or of two units


def test_units_of_unknown_size_are_not_all_put_together() -> None:
    source = source_of(ROOT / "README.md", "text")
    unknown = [Work(Shard((f"{number}.txt",)), source) for number in range(100)]
    assert 2 <= len(divide(unknown, np.dtype(np.uint16), 1 << 30)) <= 100


def test_the_held_out_rule_reads_a_bounded_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path, files=3)
    units = work_of([source_of(tmp_path, fraction=0.05)])
    read: list[str] = []
    documents = _files.FileSource.documents

    def noted(self: Any, part: Shard) -> Any:
        read.extend(part.paths)
        return documents(self, part)

    monkeypatch.setattr(_files.FileSource, "documents", noted)
    everything = build_tokens.held_out_rule(0.2, units)
    assert everything.by_block and len(read) == 3  # fewer than 50 documents in all
    read.clear()
    monkeypatch.setattr(build_tokens, "LOOKED_AT", 1)
    some = build_tokens.held_out_rule(0.2, units)
    assert some.by_block and some != everything and len(read) == 1
    # 40 documents in a third of the text are enough: there should be 120.
    assert build_tokens.held_out_rule(0.2, work_of([source_of(tmp_path)])) == HeldOut(0.2) and len(read) == 2


# --- several hosts, and death


def test_a_host_is_known_by_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in build_tokens.HOSTS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    assert this_host() == (0, 1)
    monkeypatch.setenv("SLURM_NODEID", "0")  # as in the shell of a batch script, which is no step
    assert this_host() == (0, 1)
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "4")
    monkeypatch.setenv("SLURM_NODEID", "3")
    assert this_host() == (3, 4)
    monkeypatch.setenv("GROUP_RANK", "1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert this_host() == (1, 2)


def killed_in_the_middle(text: Path, place: Path, scratch: Path, workers: int = 1, **hosts: int) -> None:
    killed = start(text, str(place), scratch, workers, waits=True, **hosts)
    wait_for(lambda: len(list(place.glob("parts/*.json"))) >= 2, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (place / "index.json").exists()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_command_resumes_after_a_kill(workers: int, tmp_path: Path) -> None:
    text, place = write_text(tmp_path / "text", files=6 if workers == 1 else 40), tmp_path / "place"
    killed_in_the_middle(text, place, tmp_path / "a", workers)
    before = {path: path.stat().st_mtime_ns for path in place.glob("parts/*.json")}
    kept = {place / f"train-{path.stem}.bin": (place / f"train-{path.stem}.bin").stat().st_mtime_ns for path in before}
    again = start(text, str(place), tmp_path / "a", workers)
    assert again.wait(500) == 0, again.communicate()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    prepare(text, tmp_path / "plain", tmp_path / "scratch")
    assert_same_rows(place, tmp_path / "plain")
    assert {path.name.split("-")[0] for path in place.iterdir()} == {
        "index.json", "train", "heldout", "train.counts.npy", "heldout.counts.npy",
    }  # fmt: skip


def test_hosts_share_the_work_and_the_share_of_a_killed_one_is_made_by_the_next_command(
    text: Path, plain: Path, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    first = start(text, str(place), tmp_path / "a", host=0, hosts=2)
    killed_in_the_middle(text, place, tmp_path / "b", host=1, hosts=2)
    wait_for(lambda: {"00000", "00002", "00004"} <= {path.stem for path in place.glob("parts/*.json")}, first)
    first.kill()
    assert {int(line) for line in first.communicate()[0].split()} == {0, 2, 4}
    prepare(text, place, tmp_path / "c", shard_bytes=SMALL)
    assert_same_rows(place, plain)


def test_a_host_that_waits_for_one_that_is_gone_ends(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_tokens, "POLL", 0.01)
    monkeypatch.setattr(build_tokens, "PATIENCE", 0.1)
    with pytest.raises(StorageFailed, match="start the same command again to resume"):
        prepare(text, tmp_path / "place", tmp_path / "scratch", host=Host(0, 2), shard_bytes=SMALL)
    assert sorted(path.stem for path in (tmp_path / "place").glob("parts/*.json")) == ["00000", "00002", "00004"]


def test_shards_of_the_first_host_are_signs_of_life(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is done waits for the index as long as the first one makes shards.

    By its clock it is 3 s from one look to the next; in each of them the first host makes one of its three shards.
    """
    place, make, now = tmp_path / "place", build_tokens.make_shard, [0.0]
    looked, shard_made = threading.Semaphore(0), threading.Semaphore(0)

    def pause(*_: object) -> None:
        if now[0] < 9.0:
            now[0] += 3.0
            looked.release()
            assert shard_made.acquire(timeout=300)
        else:
            time.sleep(0.01)

    def make_in_turn(task: build_tokens.Task) -> build_tokens.ShardRecord:
        is_of_the_first = task.number % 2 == 0
        assert not is_of_the_first or looked.acquire(timeout=300)
        record = make(task)
        if is_of_the_first:
            shard_made.release()
        return record

    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    for name, value in {"PATIENCE": 5.0, "pause": pause, "time": clock, "make_shard": make_in_turn}.items():
        monkeypatch.setattr(build_tokens, name, value)
    with ThreadPoolExecutor() as pool:
        hosts = [(Host(number, 2), tmp_path / f"scratch{number}") for number in range(2)]
        made = [pool.submit(prepare, text, place, own, host=host, shard_bytes=SMALL) for host, own in hosts]
        assert made[0].result() == made[1].result()
    assert_same_rows(place, plain)


def test_who_waits_for_shards_that_another_has_finished_reads_them(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run removes the records before this one, which no launcher has numbered either, has seen them all."""
    monkeypatch.setattr(build_tokens, "PATIENCE", 1.0)
    place, missing = tmp_path / "place", build_tokens._make_missing

    def then_another(*args: Any) -> Any:
        made = missing(*args)
        monkeypatch.setattr(build_tokens, "_make_missing", missing)
        prepare(text, place, tmp_path / "other", shard_bytes=SMALL)
        return made

    monkeypatch.setattr(build_tokens, "_make_missing", then_another)
    prepare(text, place, tmp_path / "scratch", shard_bytes=SMALL)
    assert_same_rows(place, plain)


@pytest.mark.parametrize(
    ("file", "content"),
    [("parts/00002.json", b""), ("parts/00002.json", b"{}"), ("train-00002.bin", b""), ("heldout-00002.bin", None)],
)
def test_what_a_crash_of_the_machine_has_emptied_is_made_again(
    file: str,
    content: bytes | None,
    text: Path,
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names are kept without contents; sequences would be missing, and nothing would say so."""
    place = tmp_path / "place"

    def ends(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build_tokens, "_finish", ends)
        prepare(text, place, tmp_path / "scratch", shard_bytes=SMALL)
    (place / file).unlink() if content is None else (place / file).write_bytes(content)
    made: list[int] = []
    make = build_tokens.make_shard
    monkeypatch.setattr(build_tokens, "make_shard", lambda task: (made.append(task.number), make(task))[1])
    prepare(text, place, tmp_path / "scratch", shard_bytes=SMALL)
    assert made == [2]
    assert_same_rows(place, plain)


def test_shards_of_other_sizes_are_made_anew(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    killed_in_the_middle(text, place, tmp_path / "a")
    prepare(text, place, tmp_path / "scratch", shard_bytes=3 * SMALL)
    assert_same_rows(place, plain)
    assert len(json.loads((place / "index.json").read_bytes())["train"]["files"]) == 3


def test_another_division_of_the_text_writes_other_files(text: Path, plain: Path, tmp_path: Path) -> None:
    """Two runs with other data.shard_bytes may prepare a text in one folder: neither spoils what the other reads."""
    place = tmp_path / "place"
    first = prepare(text, place, tmp_path / "a", shard_bytes=SMALL)
    prepare(text, place, tmp_path / "b", shard_bytes=3 * SMALL)
    assert_same_rows(place, plain)
    for file in first.train.files:
        assert hashlib.sha256((place / file.name).read_bytes()).hexdigest() == file.sha256


def test_who_comes_late_finds_what_others_have_finished(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host, which no launcher has numbered, finishes everything before this one does."""
    place, finish = tmp_path / "place", build_tokens._finish

    def first_another(*args: Any) -> Any:
        monkeypatch.setattr(build_tokens, "_finish", finish)
        prepare(text, place, tmp_path / "other", shard_bytes=SMALL)
        return finish(*args)

    monkeypatch.setattr(build_tokens, "_finish", first_another)
    prepare(text, place, tmp_path / "scratch", shard_bytes=SMALL)
    assert_same_rows(place, plain)
    assert not (place / "parts").exists()
