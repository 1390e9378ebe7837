"""Commands under attack: sessions of processes, how they end, and what may be asked of an end."""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forked import Forked
from job import environment

CASES = int(os.environ.get("DISTILL_FUZZ", "0"))  # of each subject; without it a few, always the same
LONGEST = 300.0  # seconds that a command may take; beyond, it hangs
LEFT_BEHIND = 15.0  # seconds after which a process whose command has ended counts as left behind


class Ended(NamedTuple):
    """A command that has ended."""

    status: int
    errors: str

    def finished(self) -> None:
        assert self.status == 0, self.errors[-3000:]

    def refused(self, names: str, statuses: Collection[int] = (2,)) -> None:
        """One line that names the setting or the file, by a pattern, and is the last one."""
        lines = [line for line in self.errors.splitlines() if line.startswith("distill: ")]
        assert self.status in statuses and len(lines) == 1, self.errors[-3000:]
        assert self.errors.strip().endswith(lines[0]) and len(lines[0]) < 2000
        assert re.search(names, lines[0]), lines[0]


def some(cases: dict[str, Any], few: int = 4) -> list[Any]:
    """A seeded choice of the cases, as many as DISTILL_FUZZ says, as parameters of a test."""
    names = random.Random(CASES).sample(sorted(cases), min(CASES or few, len(cases)))
    return [pytest.param(cases[name], id=name) for name in names]


def start(*arguments: str, change: Callable[[], None] | None = None) -> Forked:
    """`distill ARGUMENTS` as the first process of a session; `change` is done in it before it begins."""
    return Forked(list(arguments), environment(), new_session=True, change=change)


def end(process: Forked) -> Ended:
    """Wait for a command and for those that it has started: none may hang, or be left behind."""
    try:
        process.wait(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        send(members(process.pid), signal.SIGKILL)
        pytest.fail(f"it hangs: {process.communicate(timeout=30)[1][-3000:]}")
    until = time.monotonic() + LEFT_BEHIND
    while (left := members(process.pid)) and time.monotonic() < until:
        time.sleep(0.02)
    send(left, signal.SIGKILL)
    errors = process.communicate(timeout=60)[1]
    assert not left, f"{len(left)} processes were left behind: {errors[-3000:]}"
    assert "Traceback (most recent call last)" not in errors, errors[-6000:]
    assert process.returncode is not None
    return Ended(process.returncode, errors)


def distill(*arguments: str, change: Callable[[], None] | None = None) -> Ended:
    return end(start(*arguments, change=change))


def student_of(folder: Path) -> str:
    """SHA-256 of the weights of the student of a run; empty where there are none."""
    path = folder / "student" / "model.safetensors"
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def steps_of(folder: Path) -> int:
    """How many steps a run has logged."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def members(session: int) -> list[int]:
    """The processes that are alive in a session, the first one's included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def send(processes: Iterable[int], number: int) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):  # it has ended in between
            os.kill(pid, number)


def _flip(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(max(len(content), 1))
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :] if content else b"x"


# The content of a file afterwards; None: it is gone.
DAMAGES: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "gone": lambda content, draw: None,
    "empty": lambda content, draw: b"",
    "cut": lambda content, draw: content[: draw.randrange(max(len(content), 1))],
    "a byte less": lambda content, draw: content[:-1],
    "longer": lambda content, draw: content + draw.randbytes(draw.randint(1, 40)),
    "a flipped bit": _flip,
    "all zeros": lambda content, draw: bytes(len(content)),
    "halves swapped": lambda content, draw: content[len(content) // 2 :] + content[: len(content) // 2],
    "random bytes": lambda content, draw: draw.randbytes(len(content)),
    "text": lambda content, draw: b"not what it was\n",
    "JSON": lambda content, draw: b'{"train": [1], "heldout": null}',
}


def damage(path: Path, kind: str, draw: random.Random) -> None:
    """Change a file; one that would be the same afterwards is cut by a byte."""
    before = path.read_bytes()
    after = DAMAGES[kind](before, draw)
    path.unlink()
    if after is not None:
        path.write_bytes(after if after != before else before[:-1])
