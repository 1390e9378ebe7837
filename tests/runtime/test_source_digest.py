"""The digest of a user's code: another one when a file that it may use was edited."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distill.runtime.users_code import source_digest

LOSSES = '''
"""Losses."""
from . import more as m
from .helpers import kl, unused
from torch import nn
SCALE = 0.5  # of the loss

class Base(nn.Module):
    pass

class Loss(Base):
    """A loss."""
    def losses(self, a, b):
        from .late import shift
        return scaled(kl(a, b)) + m.part(a) + shift

def scaled(value):
    return SCALE * value

class Other:
    pass
'''
FILES = {
    "__init__": "from .losses import *\n",
    "losses": LOSSES,
    "helpers": "WEIGHT = 1\ndef kl(a, b):\n    return a - b * WEIGHT\ndef unused():\n    pass\n",
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
        ("losses", "scaled(kl(a, b)) +", "kl(a, b) +"),
        ("losses", "SCALE * value", "SCALE + value"),
        ("losses", "SCALE = 0.5", "SCALE = 0.25"),
        ("losses", "class Base(nn.Module):\n    pass", "class Base(nn.Module):\n    title = 'x'"),
        ("losses", "from torch import nn", "from other import nn"),
        ("helpers", "a - b", "a + b"),
        ("helpers", "WEIGHT = 1", "WEIGHT = 2"),
        ("more", "return a", "return -a"),
        ("late", "1", "2"),
        ("losses", "class Other:\n    pass", "class Other:\n    title = 'x'"),
        ("more", "return a", "return a\nprint('imported')"),
    ],
)
def test_what_it_uses_counts(digest: Callable[..., str | None], file: str, old: str, new: str) -> None:
    assert digest() is not None and digest() != digest(file, old, new)
    assert digest(path="Loss") != digest(file, old, new, path="Loss"), "by the package, which takes it from there"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("losses", "SCALE = 0.5  # of the loss", "SCALE   =   0.5\n\n# another remark"),
        ("losses", "A loss.", "A better loss."),
        ("losses", "Losses.", "Losses, two of them."),
    ],
)
def test_comments_and_docstrings_do_not(digest: Callable[..., str | None], file: str, old: str, new: str) -> None:
    assert digest() == digest(file, old, new)


def test_nothing_is_imported(digest: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    before = {*sys.modules}
    assert digest() is not None and digest("helpers", "WEIGHT = 1", "raise SystemExit") is not None
    assert not [name for name in {*sys.modules} - before if name.startswith("mine_")]


def test_of_libraries_and_of_what_is_not_there_is_none(digest: Callable[..., str | None]) -> None:
    assert digest("losses", "class Loss", "class Loss(", path="losses.Loss") is None
    for path in ("torch.optim.SGD", "json.dumps", "distill.optim.optimizers.adamw.Adamw", "nowhere.Loss", "__main__.A"):
        assert source_digest(path) is None, path
