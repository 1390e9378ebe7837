"""The ranks of one host as child processes: started, waited for, ended together, and never left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from distill.runtime.children import dying_with, pass_signals
from distill.runtime.progress import say
from distill.runtime.signals import ALL, SAVING, Signals, handled, name_of

# Seconds after the first failure: until then the others may end by themselves, as they see that one is lost; then they
# get SIGTERM, and at last they are killed.
OWN_END, LAST_END = 3.0, 30.0


def run_ranks(first: int, processes: int, total: int, address: str, port: int, command: list[str]) -> int:
    """Run `command` as ranks `first` to `first + processes - 1` of `total` on this host; return the exit status.

    The first host's launcher holds the store through which all ranks meet, at `address` and `port` (0: a free one).
    Ranks find themselves in the same variables that torchrun sets.
    """
    from torch.distributed import TCPStore

    store = TCPStore(address, port, is_master=True, wait_for_workers=False) if first == 0 else None
    shared = {
        "WORLD_SIZE": str(total),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(store.port if store else port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [os.environ | shared | {"RANK": str(first + n), "LOCAL_RANK": str(n)} for n in range(processes)]
    with handled() as signals:
        status, failed = run_children(signals, [command] * processes, environments=ranks)
        if failed is not None:
            _report_failure(first + failed, status)
    return status


def run_children(
    signals: Signals,
    commands: list[list[str]],
    silent: Sequence[list[str]] = (),
    environments: Sequence[dict[str, str]] = (),
) -> tuple[int, int | None]:
    """Run commands side by side until all have ended, passing signals on; the first failure ends all.

    Args:
        silent: further commands, which get no signals while there are `commands` that do.
        environments: of the commands; empty: that of this process.

    Returns:
        The exit status of the run, and which command failed first by itself, if that is not said yet.
    """
    prepare = dying_with(os.getpid())
    with pass_signals(signals) as children:
        # A group of their own keeps Ctrl-C at the terminal away.
        apart = [subprocess.Popen(each, preexec_fn=prepare, process_group=0) for each in silent]
        for number, command in enumerate(commands or silent):
            if not commands:
                children.append(apart[number])
                continue
            environment = environments[number] if environments else None
            children.append(subprocess.Popen(command, preexec_fn=prepare, env=environment))
        everyone = [*children, *(apart if commands else [])]
        failed = _wait(everyone, signals)
        code = 0 if failed is None else everyone[failed].returncode
        received = list(signals.received)
        signals.received.clear()  # the children have heeded them
    if failed is None:
        return 0, None
    stop = signals.agreed_stop([float(number in received) for number in ALL])
    if stop is not None:
        return 128 + stop, None
    return (code if code >= 0 else 128 - code), (None if -code in received else failed) if code < 0 else failed


def _wait(children: list["subprocess.Popen[bytes]"], signals: Signals) -> int | None:
    """Wait for all, end all when one fails; which failed first.

    Those that a signal was passed on to are ending already: a second one would end them at once, while they save.
    """
    failed: int | None = None
    since, terminated = 0.0, False
    while alive := [child for child in children if child.poll() is None]:
        if failed is None:
            failed = next((number for number, child in enumerate(children) if child.returncode), None)
            since = time.monotonic()
        past = time.monotonic() - since if failed is not None else 0.0
        if past > OWN_END and not terminated and not any(number != SAVING for number in signals.received):
            terminated = True
            for child in alive:
                child.terminate()
        if past > OWN_END + LAST_END:
            for child in alive:
                child.kill()
        time.sleep(0.05)
    return failed if failed is not None else next((n for n, child in enumerate(children) if child.returncode), None)


def _report_failure(rank: int, status: int) -> None:
    """Say which rank ended the run, unless it is rank 0 that ended by itself and has said why."""
    log = f"its output is in logs/rank{rank}.log of the run folder"
    if (name := name_of(status)) is not None:
        # A rank handles these signals and then says so itself.
        if rank > 0:
            say(sys.stderr, f"rank {rank} was stopped by {name}; {log}\n")
    elif status > 128:
        say(sys.stderr, f"rank {rank} was killed by {signal.Signals(status - 128).name}; {log}\n")
    elif rank > 0:
        say(sys.stderr, f"rank {rank} ended with status {status}; {log}\n")
