"""What signals do to a process: deferred, at once, ignored, a second Ctrl-C; and to the processes it started."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from job import Shelf, environment, is_alive, wait_for

from distill.runtime.errors import Interrupted
from distill.runtime.signals import ALL, SAME_REQUEST, STOPPING, Signals, handled


def program(text: str, folder: Path, *before: str) -> "subprocess.Popen[str]":
    """A Python program that runs in `folder`, and has touched the file `ready` when this returns."""
    begin = "import os, signal, sys, time; from pathlib import Path\n"
    begin += "from distill.runtime.signals import handled, start\n"
    words = [*before, sys.executable, "-c", begin + text]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, cwd=folder, env=environment(), text=True, **pipes)
    wait_for((folder / "ready").exists, process)
    return process


@pytest.mark.parametrize("number", STOPPING)
def test_outside_of_steps_a_signal_raises_at_once_and_its_status_names_it(number: int) -> None:
    with pytest.raises(Interrupted) as error, handled():
        signal.raise_signal(number)
    assert error.value.status == 128 + number
    assert not isinstance(error.value, Exception), "what survives errors of its own does not survive this"


def test_deferred_signals_are_noted_and_raise_at_the_end() -> None:
    former = [signal.getsignal(number) for number in ALL]
    with pytest.raises(Interrupted) as error, handled() as signals, signals.deferred():
        signal.raise_signal(signal.SIGHUP)
        noted = signals.requests()
        with pytest.raises(Interrupted, match="SIGHUP"):
            signals.raise_if_stopped()
    assert noted == [0, 1, 0, 0, 0] and error.value.status == 129
    assert [signal.getsignal(number) for number in ALL] == former


@pytest.mark.parametrize("early", [True, False])
def test_a_part_of_a_deferred_stretch_can_end_at_once(early: bool) -> None:
    with pytest.raises(Interrupted), handled() as signals, signals.deferred():
        if early:
            signal.raise_signal(signal.SIGTERM)
        with signals.deferred(False):
            signal.raise_signal(signal.SIGTERM)
        pytest.fail("went on")


def test_usr1_is_a_wish_to_save_given_once_or_to_stop() -> None:
    with handled() as signals:
        signal.raise_signal(signal.SIGUSR1)
        assert signals.requests() == [0, 0, 0, 0, 1] and signals.requests() == [0, 0, 0, 0, 0]
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Interrupted) as error:
            signals.on_usr1(stops=True)
        assert error.value.status == 138
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGUSR1)


def test_all_ranks_agree_on_one_signal() -> None:
    """The sums of the wishes of ranks that received different signals, or none."""
    signals = Signals()
    assert signals.agreed_stop([0, 0, 0, 0, 0]) is None and signals.agreed_stop([0, 0, 0, 0, 3]) is None
    assert signals.agreed_stop([0, 1, 0, 0, 0]) == signal.SIGHUP
    assert signals.agreed_stop([1, 2, 0, 0, 2]) == signal.SIGTERM
    signals.on_usr1(stops=True)
    assert signals.agreed_stop([0, 0, 0, 0, 1]) == signal.SIGUSR1


def test_a_second_interrupt_is_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now, first = 1.0, list[int]()
    monkeypatch.setattr("distill.runtime.signals.time.monotonic", lambda: now)
    with pytest.raises(KeyboardInterrupt) as error, handled() as signals, signals.deferred():
        for _ in range(2):  # the same request, as the launcher of ranks passes it on
            signal.raise_signal(signal.SIGINT)
        first = [*signals.received]
        now += SAME_REQUEST
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")
    assert not isinstance(error.value, Interrupted) and first, "the two are one request"


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    text = "with handled() as signals, signals.deferred():\n    Path('ready').touch()\n"
    text += "    while not Path('sent').exists(): time.sleep(0.05)\n    print(signals.received)"
    process = program(text, tmp_path, "nohup")
    process.send_signal(signal.SIGHUP)
    (tmp_path / "sent").touch()
    output, errors = process.communicate(timeout=500)
    assert (process.returncode, output) == (0, "[]\n"), errors


def test_a_forked_child_ends_by_a_signal_and_its_parent_does_not_hear_of_it(tmp_path: Path) -> None:
    process = program(
        "with handled() as signals, signals.deferred():\n"
        "    child = os.fork()\n    if not child:\n        time.sleep(60)\n"
        "    Path('ready').touch()\n    time.sleep(0.5)\n"
        "    os.kill(child, signal.SIGUSR1); time.sleep(0.5); os.kill(child, signal.SIGTERM)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signals.received)\n",
        tmp_path,
    )
    output, errors = process.communicate(timeout=500)
    assert (process.returncode, output) == (0, "-15 []\n"), errors


def test_a_child_dies_with_its_parent_and_gets_its_signals(tmp_path: Path) -> None:
    """The parent is killed by -9."""
    child = "import distill, signal, time; signal.signal(1, lambda *_: open('heard', 'w').close()); "
    child += "open('ready', 'w').close(); time.sleep(3600)"
    text = (
        "with handled() as signals, signals.deferred():\n"
        f"    new = start([sys.executable, '-c', {child!r}])\n"
        "    Path('pid').write_text(str(new.pid))\n    signals.pass_to(new); new.wait()\n"
    )
    process = program(text, tmp_path)
    pid = int((tmp_path / "pid").read_text())
    process.send_signal(signal.SIGHUP)
    wait_for((tmp_path / "heard").exists, process)
    assert process.poll() is None and is_alive(pid)
    process.kill()
    process.communicate(timeout=500)
    wait_for(lambda: not is_alive(pid))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "status"), [("terminal", 129), ("pipe", 0)])
def test_a_run_whose_output_is_gone(kind: str, status: int, shelf: Shelf, tmp_path: Path) -> None:
    """A lost ssh session, with its SIGHUP, ends it with a checkpoint; that of `... 2>&1 | head` continues."""
    outside, inside = os.openpty() if kind == "terminal" else os.pipe()

    def take_terminal() -> None:
        if os.isatty(1):
            fcntl.ioctl(1, termios.TIOCSCTTY, 0)

    steps = ["train.epochs=null", "train.steps=100000", "train.save_every=100000"] if kind == "terminal" else []
    words = [sys.executable, "-m", "distill", *shelf.arguments(tmp_path, *steps)]
    streams = {"stdout": inside, "stderr": inside}
    process = subprocess.Popen(words, env=environment(), start_new_session=True, preexec_fn=take_terminal, **streams)
    os.close(inside)
    metrics = tmp_path / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, process)
    os.close(outside)
    assert process.wait(timeout=500) == status
    if kind == "terminal":
        last = metrics.read_bytes().count(b"\n")
        assert max(path.name for path in (tmp_path / "checkpoints").iterdir()) == f"step-{last:08d}"
    else:
        assert (tmp_path / "results.json").exists()
