"""Runs the ranks of one machine as child processes: starts, signals and awaits them; none outlives this process.

torchrun and horovodrun start ranks as well, also those of several hosts. On one machine neither keeps the promises of a
run (torch 2.13, Horovod 0.28.1):

* SIGUSR1 writes a checkpoint and the run continues. It kills either launcher, and torchrun's ranks train on without it.
* A run that gets a signal to stop has the time that its step and its checkpoint take. torchrun kills ranks after 30 s,
  horovodrun after 10 s, and at once on SIGHUP.
* The exit status gives the cause of an end (`distill.runtime.errors`). That of either launcher is 1, below a traceback.
* Rank 0 writes to the terminal itself, with its progress line. horovodrun reads its ranks through a pipe.
* No value of the environment is on a command line. horovodrun writes all of them there, tokens too.
* Ranks are at work in less than a second. horovodrun takes 11 s, as it looks at the network first.
"""

import os
import signal
import subprocess
import sys
import time

from distill.runtime.errors import Diverged, SettingError, StorageFailed
from distill.runtime.progress import write_to
from distill.runtime.signals import ALL, SAVING, Signals, handled, start

# Seconds after the first failure: until then the others may end by themselves, as they see that one is lost; then they
# get SIGTERM, and at last they are killed, rank 0, which may be writing a checkpoint, not before `backend.timeout`.
END_BY_ITSELF, LAST_END, LONGEST = 3.0, 30.0, 600.0
NOT_STOPPED = (1, SettingError.status, Diverged.status, StorageFailed.status)


def run_ranks(processes: int, command: list[str], timeout: float) -> int:
    """Run `command` as so many ranks until all have ended, forwarding signals; the first failure ends all.

    After it rank 0 has `timeout` seconds to write a checkpoint.

    This process holds the store through which the ranks meet, on a port that is free. They find themselves in the same
    variables that torchrun sets.

    Returns:
        The exit status of the run: that of the rank that failed first, or 128 + the signal that has ended it.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks: list[subprocess.Popen[bytes]] = []
    with handled() as signals, signals.deferred():
        for rank in range(processes):
            environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(start(command, environment))
            signals.pass_to(ranks[-1])
        failed = _wait(ranks, signals, timeout)
        received = list(signals.received)
        signals.received.clear()  # the ranks have acted on them
        stopped_by = signals.agreed_stop([float(number in received) for number in ALL])
    if failed is None:
        return 0
    if stopped_by is not None:
        # A rank that could not save, or failed for a reason of its own, has not ended by the signal.
        return next((rank.returncode for rank in ranks if rank.returncode in NOT_STOPPED), 128 + stopped_by)
    code = ranks[failed].returncode
    status = code if code >= 0 else 128 - code
    if -code not in received:
        _report_failure(failed, status)
    return status


def _wait(ranks: list["subprocess.Popen[bytes]"], signals: Signals, timeout: float) -> int | None:
    """Wait for all ranks, end all when one fails; returns the one that failed first.

    Ranks that got a signal are ending already, and may be saving.
    """
    failed: int | None = None
    since, terminated = 0.0, False
    while alive := [rank for rank in ranks if rank.poll() is None]:
        if failed is None:
            failed = _first_failure(ranks)
            since = time.monotonic()
        past = time.monotonic() - since if failed is not None else 0.0
        if past > END_BY_ITSELF and not terminated and not any(number != SAVING for number in signals.received):
            terminated = True
            for rank in alive:
                rank.terminate()
                rank.send_signal(signal.SIGCONT)  # one that is stopped acts on SIGTERM only then
        for rank in alive:
            if past > END_BY_ITSELF + (max(LAST_END, min(timeout, LONGEST)) if rank is ranks[0] else LAST_END):
                rank.kill()
        time.sleep(0.05)
    return failed if failed is not None else _first_failure(ranks)


def _first_failure(ranks: list["subprocess.Popen[bytes]"]) -> int | None:
    return next((number for number, rank in enumerate(ranks) if rank.returncode), None)


def _report_failure(rank: int, status: int) -> None:
    """Report the rank that ended the run, unless it is rank 0, which has reported its own error."""
    log = f"its output is in logs/rank{rank}.log of the run folder"
    name = signal.Signals(status - 128).name if status > 128 else ""
    if status - 128 in ALL:
        # Rank 0 handles these signals and reports them itself.
        if rank > 0:
            write_to(sys.stderr, f"distill: rank {rank} was stopped by {name}; {log}\n")
    elif status == 128 + signal.SIGABRT:
        cause = "as NCCL does where another rank is lost, or by a library that has found a fault"
        write_to(sys.stderr, f"distill: rank {rank} was aborted (SIGABRT), {cause}; {log}\n")
    elif status > 128:
        cure = "; the same command resumes" if status == 128 + signal.SIGKILL else ""
        write_to(sys.stderr, f"distill: rank {rank} was killed by {name}; {log}{cure}\n")
    elif rank > 0:
        write_to(sys.stderr, f"distill: rank {rank} ended with status {status}; {log}\n")
