"""Shards are the sequences of a plain build, whatever number of processes and hosts make them, die or join."""

import hashlib
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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

from distill.config.settings import DataConfig
from distill.data import build_tokens
from distill.data.heldout import HeldOut
from distill.data.sequence_format import IDS
from distill.data.shards import claims, host, publish
from distill.data.shards.claims import Claims
from distill.data.shards.destination import LocalFolder, destination
from distill.data.shards.groups import Work, divide, work_of
from distill.data.shards.host import Host
from distill.data.shards.index import ShardIndex
from distill.data.shards.records import PARTS
from distill.data.sources import Shard, _files
from distill.runtime.errors import SettingError

ROOT = Path(__file__).resolve().parents[2]
SMALL = 4000  # bytes: a shard for each file of the small text


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is a unit of work, and a block is a few rows."""
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(publish, "BLOCK_BYTES", 1000)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sequences in one shard of each part, made by one process."""
    place = tmp_path_factory.mktemp("plain")
    prepare(text, place, place / "scratch")
    return place


# --- what is written


def test_one_shard_is_the_rows_and_has_the_digest_of_their_bytes(plain: Path) -> None:
    meta = json.loads((plain / "meta.json").read_bytes())
    for part in PARTS:
        content = (plain / f"{part}-00000.rows").read_bytes()
        assert read_rows(plain, part).tobytes() == content
        assert meta[part]["digest"] == hashlib.sha256(b"uint16 16\n" + content).hexdigest()
        assert meta[part]["shards"] == 1 and meta[part]["bytes"] == meta[part]["plain_bytes"] == len(content)
    assert 0.1 < meta["heldout"]["documents"] / 240 < 0.3
    names = {"meta.json"} | {f"{part}{end}" for part in PARTS for end in (".index", ".counts.npy", "-00000.rows")}
    assert {path.name for path in plain.iterdir()} == names


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_shards_hold_the_same_rows(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, compression: str | None
) -> None:
    monkeypatch.setattr(host, "FEW_BYTES", 0)
    settings = {"workers": workers, "shard_bytes": SMALL, "compression": compression}
    meta = prepare(text, tmp_path / "place", tmp_path / "scratch", **settings)
    assert_same_rows(tmp_path / "place", plain)
    for part in PARTS:
        index = ShardIndex.from_bytes((tmp_path / "place" / f"{part}.index").read_bytes())
        assert meta[part]["shards"] == index.num_shards == 6 and meta["compression"] == compression
        for block in map(index.block, range(len(index))):
            file = (tmp_path / "place" / index.layout.shard_name(block.shard)).read_bytes()
            assert hashlib.sha256(file[block.offset : block.offset + block.size]).digest() == block.digest
        rows = read_rows(plain, part)
        counts = np.load(tmp_path / "place" / f"{part}.counts.npy")
        np.testing.assert_array_equal(counts, np.bincount(rows.ravel(), minlength=VOCABULARY))
        assert meta[part]["tokens"] == (rows != 0).sum() and meta[part]["plain_bytes"] == rows.nbytes
        assert (meta[part]["bytes"] < rows.nbytes) is (compression == "zstd")
    assert not (tmp_path / "scratch").exists()


def test_the_digest_depends_on_rows_and_not_on_how_they_are_stored(text: Path, tmp_path: Path) -> None:
    found = {}
    for name, compression, heldout in (("a", None, 0.2), ("b", "zstd", 0.2), ("c", "zstd", 0.0)):
        settings = {"shard_bytes": SMALL, "compression": compression}
        meta = prepare(text, tmp_path / name, tmp_path / "scratch", packing(heldout), **settings)
        found[name] = meta["train"]["digest"]
    assert found["a"] == found["b"] != found["c"]


@pytest.mark.parametrize("form", ["pairs", "prompts", "causal"])
def test_every_format_of_rows_is_the_same_in_shards(text: Path, tmp_path: Path, form: str) -> None:
    source = source_of(text, prompt="prompt") if form == "prompts" else source_of(text)
    rows = {
        "pairs": packing(format=replace(MASKED, pairs=True)),
        "prompts": packing(format=CAUSAL, prompts=True, cross_documents=True),
        "causal": packing(format=CAUSAL, cross_documents=True),
    }[form]
    prepare(source, tmp_path / "whole", tmp_path / "scratch", rows)
    prepare(source, tmp_path / "shards", tmp_path / "scratch", rows, shard_bytes=SMALL, compression="zstd")
    assert_same_rows(tmp_path / "whole", tmp_path / "shards")
    found = read_rows(tmp_path / "shards", "train")
    ids = found & np.uint32(IDS) if form == "prompts" else found
    assert (found != ids).any() == (form == "prompts") and len(found) > 100
    counts = np.load(tmp_path / "shards" / "train.counts.npy")
    np.testing.assert_array_equal(counts, np.bincount(ids.ravel(), minlength=VOCABULARY))


def test_a_part_without_rows_has_no_shard(text: Path, tmp_path: Path) -> None:
    meta = prepare(text, tmp_path / "place", tmp_path / "scratch", packing(0.0), shard_bytes=SMALL)
    assert meta["heldout"]["rows"] == meta["heldout"]["shards"] == 0 and meta["train"]["shards"] == 6
    assert not list((tmp_path / "place").glob("heldout-*")) and len(read_rows(tmp_path / "place", "heldout")) == 0


# --- groups and the held-out rule


def test_groups_are_consecutive_and_of_about_the_size(text: Path) -> None:
    work = work_of([source_of(text)])
    groups = divide(work, np.dtype(np.uint16), 3 * SMALL)
    assert [each for group in groups for each in group.work] == work
    assert [group.first for group in groups] == [0, 2, 4] and [group.number for group in groups] == [0, 1, 2]
    assert len(divide(work, np.dtype(np.uint32), 3 * SMALL)) == 6  # sequences of twice the size
    assert len(divide([], np.dtype(np.uint16), SMALL)) == 1


def test_units_of_unknown_size_are_not_all_put_together() -> None:
    source = source_of(ROOT / "README.md", "text")
    unknown = [Work(Shard((f"{number}.txt",)), source) for number in range(100)]
    assert 2 <= len(divide(unknown, np.dtype(np.uint16), 1 << 30)) <= 50


def test_the_held_out_rule_reads_a_bounded_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path, files=3)
    work = work_of([source_of(tmp_path, fraction=0.05)])
    read: list[str] = []
    documents = _files.FileSource.documents

    def noted(self: Any, part: Shard) -> Any:
        read.extend(part.paths)
        return documents(self, part)

    monkeypatch.setattr(_files.FileSource, "documents", noted)
    everything = build_tokens.held_out_rule(0.2, work)
    assert everything.by_block and len(read) == 3  # fewer than 50 documents in all
    read.clear()
    monkeypatch.setattr(build_tokens, "LOOKED_AT", 1)
    some = build_tokens.held_out_rule(0.2, work)
    assert some.by_block and some != everything and len(read) == 1
    # 40 documents in a third of the text are enough: there should be 120.
    assert build_tokens.held_out_rule(0.2, work_of([source_of(tmp_path)])) == HeldOut(0.2) and len(read) == 2


# --- claims


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [1000.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
    yield now


def test_a_claim_lasts_as_long_as_it_changes(tmp_path: Path, clock: list[float]) -> None:
    folder = LocalFolder(str(tmp_path))
    one, other = Claims(folder, "a1"), Claims(folder, "b2")
    assert one.take(3) and not other.take(3) and other.take(4)
    for _ in range(5):  # renewed again and again
        clock[0] += 0.9 * claims.STALE
        one.take(3)
        assert not other.take(3)
    clock[0] += claims.STALE - 1
    assert not other.take(3)
    clock[0] += 2
    assert other.take(3) and not one.take(3)
    other.release(3)
    assert one.take(3)


def test_whoever_goes_on_in_the_same_folder_has_its_claims_at_once(tmp_path: Path) -> None:
    folder = LocalFolder(str(tmp_path))
    assert Claims(folder, claims.owner_of(tmp_path)).take(0)
    assert Claims(folder, claims.owner_of(tmp_path)).take(0) and not Claims(folder, "other").take(0)


def test_claims_are_renewed_and_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "STALE", 0.08)
    folder = LocalFolder(str(tmp_path))
    with Claims(folder, "a1") as held:
        assert held.take(0)
        first = folder.read("parts/00000.claim")
        deadline = time.monotonic() + 10
        while folder.read("parts/00000.claim") == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert folder.names("parts") == set()


# --- several hosts, and death


def wait_for(condition: Any, *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.01)


def test_hosts_share_the_work_and_one_that_is_killed_is_replaced(text: Path, plain: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    a, b, c = (start(text, str(place), tmp_path / name) for name in "abc")
    wait_for(lambda: len(list(place.glob("parts/*.claim"))) >= 3, a, b, c)
    a.send_signal(signal.SIGKILL)
    outputs = [process.communicate(timeout=60) for process in (b, c)]
    assert [b.returncode, c.returncode] == [0, 0], outputs
    assert a.wait() == -signal.SIGKILL and sum(int(output[0].split()[-1]) for output in outputs) >= 4
    assert all(int(output[0].split()[-1]) >= 1 for output in outputs)
    assert_same_rows(place, plain)
    assert not (place / "parts").exists() and not list(place.glob(".*"))


def test_a_host_that_was_killed_goes_on_with_what_it_had(
    text: Path, plain: Path, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, scratch = tmp_path / "place", tmp_path / "a"
    killed = start(text, str(place), scratch)
    wait_for(lambda: len(list(place.glob("parts/*.json"))) >= 3, killed)  # the plan and two records
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = {path.name: path.stat().st_mtime_ns for path in place.glob("train-*")}
    prepare(text, place, scratch, shard_bytes=99)  # resumes as it was begun
    assert any("with data.shard_bytes=4000, data.compression=zstd" in line for line in lines)
    assert any("resuming a preparation: " in line for line in lines)
    assert_same_rows(place, plain)
    kept = [name for name, changed in before.items() if (place / name).stat().st_mtime_ns == changed]
    assert len(kept) >= 2


def test_a_claim_behind_a_finished_preparation_is_no_work(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a host leaves it that was late by a minute: others saw all groups as free, and packed them again."""
    place = tmp_path / "place"
    shutil.copytree(plain, place)
    folder = destination(str(place), "data.tokens")
    folder.write("parts/00000.claim", b"{}")
    monkeypatch.setattr(host, "pack", lambda *_: pytest.fail("it is packed again"))
    with Claims(folder, owner := "aa") as claims:
        work = divide(work_of([source_of(text)]), np.dtype(np.uint16), 4000)
        Host(folder, work, packing(), None, tmp_path / owner, claims, DataConfig(workers=1)).work()


@pytest.mark.slow
def test_a_host_of_two_processes_that_is_killed_goes_on(tmp_path: Path) -> None:
    text, place, scratch = write_text(tmp_path / "text", files=40), tmp_path / "place", tmp_path / "a"
    killed = start(text, str(place), scratch, workers=2)
    wait_for(lambda: len(list(place.glob("parts/*.json"))) >= 4, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (place / "meta.json").exists()
    again = start(text, str(place), scratch, workers=2)
    published = int(again.communicate(timeout=60)[0].split()[-1])
    assert again.returncode == 0 and published < 40 - 2
    prepare(text, tmp_path / "plain", tmp_path / "scratch")
    assert_same_rows(place, tmp_path / "plain")
    assert not (place / "parts").exists() and not scratch.exists()


def test_units_that_are_packed_are_not_packed_again(text: Path, plain: Path, tmp_path: Path, monkeypatch: Any) -> None:
    pack, packed = host.pack, []

    def fail_at_third(stem: str, *args: Any) -> Any:
        if len(packed) == 3:
            raise OSError("no more")
        packed.append(stem)
        return pack(stem, *args)

    monkeypatch.setattr(host, "pack", fail_at_third)
    with pytest.raises(OSError, match="no more"):
        prepare(text, tmp_path / "place", tmp_path / "scratch")
    assert (tmp_path / "place").is_dir() and not list((tmp_path / "place").glob("parts/*.claim"))
    monkeypatch.setattr(host, "pack", lambda stem, *args: (packed.append(stem), pack(stem, *args))[1])
    prepare(text, tmp_path / "place", tmp_path / "scratch")
    assert len(packed) == len(set(packed)) == 6
    assert_same_rows(tmp_path / "place", plain)


@pytest.mark.parametrize("loss", [("000000.train", b""), ("000001.json", b""), ("000000.heldout", None)])
def test_files_that_a_crash_of_the_machine_has_emptied_are_made_again(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: Any, loss: tuple[str, bytes | None]
) -> None:
    """Names are kept without contents; sequences would be missing, and nothing would say so."""

    def killed(*_: Any) -> None:
        raise OSError("the machine goes down")

    monkeypatch.setattr(host, "publish", killed)
    with pytest.raises(OSError, match="goes down"):
        prepare(text, tmp_path / "place", tmp_path / "scratch")
    monkeypatch.setattr(host, "publish", publish.publish)
    (file,) = (tmp_path / "scratch").rglob(loss[0])
    file.unlink() if loss[1] is None else file.write_bytes(loss[1])
    prepare(text, tmp_path / "place", tmp_path / "scratch")
    assert_same_rows(tmp_path / "place", plain)


def test_who_comes_late_finds_what_others_have_finished(
    text: Path, plain: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Another host finishes everything between this one's last look and its own finish."""
    place = tmp_path / "place"
    finish = build_tokens.finish

    def first_another(*args: Any) -> Any:
        monkeypatch.setattr(build_tokens, "finish", finish)
        finish(*args)
        return finish(*args)

    monkeypatch.setattr(build_tokens, "finish", first_another)
    prepare(text, place, tmp_path / "scratch", shard_bytes=SMALL)
    assert_same_rows(place, plain)
    assert not (place / "parts").exists() and not (tmp_path / "scratch").exists()


def test_another_division_of_the_text_is_refused(text: Path, tmp_path: Path) -> None:
    folder = LocalFolder(str(tmp_path / "place"))
    plan = {"shard_bytes": SMALL, "compression": None, "units": 7}
    assert folder.create("parts/plan.json", json.dumps(plan).encode())
    with pytest.raises(SettingError, match=r"^data\.tokens=.*divides the text in 7 units of work, not 6"):
        prepare(text, tmp_path / "place", tmp_path / "scratch")


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = LocalFolder(str(tmp_path))
    with pytest.raises(ValueError), folder.written("shard") as path:
        path.write_bytes(b"half")
        raise ValueError
    assert not folder.exists("shard") and folder.names("parts") == set()
    folder.write("shard", b"whole")
    assert folder.read("shard") == b"whole" and not folder.create("shard", b"other")
    assert folder.create("other", b"1") and folder.read("shard") == b"whole"
    folder.remove("none")


def test_a_folder_may_be_made_and_removed_at_the_same_moment(tmp_path: Path) -> None:
    """As by hosts that finish together: who writes may find the folder gone, and nothing else."""
    folder, unexpected = LocalFolder(str(tmp_path)), []

    def attempt(call: Any) -> None:
        try:
            for number in range(5):
                call(number)
        except FileNotFoundError:
            pass
        except Exception as error:
            unexpected.append(error)

    for _ in range(100):
        calls = [lambda _: folder.remove("parts"), lambda number: folder.write(f"parts/{number}", b"1")]
        threads = [threading.Thread(target=attempt, args=(call,)) for call in (*calls, calls[0])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    folder.remove("parts")
    assert not unexpected and not folder.exists("parts")
