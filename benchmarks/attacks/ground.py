"""Where attacks take place: an empty folder for each, commands as forked processes, and what several cases share."""

import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from forked import Forked
from job import environment

from benchmarks.attacks.case import Ended
from benchmarks.reliability.chaos import members, send

LONGEST = 120.0  # seconds that a command may take; beyond, it hangs
LEFT_BEHIND = 10.0  # seconds after which a process whose command has ended counts as left behind

Made = TypeVar("Made")


class Shared:
    """What is made once for many cases: models, texts, undisturbed runs, servers."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """`stack`: ends the servers."""
        self.folder, self._stack = folder, stack
        self._made: dict[str, Any] = {}
        self._lock = threading.RLock()

    def get(self, name: str, make: Callable[[Path], Made]) -> Made:
        """What `make` gives for the folder of this name, which is its own."""
        with self._lock:
            if name not in self._made:
                self._made[name] = make(self.folder / name)
            made: Made = self._made[name]
            return made

    def enter(self, name: str, make: Callable[[], AbstractContextManager[Made]]) -> Made:
        """What the context gives that stays open until the end."""
        return self.get(name, lambda _: self._stack.enter_context(make()))


class Ground:
    """An empty folder for one case, and the commands that are started in it."""

    def __init__(self, folder: Path, shared: Shared) -> None:
        self.folder, self.shared = folder, shared
        self._running: list[Any] = []

    @property
    def run(self) -> Path:
        """The folder of the case's run."""
        return self.folder / "run"

    def start(self, *arguments: str, change: Callable[[], None] | None = None, **variables: str) -> Any:
        """`distill ARGUMENTS` as the first process of a session; `change` is done in it before it begins."""
        process = Forked(list(arguments), environment() | variables, new_session=True, change=change)
        self._running.append(process)
        return process

    def end(self, process: Any, longest: float = LONGEST) -> Ended:
        """Wait for a command and for those that it has started; one that hangs is killed."""
        status: int | None = None
        try:
            status = process.wait(timeout=longest)
        except subprocess.TimeoutExpired:
            self.kill(process)
        until = time.monotonic() + LEFT_BEHIND
        while (left := members(process.pid)) and time.monotonic() < until:
            time.sleep(0.02)
        self.kill(process)
        output, errors = process.communicate(timeout=30)
        return Ended(status, output, errors, len(left))

    def distill(self, *arguments: str, change: Callable[[], None] | None = None, **variables: str) -> Ended:
        """The command from its start to its end."""
        return self.end(self.start(*arguments, change=change, **variables))

    @staticmethod
    def kill(process: Any) -> None:
        """SIGKILL to all processes of its session."""
        for pid in members(process.pid):
            send(pid, signal.SIGKILL)

    def close(self) -> None:
        """End what still runs, and remove the folder."""
        for process in self._running:
            self.kill(process)
        shutil.rmtree(self.folder, ignore_errors=True)


def new_ground(shared: Shared) -> Ground:
    """For one case."""
    return Ground(Path(tempfile.mkdtemp(prefix="case-", dir=shared.folder)), shared)


def student_of(folder: Path) -> str:
    """SHA-256 of the weights of the student of a run; empty where there are none."""
    path = folder / "student" / "model.safetensors"
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
