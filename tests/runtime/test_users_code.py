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


Digest = Callable[..., str | None]


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Digest:
    """The digest of `mine_too.losses.Loss` with a text in one of the files replaced."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_too").mkdir()

    def of(file: str = "", old: str = "", new: str = "", path: str = "losses.Loss") -> str | None:
        for stem, text in FILES.items():
            assert stem != file or old in text
            (tmp_path / "mine_too" / f"{stem}.py").write_text(text.replace(old, new) if stem == file else text)
        return source_digest(f"mine_too.{path}")

    return of


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("losses", "SCALE * kl", "SCALE + kl"),
        ("losses", "from torch import nn", "from other import nn"),
        ("helpers", "WEIGHT = 1", "WEIGHT = 2"),
        ("more", "return a", "return -a"),
        ("late", "1", "2"),
    ],
)
def test_what_it_uses_counts(digest: Digest, file: str, old: str, new: str, tmp_path: Path) -> None:
    assert None is not digest() != digest(file, old, new)
    assert digest(path="Loss") != digest(file, old, new, path="Loss"), "by the package, which takes it from there"
    (tmp_path / "mine_too" / "__init__.py").unlink()
    edited = source_digest("mine_too.losses.Loss")  # of a folder that is no package
    (tmp_path / "mine_too" / f"{file}.py").write_text(FILES[file])
    assert None is not edited != source_digest("mine_too.losses.Loss")


def test_comments_and_docstrings_do_not(digest: Digest) -> None:
    assert digest() == digest("losses", "SCALE = 0.5  # of the loss", "SCALE   =   0.5\n\n# another remark")
    assert digest() == digest("losses", "A loss.", "A better loss.") == digest("losses", "Losses.", "Two losses.")


def test_of_libraries_and_of_what_is_not_there_is_none(digest: Digest) -> None:
    """Nothing is imported for it."""
    assert digest("helpers", "WEIGHT = 1", "raise SystemExit") is not None
    assert digest("losses", "class Loss", "class Loss(", path="losses.Loss") is None
    for path in ("torch.optim.SGD", "json.dumps", "distill.optim.optimizers.adamw.Adamw", "nowhere.Loss", "__main__.A"):
        assert source_digest(path) is None, path
    assert "mine_too" not in sys.modules
