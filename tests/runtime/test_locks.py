"""Locks between processes: held by one at a time, gone with it, and never taken for held where they cannot be."""

import fcntl
import threading
from pathlib import Path
from typing import Any

import pytest

from distill.data.new_tokenizer import TRAINING_TEXT, write_tokenizer
from distill.runtime.errors import SettingError
from distill.runtime.files import locked


def test_one_at_a_time_and_no_file_is_left(tmp_path: Path) -> None:
    """Another open file is another holder, in one process too."""
    inside, most, count = 0, 0, 0

    def work() -> None:
        nonlocal inside, most, count
        for _ in range(200):
            with locked(tmp_path / "lock") as held:
                inside += held
                most, count = max(most, inside), count + 1
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, count) == (1, 1600) and not list(tmp_path.iterdir())


def test_a_lock_without_waiting(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"), locked(tmp_path / "lock", wait=False) as held:
        assert not held and (tmp_path / "lock").exists()
    (tmp_path / "lock").touch()  # of a process that was killed
    with locked(tmp_path / "lock", wait=False) as held:
        assert held


def test_a_lock_that_cannot_be_had_is_not_worked_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(SettingError, match="cannot be locked"), locked(tmp_path / "lock"):
        pass
    with locked(tmp_path / "lock", wait=False) as held:  # as NFS answers where another host has it
        assert not held


def test_the_text_of_a_killed_training_is_removed(tmp_path: Path) -> None:
    left, of_another = tmp_path / f".a.json{TRAINING_TEXT}", tmp_path / f".b.json{TRAINING_TEXT}"
    left.write_text("text")

    class Written:
        def save(self, path: str) -> None:
            Path(path).write_text("{}")

    def train(text: Path, *_: Any) -> Any:
        assert text.read_text() == "some text\n" and not left.exists() and of_another.exists()
        return Written()

    with locked(of_another):
        write_tokenizer(train, ["some text"], 300, tmp_path / "new")
        assert {path.name for path in tmp_path.iterdir()} == {"new", of_another.name}
