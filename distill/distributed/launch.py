"""Start the ranks of a run, here or through the launcher of its engine, and end a rank in good order."""

import importlib.util
import os
import re
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from distill.config.settings import BackendConfig
from distill.distributed.install_horovod import COMMAND
from distill.distributed.processes import run_ranks
from distill.runtime.errors import RankLost, SettingError
from distill.runtime.files import make_folder
from distill.runtime.progress import write_to
from distill.runtime.rank import rank_from_env, refuse_half_numbered
from distill.runtime.signals import handled

# What Horovod's launcher gets of the environment, as it writes all of that on the command lines of its ranks.
EXPORTED = re.compile(
    r"PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|HOME|USER|LANG|TMPDIR|SSH_AUTH_SOCK|SSL_CERT_FILE|REQUESTS_CA_BUNDLE"
    r"|(AWS|GOOGLE|LC|XDG|CUDA|DISTILL|HF|TRANSFORMERS|WANDB|HOROVOD|NCCL|GLOO|OMP|MKL)_\w+"
)
PATHS = ("GOOGLE_APPLICATION_CREDENTIALS", "AWS_SHARED_CREDENTIALS_FILE")  # of files with secrets, themselves none
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|_(AUTH|PWD)$")
GIVE_WAY = 2.0  # seconds


def should_launch(settings: BackendConfig) -> bool:
    """Whether this process has to start the ranks, because no launcher has started it as one of them.

    Raises SettingError where a launcher has numbered it by half: it would be the only rank of a run.
    """
    if settings.name == "single" or rank_from_env() is not None:
        return False
    refuse_half_numbered()
    return bool(hosts_of(settings)) or num_processes(settings) > 1


def launch(settings: BackendConfig, command: list[str]) -> int:
    """Run `command` as every rank; wait; return the exit status of the run.

    On this machine the status is that of the rank that failed first (128 + the signal's number when it was killed).
    Rank 0 has the terminal; the others write to the logs of `keep_log`. Ranks get all signals and end in
    their own time; a second one ends all at once. Ranks do not outlive their launcher.

    With `backend.hosts` Horovod's launcher takes the place of this process.

    Raises SettingError for invalid hosts, and for hosts of torch.distributed, whose ranks torchrun starts.
    """
    if settings.name == "horovod" and importlib.util.find_spec("horovod") is None:
        raise SettingError(f"backend.name=horovod: Horovod is not installed; run `{COMMAND}`")
    hosts = hosts_of(settings)
    if not hosts:
        return run_ranks(num_processes(settings), command, settings.timeout)
    if settings.name == "horovod":
        _become_horovodrun(hosts, command)
    raise SettingError(
        f"backend.hosts={settings.hosts}: torchrun starts the ranks of several hosts (backend={settings.name}); leave "
        f"backend.hosts out, and run on each host `torchrun --nnodes={len(hosts)} --node-rank=NUMBER --nproc-per-node="
        f"RANKS --master-addr={hosts[0][0]} -m distill ...`"
    )


def num_processes(settings: BackendConfig) -> int:
    """The ranks on this machine: `backend.processes`, else one for each GPU."""
    if settings.processes is not None:
        return settings.processes
    if settings.device not in ("auto", "cuda"):
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def hosts_of(settings: BackendConfig) -> list[tuple[str, int]]:
    """The names of hosts and their ranks in `backend.hosts`; empty where it is null. Raises SettingError."""
    if settings.hosts is None:
        return []
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
        raise SettingError(
            f"backend.processes={settings.processes}: backend.hosts={settings.hosts} has {total} ranks; leave "
            "backend.processes out"
        )
    return hosts


def _become_horovodrun(hosts: list[tuple[str, int]], command: list[str]) -> NoReturn:
    """Let Horovod's launcher take the place of this process. Raises SettingError for a host without an address."""
    for host, _ in hosts:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:  # that launcher would end with a traceback, after a minute
            raise SettingError(
                f"backend.hosts: {host} has no address here ({error.strerror}); give names that this machine can reach"
            ) from None
    secrets = sorted(name for name in os.environ if SECRET.search(name) and name not in PATHS)
    if secrets:
        write_to(
            sys.stderr,
            f"distill: horovodrun writes the environment on command lines, so it gets no {', '.join(secrets)}; log in "
            "on each host instead, such as by `hf auth login` and `wandb login`\n",
        )
    exported = filter(EXPORTED.fullmatch, os.environ.keys() - secrets)
    host_list = ",".join(f"{host}:{ranks}" for host, ranks in hosts)
    total = str(sum(ranks for _, ranks in hosts))
    launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", total, "-H", host_list, *command]
    sys.stdout.flush()
    os.execve(launcher[0], launcher, {name: os.environ[name] for name in exported})


def keep_log(folder: Path) -> None:
    """Keep what this rank writes to stdout and stderr in `folder`/logs/rank<n>.log; rank 0 has the terminal as well.

    Does nothing for a process that is not one of several ranks.
    """
    info = rank_from_env()
    if info is None or info.size == 1:
        return
    path = folder / "logs" / f"rank{info.rank}.log"
    make_folder(path.parent, f"hydra.run.dir={folder}")
    log = path.open("a", buffering=1, encoding="utf-8")
    if info.rank == 0:
        sys.stdout, sys.stderr = _Both(sys.stdout, log), _Both(sys.stderr, log)
        return
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
    """Let the rank that failed first end first, unless a signal comes, which then has ended the run.

    The kind of signal does not matter here: srun and others end all ranks once one has ended and pass on the
    highest status, and 143 would hide the cause.
    """
    with handled() as signals, signals.deferred():
        until = time.monotonic() + GIVE_WAY
        while time.monotonic() < until and signals.stopping is None:
            time.sleep(0.02)
        signals.received.clear()


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
