"""Start the ranks of a run on one or more hosts, over ssh where they are others, and end a rank in good order."""

import importlib.util
import json
import os
import re
import shlex
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from distill.config.settings import BackendConfig
from distill.distributed import roll_call
from distill.distributed.elastic_range import parse_elastic
from distill.distributed.interface import RankLost
from distill.distributed.rank import rank_from_env
from distill.distributed.ranks import run_children, run_ranks
from distill.runtime.errors import SettingError
from distill.runtime.signals import handled

INSTALL = "python -m distill.distributed.install_horovod"
# What ranks on other hosts take over from here.
EXPORTED = re.compile(
    r"(PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CUDA_VISIBLE_DEVICES|(DISTILL|HF|TRANSFORMERS|WANDB|NCCL|GLOO|OMP|MKL)_.*)"
)
GIVE_WAY = 2.0  # seconds


def should_launch(settings: BackendConfig) -> bool:
    """Whether this process has to start the ranks, because no launcher has started it as one of them."""
    if settings.name == "single" or rank_from_env() is not None:
        return False
    return settings.elastic is not None or sum(n for _, n in hosts_of(settings)) > 1


def launch(settings: BackendConfig, command: list[str] | None = None) -> int:
    """Run `command`, by default this very command line, as every rank; wait; return the exit status of the run.

    The status is that of the rank that failed first (128 + the signal's number when it was killed). Rank 0 has the
    terminal; the others write where `keep_log` says. Signals are passed on to the ranks, which end in their own time;
    a second one ends all at once. Ranks do not outlive their launcher.

    Raises SettingError for hosts that make no sense.
    """
    command = command or this_command()
    hosts = hosts_of(settings)
    require_installed(settings)
    if len(hosts) == 1 and is_here(hosts[0][0]):
        return run_ranks(0, hosts[0][1], hosts[0][1], "127.0.0.1", 0, command)
    return _launch_agents(hosts, command)


def this_command() -> list[str]:
    """The command line of this process."""
    return [sys.executable, *sys.orig_argv[1:]]


def require_installed(settings: BackendConfig) -> None:
    """Raises SettingError where the backend is a library that is not there."""
    if settings.name == "horovod" and importlib.util.find_spec("horovod") is None:
        raise SettingError(f"backend.name=horovod: Horovod is not installed; run `{INSTALL}`")


def keep_log(folder: Path) -> None:
    """Keep what this rank writes to stdout and stderr in `folder`/logs/rank<n>.log; rank 0 has the terminal as well.

    Does nothing for a process that is not one of several ranks.
    """
    info = rank_from_env()
    if info is None or info.size == 1:
        return
    path = folder / "logs" / f"rank{info.rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("a", buffering=1, encoding="utf-8")
    if info.rank == 0:
        sys.stdout, sys.stderr = _Both(sys.stdout, log), _Both(sys.stderr, log)
        return
    roll_call.terminal = os.fdopen(os.dup(2), "w", buffering=1)
    # The descriptors too, for what libraries write without Python.
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log


def leave(status: int, error: BaseException | None = None) -> NoReturn:
    """End this rank with `status`, after an `error` that it has reported already, in a way that lets the cause come
    first.

    Gloo's threads can abort a process that ends in the maskable way, even after `close`: so a rank leaves without
    waiting for them, also when all went well.

    The launcher takes the status of the first rank that ends, and then ends the others. So a rank that only met the
    end of another waits a moment, and so do the ranks above 0 when all have met the same error, lest rank 0 be ended
    before it has reported it. Nothing is closed: that would wait for ranks that no longer answer.
    """
    info = rank_from_env()
    if info is None or info.size == 1:
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # of a terminal that was closed
            stream.flush()
    if isinstance(error, RankLost) or (status and info.rank > 0):
        _give_way()
    os._exit(status)


def _give_way() -> None:
    """Let the rank that failed first end first; whoever sends a signal knows of that one already.

    What a signal asks for does not matter any more: srun and others end all ranks once one has ended and pass on the
    highest status, and 143 would hide the cause.
    """
    with handled() as signals, signals.postponed():
        until = time.monotonic() + GIVE_WAY
        while time.monotonic() < until and not signals.received:
            time.sleep(0.02)


class _Both:
    """A text stream that also writes to a log; in all else it is the stream."""

    def __init__(self, stream: IO[str], log: IO[str]) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        with suppress(OSError):  # of a full disk: the terminal has it, and the run has more to lose
            self._log.write(text)
        with suppress(OSError):  # of a terminal that was closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._log.flush()
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def hosts_of(settings: BackendConfig) -> list[tuple[str, int]]:
    """Hosts and their ranks from `backend.hosts` or `backend.processes`.

    Without both as many on this host as `backend.elastic` allows, else one per GPU.
    """
    if settings.processes is not None and settings.processes < 1:
        raise SettingError(f"backend.processes={settings.processes}: give at least 1")
    if settings.hosts is None:
        elastic = parse_elastic(settings.elastic)
        return [("localhost", settings.processes or (elastic[1] if elastic else _num_gpus(settings)))]
    hosts = []
    for entry in str(settings.hosts).split(","):
        match = re.fullmatch(r"\s*(\w[\w.-]*):([1-9]\d*)\s*", entry)
        if match is None:
            raise SettingError(
                f"backend.hosts={settings.hosts}: give host:ranks,host:ranks in quotes that Hydra keeps, such as "
                "backend.hosts=\"'a:8,b:8'\""
            )
        hosts.append((match[1], int(match[2])))
    total = sum(ranks for _, ranks in hosts)
    if settings.processes not in (None, total):
        raise SettingError(f"backend.processes={settings.processes}: backend.hosts={settings.hosts} has {total} ranks")
    return hosts


def _num_gpus(settings: BackendConfig) -> int:
    if settings.device not in ("auto", "cuda"):
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def is_here(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", socket.gethostname())


def _launch_agents(hosts: list[tuple[str, int]], command: list[str]) -> int:
    """Start the ranks of each host, over ssh where that is not this one; the first failure ends all."""
    address = meeting_address([host for host, _ in hosts])
    port, total, first = free_port(), sum(ranks for _, ranks in hosts), 0
    agents, far = [], []
    for host, ranks in hosts:
        where = [str(number) for number in (first, ranks, total)]
        local = [sys.executable, "-m", "distill.distributed.launch", *where, address, str(port), json.dumps(command)]
        if is_here(host):
            agents.append(local)
        else:
            # The terminal (-tt) makes the remote agent end when the connection does: as by SIGHUP.
            far.append(["ssh", "-tt", "-o", "BatchMode=yes", host, remote_command(local)])
        first += ranks
    with handled() as signals:
        # The ranks of this host hand a signal on to the others; it would only end the connections to them.
        code, _ = run_children(signals, agents, far)
    return code


def meeting_address(hosts: list[str]) -> str:
    """Where all ranks find those of the first host."""
    if all(map(is_here, hosts)):
        return "127.0.0.1"
    return socket.gethostname() if is_here(hosts[0]) else hosts[0]


def remote_command(command: list[str]) -> str:
    variables = [f"{name}={value}" for name, value in os.environ.items() if EXPORTED.fullmatch(name)]
    return f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*variables, *command])}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    first, processes, total, address, port, command = sys.argv[1:]
    sys.exit(run_ranks(int(first), int(processes), int(total), address, int(port), json.loads(command)))
