"""Child processes of this one: they get its signals and do not outlive it."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from distill.runtime.signals import SAVING, Signals

PARENT = "DISTILL_PARENT"  # the variable by which a child knows whose it is
PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)


def start(command: list[str], env: Mapping[str, str] | None = None, **options: Any) -> "subprocess.Popen[Any]":
    """Start a process that imports this package; it is killed when this one ends, however that ends.

    On Linux; elsewhere it outlives a parent that is killed. It ignores SIGUSR1 until it handles that itself.

    Args:
        env: of the process; None: that of this one.
        options: of `subprocess.Popen`.
    """
    # Its signal is held back until `follow_parent` ignores it. No preexec_fn: where this process has threads that may
    # deadlock.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [SAVING])
    try:
        return subprocess.Popen(
            command, env={**(os.environ if env is None else env), PARENT: str(os.getpid())}, **options
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent() -> None:
    """The other side of `start`, the first thing that such a process does; does nothing in any other process."""
    parent = os.environ.pop(PARENT, None)  # processes that it starts have another one
    if parent is None:
        return
    with suppress(ValueError):  # imported in a thread
        signal.signal(SAVING, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [SAVING])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != parent:  # it ended before
        os._exit(128 + signal.SIGKILL)


@contextmanager
def pass_signals(signals: Signals) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Forward signals to the processes in the yielded list; each gets a signal once.

    A signal that comes while a process is being started reaches it as well.
    """
    processes = _Receivers(signals)
    with signals.deferred(processes.send):
        yield processes


class _Receivers(list["subprocess.Popen[bytes]"]):
    def __init__(self, signals: Signals) -> None:
        super().__init__()
        self._signals = signals

    def append(self, process: "subprocess.Popen[bytes]") -> None:
        # A signal between these two lines comes twice, which is the same request (`signals.SAME_REQUEST`).
        super().append(process)
        for number in self._signals.received:
            process.send_signal(number)

    def send(self, number: int) -> None:
        for process in self:
            process.send_signal(number)
