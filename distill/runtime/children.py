"""Child processes of this one: they get its signals and do not outlive it."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distill.runtime.signals import SAVING, Signals

PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)


def dying_with(parent: int) -> Callable[[], None]:
    """For `preexec_fn` of a process that `parent`, this one, starts: kill it when its parent ends, however that ends.

    On Linux; elsewhere it outlives a parent that is killed. It also ignores SIGUSR1 until it handles that itself.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        signal.signal(SAVING, signal.SIG_IGN)
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(128 + signal.SIGKILL)

    return prepare


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
