"""What cases are made of: tiny models, commands for short runs, and damage of files."""

import random
from collections.abc import Callable
from pathlib import Path

from job import library, save_model

from benchmarks.attacks.case import Ended
from benchmarks.attacks.ground import Ground, student_of

# A run of a few steps on one thread in a format that every machine has.
SHORT = [
    "corpus.sequence_length=32", "data.workers=1", "precision=fp32", "train.batch_size=4", "train.sequences_per_step=8",
    "train.epochs=null", "train.steps=3", "train.save_every=1", "train.log_every=1",
    "corpus.heldout=0.2", "evaluate.sets=[heldout]", "evaluate.max_sequences=4",
    "evaluate.pseudo_perplexity.fraction=0",
]  # fmt: skip
Damage = Callable[[bytes, random.Random], bytes | None]  # the content of a file afterwards; None: it is gone


def bert(ground: Ground) -> Path:
    """The folder of a BERT of two layers."""
    return ground.shared.get("bert", lambda folder: save_model(folder, "bert", 2))


def books(ground: Ground) -> Path:
    """A folder with a few made-up books."""
    return ground.shared.get("books", lambda folder: library(folder, 3))


def distilled(ground: Ground, cache: Path, folder: Path, *more: str) -> list[str]:
    """The command of a short distillation on the books: half of the BERT's layers."""
    return [
        "+recipe=distilbert_gutenberg", f"corpus.path={books(ground)}", f"data.cache={cache}", "teacher=pretrained",
        f"teacher.path={bert(ground)}", "student.layers=[0]", "objective=masked", *SHORT, f"hydra.run.dir={folder}",
        *more,
    ]  # fmt: skip


def undisturbed(ground: Ground, name: str, command: Callable[[Path, Path], list[str]]) -> tuple[str, Path]:
    """The student of a run that nothing happens to, and the cache that it has filled.

    Args:
        command: its arguments for a cache and a folder of the run.
    """

    def make(folder: Path) -> tuple[str, Path]:
        ended: Ended = ground.distill(*command(folder / "cache", folder / "run"))
        assert ended.status == 0, ended.errors
        return student_of(folder / "run"), folder / "cache"

    return ground.shared.get(name, make)


def _at(content: bytes, draw: random.Random) -> int:
    return draw.randrange(max(len(content), 1))


def _flip(content: bytes, draw: random.Random) -> bytes:
    at = _at(content, draw)
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :] if content else b"x"


def _zeros(content: bytes, draw: random.Random) -> bytes:
    at, size = _at(content, draw), 512
    return content[:at] + bytes(len(content[at : at + size])) + content[at + size :]


def _swap(content: bytes, draw: random.Random) -> bytes:
    """Two stretches in each other's place: the size is the same, and so is the count of every byte."""
    half = len(content) // 2
    return content[half : 2 * half] + content[:half] + content[2 * half :]


DAMAGES: dict[str, Damage] = {
    "gone": lambda content, draw: None,
    "empty": lambda content, draw: b"",
    "cut": lambda content, draw: content[: _at(content, draw)],
    "a byte less": lambda content, draw: content[:-1],
    "longer": lambda content, draw: content + draw.randbytes(draw.randint(1, 40)),
    "a flipped bit": _flip,
    "512 zeros": _zeros,
    "all zeros": lambda content, draw: bytes(len(content)),
    "halves swapped": _swap,
    "random bytes": lambda content, draw: draw.randbytes(len(content)),
    "text": lambda content, draw: b"not what it was\n",
    "JSON": lambda content, draw: b'{"train": [1], "heldout": null}',
}


def damage(path: Path, name: str, draw: random.Random) -> None:
    """Change a file; one that would be the same afterwards is cut by a byte."""
    before = path.read_bytes()
    after = DAMAGES[name](before, draw)
    if after is None:
        path.unlink()
    else:
        path.write_bytes(after if after != before else before[:-1])
