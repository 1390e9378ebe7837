"""Docstrings of installed packages give prose, without running any of them."""

import json
from pathlib import Path

import pytest

from distill.config.settings import DataConfig
from distill.data.sources import prose
from distill.data.sources.prose import is_prose, paragraphs

DOCSTRING = """Return the smallest number that is not in the list.

The list may be in any order, and :func:`sorted` is not
called on it; see `the paper <https://example.org>`_ for **more**.

Parameters
----------
values : list of int
    The numbers to look at, of which none may be negative.

Returns:
    Something.

>>> smallest([0, 1, 3])
2

| a | b |
|---|---|

    code = indented + 1

Examples
========
In the first example the numbers are taken from a file::

    read(x)
"""

PROSE = [
    "Return the smallest number that is not in the list.",
    "The list may be in any order, and sorted is not called on it; see the paper for more.",
    "The numbers to look at, of which none may be negative.",
    "In the first example the numbers are taken from a file:",
]


def test_only_full_sentences_pass() -> None:
    assert list(paragraphs(DOCSTRING)) == PROSE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Too short.",
        "no capital letter at the start of this otherwise good line.",
        "Ends in the middle of a sentence that",
        "A call such as f(x=1) is code and not at all prose in here.",
        "1. A numbered item of a list is not a paragraph of its own.",
        "X (int): The number of things that are to be counted here.",
    ],
)
def test_other_lines_do_not(text: str) -> None:
    assert not is_prose(text)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package whose modules would fail if they were run."""
    root = tmp_path / "package"
    for folder in ("inner", "tests"):
        (root / folder).mkdir(parents=True)
    (root / "a.py").write_text(
        'r"""The first module of the package says what the package is for."""\nraise RuntimeError\n'
        'class A:\n    """A class with a docstring that is long enough to count."""\n    if True:\n'
        '        async def f(self):\n            """A method below a condition is found like any other method."""\n'
    )
    (root / "inner/b.py").write_text(
        '"""The first module of the package says what the package is for!"""\n'
        'def f():\n    """A function in a folder of its own with its own words."""\n'
    )
    (root / "inner/broken.py").write_text('"""A module that Python cannot parse is left out of it all."""\ndef f(:\n')
    (root / "tests/c.py").write_text('"""A folder of tests holds no prose that anybody wants to read."""\n')
    monkeypatch.setattr(prose, "installed", lambda: {"package": (root, "1.0")})
    return root


def test_documents_are_folders_without_repeats(package: Path, tmp_path: Path, lines: list[str]) -> None:
    cache = DataConfig(cache=str(tmp_path / "cache"), workers=1)
    path = prose.build(cache)
    found = {record["name"]: record["text"] for record in map(json.loads, path.read_text().splitlines())}
    assert found == {
        "package#0": "The first module of the package says what the package is for.\n\n"
        "A class with a docstring that is long enough to count.\n\n"
        "A method below a condition is found like any other method.",
        "package.inner#0": "A function in a folder of its own with its own words.",
    }
    assert "package 1.0" in lines[0] and "read 4 paragraphs" in lines[-1]
    assert prose.build(cache) == path and len(lines) == 2


def test_the_standard_library_is_always_there() -> None:
    packages = prose.installed()
    root, version = packages["python"]
    assert version and (root / "argparse.py").exists()
    assert all(folder.is_dir() for folder, _ in packages.values())
    found = [
        text for name in ("argparse", "heapq", "logging/__init__") for text in prose._read(str(root / f"{name}.py"))
    ]
    assert len(found) > 60 and all(is_prose(text) or text.endswith(":") for text in found)
