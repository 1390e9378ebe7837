"""Runs and scripts as processes of their own, forked from one that has imported what a run needs.

A new interpreter spends about four seconds on importing torch and transformers, and a run of two ranks starts three of
them. What is forked here has a process id, signals, descriptors, an environment and an exit status of its own as any
program has, and so have the ranks that it starts. Tests of how a program is started, and one of each kind of run, start
an interpreter nevertheless (`job.program`).
"""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import undrawn
from distributed import FORKS, start_server

from distill.runtime import signals

RUN = [sys.executable, "-m", "distill"]
ROOT = str(Path(__file__).resolve().parent.parent)  # where an editable installation finds the package


class Program(NamedTuple):
    """What a process runs."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str  # the working directory


class Signalled:
    """What a process gets from others: signals."""

    pid: int

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        raise NotImplementedError


class Forked(Signalled):
    """A running command; what tests use of `subprocess.Popen[str]`."""

    def __init__(self, arguments: list[str], environment: dict[str, str], **more: Any) -> None:
        """`more`: as for `_become`. With a `log` there is nothing to communicate."""
        start_server()
        (self._out, out), (self._err, err) = (FORKS.Pipe(duplex=False) for _ in range(2))
        program = Program(arguments, environment, os.getcwd())
        self._process = FORKS.Process(target=_become, args=(program, (out, err)), kwargs=more)
        self._process.start()
        atexit.register(self.kill)  # before multiprocessing waits for it, as it does where a test has failed
        out.close()
        err.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._read: list[bytes] = [b"", b""]
        streams = enumerate((self._out, self._err))
        self._readers = [threading.Thread(target=self._drain, args=each, daemon=True) for each in streams]
        for reader in self._readers:
            reader.start()

    def _drain(self, number: int, stream: Any) -> None:
        with stream, suppress(OSError):
            while found := os.read(stream.fileno(), 1 << 16):
                self._read[number] += found

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("distill", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has written to its two streams, once all that have them have ended."""
        until = None if timeout is None else time.monotonic() + timeout
        for reader in self._readers:
            reader.join(None if until is None else max(0.0, until - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("distill", timeout or 0.0)
        self.wait(None if until is None else max(1.0, until - time.monotonic()))
        output, errors = (each.decode() for each in self._read)
        return output, errors


def _become(
    program: Program,
    streams: tuple[Any, Any],
    new_session: bool = False,
    log: Path | None = None,
    change: Callable[[], None] | None = None,
    script: Path | None = None,
) -> NoReturn:
    """Be `python -m distill ARGUMENTS`, or `python SCRIPT ARGUMENTS`, with these streams.

    Args:
        streams: pipes that become standard output and standard error.
        new_session: whether it is the first process of a session.
        log: a file for both streams.
        change: what a test changes in the program before it begins.
    """
    if new_session:
        os.setsid()
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    os.chdir(program.folder)
    from distill.distributed import processes
    from distill.report import figures

    # Ranks are forked from their launcher, which has imported the same.
    processes.start = start_rank  # type: ignore[assignment]
    figures.save_figure = undrawn.save_figure
    if change is not None:
        change()
    run(program.arguments, program.environment, script)


def start_rank(command: list[str], env: dict[str, str] | None = None) -> Any:
    """In place of `signals.start` in a launcher: its own command as a fork of it, any other as a new program."""
    if command != sys.orig_argv:
        return signals.start(command, env)
    script = None if command[: len(RUN)] == RUN else Path(command[1])
    environment = {**(env or os.environ), signals.PARENT: str(os.getpid())}
    return Child(partial(run, command[len(RUN) if script is None else 2 :], environment, script))


class Child(Signalled):
    """A fork of this process in place of a new program; what launchers use of `subprocess.Popen`."""

    def __init__(self, work: Callable[[], NoReturn]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            try:
                _close_all()
                work()
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _close_all() -> None:
    """Close what a new program would not have open, the store of the ranks above all."""
    os.closerange(3, 1 << 16)
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    tracker._fd = tracker._pid = None
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = server._inherited_fds = None


def run(arguments: list[str], environment: dict[str, str], script: Path | None = None) -> NoReturn:
    """The command, or a script, from its first line to the end of the process, as the interpreter would do it."""
    os.environ.clear()
    os.environ.update(environment)
    signals._in_force = None  # of the launcher that was forked
    for number in signals.STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signals.follow_parent()
    program = RUN if script is None else [sys.executable, str(script)]
    sys.argv, sys.orig_argv = [program[-1], *arguments], [*program, *arguments]
    installed = tuple({sys.prefix, sys.base_prefix})
    own = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    first = os.getcwd() if script is None else str(script.parent)
    sys.path = [first, *own, *(each for each in sys.path if each.startswith(installed)), ROOT]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status: Any = 1
    try:
        from hydra.core.global_hydra import GlobalHydra

        from distill.commands.cli import main

        GlobalHydra.instance().clear()  # that of the process that this one was forked from
        status = main() if script is None else runpy.run_path(str(script), run_name="__main__") and 0
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(status, str):
        print(status, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
