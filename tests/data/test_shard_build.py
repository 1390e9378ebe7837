"""Shards are the sequences of a plain build, whatever number of processes and hosts make them, or are killed."""

import hashlib
import signal
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
from distill.data.sequence_store import ids_of, loss_mask_of
from distill.data.shards import PARTS, read_index
from distill.data.sources import _files
from distill.data.storage import Folder
from distill.data.work import divide, work_of
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
    names = {"index.json"} | {f"{part}-00000.bin" for part in PARTS}
    assert {path.name for path in plain.iterdir()} == names


@pytest.mark.parametrize(("workers", "hosts"), [(3, 1), (1, 2), (2, 2)])
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
        np.testing.assert_array_equal(index.part(part).counts, np.bincount(rows.ravel(), minlength=VOCABULARY))
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
    index = prepare(source, tmp_path / "shards", tmp_path / "scratch", rows, shard_bytes=SMALL)
    assert len(index.train.files) == 6
    assert_same_rows(tmp_path / "whole", tmp_path / "shards")
    found = read_rows(tmp_path / "shards", "train")
    ids = ids_of(found)
    assert bool(loss_mask_of(found).all()) == (form != "prompts") and len(found) > 100
    np.testing.assert_array_equal(index.train.counts, np.bincount(ids.ravel(), minlength=VOCABULARY))


# --- the division of the work, and the held-out rule


def test_shards_are_consecutive_and_of_about_the_size(text: Path) -> None:
    units = work_of([source_of(text)])
    assert divide(units, np.dtype(np.uint16), 3 * SMALL) == [range(n, n + 2) for n in (0, 2, 4)]
    assert len(divide(units, np.dtype(np.uint32), 3 * SMALL)) == 6  # sequences of twice the size
    assert divide([], np.dtype(np.uint16), SMALL) == [range(0)]


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
    assert {path.name.split("-")[0] for path in place.iterdir()} == {"index.json", "train", "heldout"}


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


def test_a_run_whose_shards_another_one_finishes_takes_them(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs without numbers prepare one text in one folder, each with a cache of its own."""
    make, place, begun = build_tokens.pack, tmp_path / "place", list[int]()

    def overtaken(*arguments: Any) -> Any:
        begun.append(1)
        if len(begun) == 2:
            prepare(text, place, tmp_path / "other", shard_bytes=SMALL)
        return make(*arguments)

    monkeypatch.setattr(build_tokens, "pack", overtaken)
    index = prepare(text, place, tmp_path / "scratch", shard_bytes=SMALL)
    assert_same_rows(place, plain)
    assert index.train.files and not (place / "parts").exists()


def test_another_division_of_the_text_writes_other_files(text: Path, plain: Path, tmp_path: Path) -> None:
    """Two runs with other data.shard_bytes may prepare a text in one folder: neither spoils what the other reads."""
    place = tmp_path / "place"
    first = prepare(text, place, tmp_path / "a", shard_bytes=SMALL)
    prepare(text, place, tmp_path / "b", shard_bytes=3 * SMALL)
    assert_same_rows(place, plain)
    for file in first.train.files:
        assert hashlib.sha256((place / file.name).read_bytes()).hexdigest() == file.sha256


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
