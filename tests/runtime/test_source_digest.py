"""The digest of a user's code: another one when a file that it may use was edited."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distill.runtime.users_code import source_digest

LOSSES = '''
"""Losses."""
from . import more as m
from .helpers import kl
from torch import nn
SCALE = 0.5  # of the loss

class Loss(nn.Module):
    """A loss."""
    def losses(self, a, b):
        from .late import shift
        return SCALE * kl(a, b) + m.part(a) + shift
'''
FILES = {
    "__init__": "from .losses import *\n",
    "losses": LOSSES,
    "helpers": "WEIGHT = 1\ndef kl(a, b):\n    return a - b * WEIGHT\n",
    "more": "def part(a):\n    return a\n",
    "late": "shift = 1\n",
}


@pytest.fixture
def digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., str | None]:
    """The digest of `PACKAGE.losses.Loss` with a text in one of the files replaced."""
    name = f"mine_{abs(hash(request.node.name))}"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / name).mkdir()

    def of(file: str = "", old: str = "", new: str = "", path: str = "losses.Loss") -> str | None:
        for stem, text in FILES.items():
            assert stem != file or old in text
            (tmp_path / name / f"{stem}.py").write_text(text.replace(old, new) if stem == file else text)
        return source_digest(f"{name}.{path}")

    return of


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("losses", "SCALE * kl", "SCALE + kl"),
        ("losses", "SCALE = 0.5", "SCALE = 0.25"),
        ("losses", "from torch import nn", "from other import nn"),
        ("helpers", "a - b", "a + b"),
        ("helpers", "WEIGHT = 1", "WEIGHT = 2"),
        ("more", "return a", "return -a"),
        ("late", "1", "2"),
    ],
)
def test_what_it_uses_counts(digest: Callable[..., str | None], file: str, old: str, new: str) -> None:
    assert digest() is not None and digest() != digest(file, old, new)
    assert digest(path="Loss") != digest(file, old, new, path="Loss"), "by the package, which takes it from there"


def test_a_folder_without_an_init_is_a_package_too(digest: Callable[..., str | None], tmp_path: Path) -> None:
    assert digest() is not None
    next(tmp_path.glob("*/__init__.py")).unlink()
    module = f"{next(tmp_path.glob('mine_*')).name}.losses.Loss"
    before = source_digest(module)
    next(tmp_path.glob("*/late.py")).write_text("shift = 2\n")
    assert None is not before != source_digest(module)


def test_comments_and_docstrings_do_not(digest: Callable[..., str | None]) -> None:
    assert digest() == digest("losses", "SCALE = 0.5  # of the loss", "SCALE   =   0.5\n\n# another remark")
    assert digest() == digest("losses", "A loss.", "A better loss.") == digest("losses", "Losses.", "Two losses.")


def test_nothing_is_imported(digest: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    before = {*sys.modules}
    assert digest() is not None and digest("helpers", "WEIGHT = 1", "raise SystemExit") is not None
    assert not [name for name in {*sys.modules} - before if name.startswith("mine_")]


def test_of_libraries_and_of_what_is_not_there_is_none(digest: Callable[..., str | None]) -> None:
    assert digest("losses", "class Loss", "class Loss(", path="losses.Loss") is None
    for path in ("torch.optim.SGD", "json.dumps", "distill.optim.optimizers.adamw.Adamw", "nowhere.Loss", "__main__.A"):
        assert source_digest(path) is None, path
