"""Storage that fails (one line, status 74, nothing lost), and what is set in the environment before torch reads it."""

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from job import Shelf, assert_same, distill, lines_of, results
from safetensors.torch import save_file

from distill.config.settings import TrackerConfig
from distill.report import report
from distill.runs import trackers
from distill.runtime.errors import StorageFailed
from distill.runtime.files import atomic
from distill.runtime.host import (
    keep_compiled_kernels,
    limit_failure,
    limit_spinning,
    require_room,
    size,
    storage_failure,
)
from distill.runtime.jsonl import JsonLines, read_lines

KERNELS = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow larger than that: the system refuses it as it would on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def raised(work: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as error:
        work()
    return error.value


def raise_from(error: BaseException) -> None:
    raise RuntimeError("could not write") from error


def archive(folder: Path) -> None:
    """Torch cannot end the archive that the full disk cut short, and raises an error of its own about that."""
    with (folder / "weights").open("wb", buffering=0) as file:
        torch.save(torch.zeros(5000), file)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: (folder / "a").write_bytes(bytes(5000)), "File too large"),
        (lambda folder: save_file({"a": torch.zeros(5000)}, folder / "b"), "File too large"),
        (lambda folder: np.save(folder / "c.npy", np.zeros(5000)), ""),
        (archive, "File too large"),
        (lambda folder: [(folder / "file").touch(), (folder / "file" / "x").mkdir()], "/file"),
    ],
    ids=["Python", "safetensors", "numpy", "torch", "a file in the way"],
)
def test_errors_of_storage_are_known_whoever_raises_them(
    write: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    with files_up_to(1000):
        error = raised(lambda: write(tmp_path))
    for outer in (error, raised(lambda: raise_from(error))):
        failure = storage_failure(outer)
        assert failure is not None and failure.status == 74
        assert words in str(failure) and "\n" not in str(failure)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE])
def test_what_fails_in_an_open_file_names_no_path(number: int) -> None:
    """As a write or a flush does; the folder of the run stands in for it."""
    failure = storage_failure(OSError(number, os.strerror(number)), "/somewhere")
    assert failure is not None and str(failure).startswith(f"/somewhere: {os.strerror(number)}")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        OSError("no number"),
        FileNotFoundError(2, "no such file", "x"),
        PermissionError(errno.EACCES, "Permission denied"),  # of a socket, which names no file
    ],
)
def test_other_errors_are_no_errors_of_storage(error: Exception) -> None:
    assert storage_failure(error) is None and limit_failure(error) is None


def test_a_bug_in_dealing_with_an_error_of_storage_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as error:
        try:
            tmp_path.mkdir()
        except FileExistsError:
            {}["bug"]
    assert storage_failure(error.value) is None


def test_limits_of_the_system_and_sizes_are_named(tmp_path: Path) -> None:
    assert "ulimit -n" in str(limit_failure(OSError(errno.EMFILE, "Too many open files", "x")))
    assert "ulimit -u" in str(limit_failure(RuntimeError("can't start new thread")))
    shown = ["0 bytes", "999 bytes", "1.5 kB", "2.5 MB", "3 GB", "4 TB"]
    assert [size(n) for n in (0, 999, 1500, 2.5e6, 3e9, 4e12)] == shown
    with pytest.raises(StorageFailed, match="the thing needs 1e\\+06 TB"):
        require_room(tmp_path, 10**18, "the thing")


def test_what_could_not_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    log.append({"step": 1})
    with files_up_to(20), pytest.raises(OSError):
        log.append({"step": 2, "long": "x" * 50})
    assert (tmp_path / "log.jsonl").read_bytes() == b'{"step": 1}\n'
    log.append({"step": 2})
    assert [line["step"] for line in read_lines(tmp_path / "log.jsonl")] == [1, 2]
    with files_up_to(100), pytest.raises(OSError), atomic(tmp_path / "whole") as new:
        new.write_bytes(bytes(500))
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_tracker_that_fails_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = trackers.build(TrackerConfig(kind="tensorboard"), tmp_path, {}, "run")
    (tmp_path / "tensorboard").write_text("a file where the folder of its events should be")
    for step in (1, 2, 3):
        tracker.log_metrics({"loss": 1.0}, step)
    tracker.close()
    (said,) = [record.message for record in caplog.records if "tracker" in record.message]
    assert "tracker.kind=tensorboard has failed" in said


# --- whole runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["/dev/null", "/dev/null/run", "{file}", "{file}/run"])
def test_a_run_folder_that_cannot_be(shelf: Shelf, capfd: pytest.CaptureFixture, where: str) -> None:
    (shelf.root / "file").touch()
    folder = where.format(file=shelf.root / "file")
    assert shelf.run(Path(folder)) == 2
    assert folder in lines_of(capfd)[-1]


def test_a_full_disk_ends_the_run_and_room_lets_it_go_on(
    shelf: Shelf, done: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """The run needs more than the disk has; when that is cleared, the same command gives the same student."""
    (disk := tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        folder, ballast, statuses = disk / "run", disk / "ballast", list[int]()
        with ballast.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
            while True:
                stream.write(bytes(1 << 16))
        for freed in (0, 200_000, 1_000_000, 500_000, 20_000_000):
            os.truncate(ballast, ballast.stat().st_size - freed)
            statuses.append(shelf.run(folder))
            error = capfd.readouterr().err
            assert "Traceback" not in error, error
            assert statuses[-1] == 0 or f"{folder}" in error.splitlines()[-1], error
        assert statuses[:3] == [74] * 3 and statuses[-1] == 0
        assert_same(folder, done)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_report_that_cannot_be_written_does_not_end_the_run(
    shelf: Shelf, done: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    def full(folder: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "plots" / "loss.png"))

    folder = shelf.root / "no_report"
    with monkeypatch.context() as patched:
        patched.setattr(report, "write", full)
        assert shelf.run(folder) == 0
    assert_same(folder, done)
    said = capfd.readouterr().err
    assert "loss.png: No space left on device" in said and f"distill report run={folder}" in said
    assert results(folder)["finished"] and not (folder / "report.html").exists()
    assert distill("report", f"run={folder}") == 0 and (folder / "report.html").is_file()


# --- threads and kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "busy", "spins"),
    [("", 5.0, "10000"), ("", 30.0, "1000"), ("2", 45.0, "10000"), ("2", 70.0, "1000"), ("many", 0.0, "10000")],
)
def test_waiting_threads_give_way_sooner_beside_other_programs(
    monkeypatch: pytest.MonkeyPatch, threads: str, busy: float, spins: str
) -> None:
    """On four cores, of which others take so many percent; a user's own choice stays."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: busy)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    for name, value, expected in (("GOMP_SPINCOUNT", "7", "7"), ("OMP_WAIT_POLICY", "active", None), ("X", "", spins)):
        with monkeypatch.context() as patch:
            patch.delenv("GOMP_SPINCOUNT", raising=False)
            patch.setenv(name, value)
            limit_spinning()
            assert os.environ.pop("GOMP_SPINCOUNT", None) == expected


def test_compiled_kernels_stay_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS, "/elsewhere")
    keep_compiled_kernels()
    assert os.environ[KERNELS] == "/elsewhere"
    monkeypatch.delenv(KERNELS)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    keep_compiled_kernels()
    assert KERNELS not in os.environ  # torch chooses
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_compiled_kernels()
    assert os.environ[KERNELS] == str(tmp_path / ".cache/distill/kernels") and Path(os.environ[KERNELS]).is_dir()
