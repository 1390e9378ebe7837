"""Signals to a run: stop after the step under way, stop at once, or write a checkpoint and continue.

A handler raises `Interrupted` wherever nothing can be lost: before the first step, in evaluations, in the final
scoring. Within `deferred` it records the signal instead, and the training loop acts on it after its step, on all ranks
alike. A second Ctrl-C is Python's KeyboardInterrupt. Child processes get the same signals.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from distill.runtime.errors import Interrupted

STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)  # where ranks got several, the first counts
SAVING = signal.SIGUSR1
ALL = (*STOPPING, SAVING)
# Seconds in which a further SIGINT is the same request: Ctrl-C reaches a whole process group, and the launcher of the
# ranks passes it on besides.
SAME_REQUEST = 1.0
PARENT = "DISTILL_PARENT"  # the variable by which a child knows whose it is
PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)


class Signals:
    """The signals that this process has received, and how it acts on them; one object is in force (`handled`)."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.stopping: int | None = None  # the first signal that stops; it stays when it was acted on
        self.is_deferred = False  # whether a signal that stops is only recorded, as in the training loop
        self._usr1_stops, self._first_stop, self._process = False, 0.0, os.getpid()
        self._children: list[subprocess.Popen[Any]] = []

    def on_usr1(self, stops: bool) -> None:
        """Whether SIGUSR1 ends the run (`train.on_usr1=stop`), also one that has come already."""
        self._usr1_stops = stops
        self._act()

    def requests(self) -> list[float]:
        """How often each of `ALL` has come, for the exchange between ranks; a request to save counts once."""
        counts = [float(number in self.received) for number in ALL]
        if not self._usr1_stops:  # what comes from here on is another request
            self.received[:] = [number for number in self.received if number != SAVING]
        return counts

    def agreed_stop(self, requests: Sequence[float]) -> int | None:
        """The signal that ends the run by the requests of all ranks, the same on each of them."""
        stopping = ALL if self._usr1_stops else STOPPING
        return next((number for number, count in zip(ALL, requests, strict=True) if count and number in stopping), None)

    @contextmanager
    def deferred(self, defer: bool = True) -> Iterator[None]:
        """Signals are recorded; one that stops and is still there at the end raises then.

        `defer=False` is for a part of such a context in which nothing can be lost: signals raise at once.
        """
        before, self.is_deferred = self.is_deferred, defer
        try:
            self._act()
            yield
        finally:
            self.is_deferred = before
        self._act()

    def pass_to(self, child: "subprocess.Popen[Any]") -> None:
        """Forward signals to a child process, with those that came while it was started."""
        self._children.append(child)
        for number in self.received:
            child.send_signal(number)

    def raise_if_stopped(self) -> None:
        """Ends a wait, in any thread. Raises Interrupted where a signal that stops has come, deferred or not."""
        if self.stopping is not None:
            raise _interrupted(self.stopping)

    def handle(self, number: int, frame: object) -> None:
        """The handler of all signals."""
        if os.getpid() != self._process:  # a fork ends by a signal as other programs do, and SIGUSR1 is not for it
            if number != SAVING:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        if number == signal.SIGINT and self._first_stop and time.monotonic() - self._first_stop >= SAME_REQUEST:
            raise KeyboardInterrupt
        if number in STOPPING:
            self._first_stop = self._first_stop or time.monotonic()
        self.received.append(number)
        for child in self._children:
            child.send_signal(number)
        self._act()

    def _act(self) -> None:
        stop = self.agreed_stop([float(number in self.received) for number in ALL])
        if stop is None:
            return
        self.stopping = self.stopping or stop
        if not self.is_deferred:
            self.received.clear()  # raised once: what cleans up on the way out is not interrupted again
            raise _interrupted(stop)


def _interrupted(number: int) -> Interrupted:
    name = signal.Signals(number).name
    return Interrupted(f"stopped by {name}; the same command resumes from what was saved before", number)


_in_force: Signals | None = None


def in_force() -> Signals:
    """Those that are handled now; where none are, some that never come. Any thread may keep and read them."""
    return _in_force or Signals()


@contextmanager
def handled() -> Iterator[Signals]:
    """Handle signals from here on; within another `handled` it gives the same `Signals` and changes nothing.

    Signals that are ignored, as under nohup, stay ignored. Outside of the main thread nothing is handled.
    """
    global _in_force
    if _in_force is not None or threading.current_thread() is not threading.main_thread():
        yield in_force()
        return
    _in_force, former = Signals(), {}
    try:
        for number in ALL:  # whoever started this process may ignore SIGUSR1 for it until it has come here
            if number == SAVING or signal.getsignal(number) is not signal.SIG_IGN:
                former[number] = signal.signal(number, _in_force.handle)
        yield _in_force
    finally:
        _in_force = None
        for number, handler in former.items():
            signal.signal(number, handler)


def start(command: list[str], env: Mapping[str, str] | None = None) -> "subprocess.Popen[Any]":
    """Start a process that imports this package; it is killed when this one ends, however that ends, on Linux.

    It ignores SIGUSR1 until it handles that itself: the signal is held back until `follow_parent` ignores it. That is
    no preexec_fn, which may deadlock where this process has threads.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [SAVING])
    try:
        return subprocess.Popen(command, env={**(os.environ if env is None else env), PARENT: str(os.getpid())})
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
