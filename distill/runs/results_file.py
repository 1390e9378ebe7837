"""results.json: the record of a finished run, written whole with a digest, and read back only as it was written."""

import hashlib
import json
from pathlib import Path
from typing import Any

from distill.runs.record import Record
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import check_digests, digests, read_settings, write_text
from distill.runtime.jsonl import without_nan

NAME = "results.json"
DIGEST = "sha256"  # of all else in the file


def write_results(path: Path, record: Record) -> None:
    """Write results.json at once: a folder that holds it is a finished run."""
    content = without_nan(record.to_json())
    write_text(path, json.dumps(content | {DIGEST: _digest(content)}, indent=1, allow_nan=False))


def read_results(path: Path) -> Record:
    """The record in results.json.

    Raises:
        FileNotFoundError: there is none.
        Damaged: it is not as it was written.
    """
    problem = "its content is not as it was written: its SHA-256 differs"
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content, dict) and content.pop(DIGEST, None) == _digest(content):
            return Record.from_json(content)
    except FileNotFoundError:
        raise
    except SettingError as error:
        problem = str(error)
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise Damaged(path, problem)


def read_run(folder: Path, setting: str, continued: bool = False) -> Record:
    """The record of the finished run in a folder.

    Args:
        setting: what error lines call the folder.
        continued: also where that run is being continued, which has not changed its record and student yet.

    Raises:
        SettingError: there is none.
    """
    try:
        record = read_results(folder.expanduser() / NAME)
    except (OSError, SettingError) as error:
        raise SettingError(f"{setting}={folder} is no finished run: {error}") from None
    if not continued and is_continued(folder.expanduser(), record):
        raise SettingError(
            f"{setting}={folder} is no finished run: it is being continued beyond step {record.training.steps}, and "
            "that has not ended: give its command again to finish it"
        )
    return record


def is_continued(folder: Path, record: Record) -> bool:
    """Whether a run has begun to go on from this record to another length, which config.yaml has, and has not ended."""
    train, before = read_settings(folder / "config.yaml").get("train"), record.training.length
    if not isinstance(train, dict) or before is None:
        return False
    now = {name: train.get(name) for name in ("epochs", "steps", "minutes", "patience")}
    return any(value != before.get(name) for name, value in now.items() if not isinstance(value, str))


def student_digests(folder: Path) -> dict[str, str]:
    """What the record keeps of the student of the run in `folder`: the digests of its files but for the README."""
    student = folder / "student"
    return digests(student, [path.name for path in student.iterdir() if path.is_file() and path.suffix != ".md"])


def check_student(folder: Path, record: Record) -> None:
    """Raises Damaged where a file of a finished student is no longer the one in its record, where that has digests."""
    check_digests(folder / "student", record.student_files)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
