"""Cache folders that are made once, by whichever process needs them first, and the processes that do the work."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path

from distill.config.settings import DataConfig
from distill.data.remote import pause
from distill.runtime.errors import SettingError
from distill.runtime.files import atomic, locked, sha256
from distill.runtime.signals import in_force

POLL = 0.1  # seconds between two looks at whether another process is done

logger = logging.getLogger(__name__)


def folder_of(cache: str, room: str, key: str, setting: str = "data.cache") -> Path:
    """The path `<cache>/<room>/<key>`, whose parent exists then.

    Raises:
        SettingError: the cache, which `setting` names, cannot be written.
    """
    parent = Path(cache).expanduser() / room
    with suppress(OSError):
        parent.mkdir(parents=True, exist_ok=True)
    if not os.access(parent, os.W_OK):
        raise SettingError("it cannot be made or written", setting=setting, value=cache, cure="give another folder")
    return parent / key


@contextmanager
def once(path: Path, is_made: Callable[[], bool] | None = None, quiet: bool = False) -> Iterator[bool]:
    """Whether `path` is still to be made. While one process makes it, others wait, and then find it.

    It is made when it exists, or when `is_made` returns True. The lock goes with the process that holds it, so that a
    killed one blocks nobody.
    """
    is_made = is_made or path.exists
    if is_made():
        yield False
        return
    while True:
        with locked(Path(f"{path}.lock"), wait=False) as held:
            if held:
                yield not is_made()
                return
        if not quiet:
            logger.info(f"another process is making {path}; waiting for it")
            quiet = True
        pause(POLL, in_force())  # a signal ends the wait in a thread, too


@contextmanager
def once_with_digest(path: Path, quiet: bool = False) -> Iterator[Path | None]:
    """A path to write a file to, which becomes `path` with its digest beside it; None where both are there and agree.

    While one process makes it, others wait.
    """
    digest = path.with_name(f"{path.name}.sha256")

    def is_whole() -> bool:
        return path.is_file() and digest.is_file() and digest.read_text(errors="replace").strip() == sha256(path)

    with once(path, is_whole, quiet) as missing:
        if not missing:
            yield None
            return
        if path.exists():
            logger.warning(f"{path} is damaged (its SHA-256 differs, or is not there): making it again")
        with atomic(path) as new:
            yield new
            with atomic(digest) as written:
                written.write_text(f"{sha256(new)}\n")


def num_processes(data: DataConfig) -> int:
    """Processes to work with: as many as requested, else one per core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return data.workers or cores


class _Process(SpawnProcess):
    """A process that does not import the program, which it would run once more without `if __name__ == "__main__"`."""

    def start(self) -> None:
        program = vars(sys.modules["__main__"])
        hidden = {name: program[name] for name in ("__file__", "__spec__") if program.get(name) is not None}
        program.update(dict.fromkeys(hidden))
        try:
            super().start()
        finally:
            program.update(hidden)


class _Context(SpawnContext):
    Process = _Process


@contextmanager
def workers(data: DataConfig, only_if: bool = True) -> Iterator[Executor | None]:
    """Processes that start when the first work comes; None where the work is to be done here.

    When a signal or an error ends this process they end in the middle of their work, which may take minutes: what is
    done is kept, and what is half-written is written again.

    Raises:
        SettingError: one of them was killed.
    """
    count = num_processes(data)
    if count <= 1 or not only_if:
        yield None
        return
    context = _Context()
    receiver, end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=(receiver,))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise SettingError(
            "a process that prepares tokens was killed, perhaps for lack of memory", setting="data.workers",
            value=data.workers, cure="start again with fewer (what is done is kept), or with 1 to see its own error",
        ) from error  # fmt: skip
    except BaseException:
        end.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(receiver: Connection) -> None:
    """Leaves signals to the parent, and ends this process when the parent is gone or has closed the other end."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):  # which come to a group of processes
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel, receiver])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
