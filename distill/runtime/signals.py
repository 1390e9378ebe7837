"""Signals to a run: stop after the step under way, stop at once, or write a checkpoint and continue.

A handler raises `Interrupted` wherever nothing can be lost: before the first step, in evaluations, in the final
scoring. Within `deferred` it records the signal instead, and the training loop acts on it after its step, on all ranks
alike. A second signal ends the process at once, even where Python is not running, as within an exchange with a rank
that hangs.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from distill.runtime.errors import Interrupted

STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)  # where ranks got several, the first counts
SAVING = signal.SIGUSR1
ALL = (*STOPPING, SAVING)
# Seconds in which further signals are the same request: a closing terminal, Ctrl-C on a whole process group, `timeout`
# and batch systems send one to a process several times, and the launcher of the ranks passes it on besides.
SAME_REQUEST = 1.0


class Signals:
    """The signals that this process has received, and how it acts on them; one object is in force (`handled`)."""

    def __init__(self, owns_process: bool = True) -> None:
        """`owns_process`: whether a second signal ends the process; else it raises `Interrupted` at once."""
        self.received: list[int] = []
        self.stopping: int | None = None  # the first signal that stops; it stays when it was acted on
        self._owns_process = owns_process
        self._first: float | None = None  # when the first signal came that stops
        self._usr1_stops = self._is_deferred = False
        self._on_signal: Callable[[int], None] | None = None

    @property
    def is_deferred(self) -> bool:
        """Whether a signal that stops is only recorded, as in the training loop."""
        return self._is_deferred

    def on_usr1(self, stops: bool) -> None:
        """Whether SIGUSR1 ends the run (`train.on_usr1=stop`), also one that has come already."""
        self._usr1_stops = stops
        self._act()

    def requests(self) -> list[float]:
        """How often each of `ALL` has come, for the exchange between ranks; a request to save counts once."""
        counts = [float(number in self.received) for number in ALL]
        if counts[-1] and not self._usr1_stops:  # what comes from here on is another request
            while SAVING in self.received:
                self.received.remove(SAVING)
        return counts

    def agreed_stop(self, requests: Sequence[float]) -> int | None:
        """The signal that ends the run by the requests of all ranks, the same on each of them."""
        stopping = ALL if self._usr1_stops else STOPPING
        return next((number for number, count in zip(ALL, requests, strict=True) if count and number in stopping), None)

    @contextmanager
    def deferred(self, on_signal: Callable[[int], None] | None = None) -> Iterator[None]:
        """Signals are recorded, and handed to `on_signal`; one that stops and is still there at the end raises then."""
        before = self._is_deferred, self._on_signal
        self._is_deferred, self._on_signal = True, on_signal
        try:
            yield
        finally:
            self._is_deferred, self._on_signal = before
        self._act()

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Signals are recorded and never raise; they are in `received` afterwards."""
        with self.deferred():
            yield
            recorded, self.received[:] = list(self.received), []
        self.received += recorded

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within `deferred`: a part in which nothing can be lost, so a signal that stops need not wait."""
        before, self._is_deferred = self._is_deferred, False
        try:
            self._act()
            yield
        finally:
            self._is_deferred = before

    def raise_if_stopped(self) -> None:
        """Ends a wait: a thread that waits for something calls it every now and then.

        Raises:
            Interrupted: a signal that stops has come, also where the main thread has put off acting on it.
        """
        if self.stopping is not None:
            raise Interrupted(_stopped_by(self.stopping), self.stopping)

    def handle(self, number: int, frame: object) -> None:
        """The handler of all signals."""
        self.received.append(number)
        if number in STOPPING and not self._owns_process:
            now = time.monotonic()
            if self._first is not None and now - self._first >= SAME_REQUEST:
                name = signal.Signals(number).name
                raise Interrupted(
                    f"stopped at once by a second {name}; the same call resumes from a checkpoint", number
                )
            self._first = now if self._first is None else self._first
        if self._on_signal is not None:
            self._on_signal(number)
        self._act()

    def _act(self) -> None:
        stop = self.agreed_stop([float(number in self.received) for number in ALL])
        if stop is None:
            return
        self.stopping = self.stopping or stop
        if self._is_deferred:
            return
        self.received.clear()  # raised once: what cleans up on the way out is not interrupted again
        raise Interrupted(_stopped_by(stop), stop)


def _stopped_by(number: int) -> str:
    """Holds before a run has saved anything too, and for commands that have nothing to save."""
    return f"stopped by {signal.Signals(number).name}; the same command resumes from what was saved before"


_in_force: Signals | None = None


def in_force() -> Signals:
    """Those that are handled now; where none are, some that never come. Any thread may keep and read them."""
    return _in_force or Signals()


@contextmanager
def handled(owns_process: bool = True) -> Iterator[Signals]:
    """Handle signals from here on; within another `handled` it gives the same `Signals` and changes nothing.

    Signals that are ignored, as under nohup, stay ignored. Outside of the main thread nothing is handled.

    Args:
        owns_process: whether a second signal may end the process, which is not so in a notebook.
    """
    global _in_force
    if _in_force is not None or threading.current_thread() is not threading.main_thread():
        yield in_force()
        return
    signals = Signals(owns_process)
    # Whoever started this process may ignore SIGUSR1 for it until it has come here.
    numbers = [number for number in ALL if number == SAVING or signal.getsignal(number) is not signal.SIG_IGN]
    with _ending_at_the_second() if owns_process else nullcontext():
        former = {number: signal.signal(number, signals.handle) for number in numbers}
        _in_force = signals
        try:
            yield signals
        finally:
            _in_force = None
            for number, handler in former.items():
                signal.signal(number, handler)


@contextmanager
def _ending_at_the_second() -> Iterator[None]:
    """End this process when a second signal comes that stops.

    A thread reads the numbers of signals from a pipe, because Python's handlers wait for the main thread to return from
    what it is doing in C.
    """
    source, target = os.pipe()
    os.set_blocking(target, False)
    watcher = threading.Thread(target=_watch, args=(source,), name="signals", daemon=True)
    with suppress(RuntimeError):  # no memory for a thread: the command ends for that, or goes on without this one
        watcher.start()
    before = signal.set_wakeup_fd(target, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(target)


def _watch(source: int) -> None:
    first: float | None = None
    while data := os.read(source, 1):
        number, now = data[0], time.monotonic()
        if number not in STOPPING:
            continue
        if first is not None and now - first >= SAME_REQUEST:
            name = signal.Signals(number).name
            os.write(2, f"distill: stopped at once by a second signal, {name}\n".encode())
            os._exit(128 + number)
        first = now if first is None else first
    os.close(source)


def _leave_to_parent() -> None:
    """A forked child answers to its parent: it ends by a signal as other programs do, and SIGUSR1 is not for it."""
    global _in_force
    if _in_force is None:
        return
    _in_force = None
    signal.set_wakeup_fd(-1)  # else the parent would take the child's signals for its own
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(SAVING, lambda *_: None)  # not SIG_IGN, which a program that the child starts would inherit


os.register_at_fork(after_in_child=_leave_to_parent)


def name_of(status: int) -> str | None:
    """The name of the signal that an exit status of a stopped run stands for, or None."""
    return signal.Signals(status - 128).name if status - 128 in ALL else None
