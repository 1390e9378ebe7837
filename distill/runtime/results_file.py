"""results.json: written whole with a digest of its content, and read back only as it was written."""

import hashlib
import json
from pathlib import Path
from typing import Any

from distill.runtime.errors import Damaged
from distill.runtime.files import atomic
from distill.runtime.jsonl import without_nan
from distill.runtime.manifest import check_digests, digests

STUDENT_FILES = "student_files"  # digests of the files in student/
DIGEST = "sha256"  # of all else in the file


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write results.json at once: a folder that holds it is a finished run."""
    content = json.loads(
        json.dumps(without_nan(results), allow_nan=False)
    )  # names of dicts become strings, as in files
    with atomic(path) as new:
        new.write_text(json.dumps(content | {DIGEST: _digest(content)}, indent=1), encoding="utf-8")


def read_results(path: Path) -> dict[str, Any]:
    """The content of results.json, without its digest.

    One of an older release has none, nor digests of the student, and is read as it is.

    Raises:
        FileNotFoundError: there is none.
        Damaged: it is not as it was written.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        results = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(path, f"{type(error).__name__}: {error}") from None
    if not isinstance(results, dict):
        raise Damaged(path, "it holds no JSON object")
    digest = results.pop(DIGEST, None)
    if (digest is not None or STUDENT_FILES in results) and digest != _digest(results):
        raise Damaged(path, "its content is not as it was written: its SHA-256 is another")
    return results


def student_digests(folder: Path) -> dict[str, str]:
    """What results.json keeps of the student of the run in `folder`: the digests of its files but for the README."""
    student = folder / "student"
    return digests(student, [path.name for path in student.iterdir() if path.is_file() and path.suffix != ".md"])


def check_student(folder: Path, results: dict[str, Any]) -> None:
    """Raises Damaged where the student of a finished run is no longer as results.json says, as far as that says so."""
    check_digests(folder / "student", results.get(STUDENT_FILES, {}))


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
