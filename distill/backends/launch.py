"""Start the ranks of a run on one or more hosts: torch's elastic launcher for ddp, Horovod's runner for horovod."""

import importlib.util
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from distill.backends.interface import RankLost
from distill.backends.rank import rank_from_env
from distill.config import BackendConfig
from distill.errors import SettingError

INSTALL = "python -m distill.backends.install_horovod"
# What ranks on other hosts take over from here; Horovod's runner hands on everything.
EXPORTED = re.compile(
    r"(PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CUDA_VISIBLE_DEVICES|(DISTILL|HF|TRANSFORMERS|WANDB|NCCL|GLOO|OMP|MKL)_.*)"
)
FAILURE_LINES = {"rank": re.compile(r"^Process name: (\d+)"), "status": re.compile(r"^Exit code: (\d+)")}
OF_RANK = re.compile(r"^\[(\d+)\]<std(?:out|err)>:")
GIVE_WAY = 2.0  # seconds


def should_launch(settings: BackendConfig) -> bool:
    """Whether this process has to start the ranks, because no launcher has started it as one of them."""
    return settings.name in ("ddp", "horovod") and rank_from_env() is None and sum(n for _, n in _hosts(settings)) > 1


def launch(settings: BackendConfig, command: list[str] | None = None) -> int:
    """Run `command`, by default this very command line, as every rank; wait; return the exit status of the run.

    The status is that of the rank that failed first (128 + the signal's number when it was killed). Rank 0 has the
    terminal; the others write where `keep_log` says. SIGINT and SIGTERM are passed on to the ranks, which have 30 (ddp)
    or 5 seconds (Horovod) to end by themselves. Raises SettingError for hosts that make no sense.
    """
    command = command or [sys.executable, *sys.orig_argv[1:]]
    hosts = _hosts(settings)
    if settings.name == "horovod":
        if importlib.util.find_spec("horovod") is None:
            raise SettingError(f"backend.name=horovod: Horovod is not installed; run `{INSTALL}`")
        return _launch_horovod(hosts, command)
    if len(hosts) == 1 and _is_here(hosts[0][0]):
        return _agent(0, 1, hosts[0][1], "localhost", 0, command)
    return _launch_agents(hosts, command)


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
    if isinstance(error, RankLost) or (status and info.rank > 0):
        time.sleep(GIVE_WAY)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Both:
    """A text stream that also writes to a log; in all else it is the stream."""

    def __init__(self, stream: IO[str], log: IO[str]) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._log.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _hosts(settings: BackendConfig) -> list[tuple[str, int]]:
    """Hosts and their ranks from `backend.hosts` or `backend.processes`; without both, a rank per GPU of this host."""
    if settings.processes is not None and settings.processes < 1:
        raise SettingError(f"backend.processes={settings.processes}: give at least 1")
    if settings.hosts is None:
        return [("localhost", settings.processes or _num_gpus(settings))]
    hosts = []
    for entry in str(settings.hosts).split(","):
        match = re.fullmatch(r"\s*([\w.-]+):([1-9]\d*)\s*", entry)
        if match is None:
            raise SettingError(f"backend.hosts={settings.hosts}: give host:ranks,host:ranks such as a:8,b:8")
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


def _is_here(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", socket.gethostname())


def _agent(node: int, num_nodes: int, processes: int, address: str, port: int, command: list[str]) -> int:
    """Run the ranks of one host under torch's elastic agent and return the exit status."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # the agent's tables and warnings; the failure is said below, in one line
    with tempfile.TemporaryDirectory(prefix="distill-ranks-") as scratch:
        config = LaunchConfig(
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            nproc_per_node=processes,
            run_id="distill",
            rdzv_backend="static" if num_nodes > 1 else "c10d",
            rdzv_endpoint=f"{address}:{port}",
            rdzv_configs={"rank": node} if num_nodes > 1 else {},
            local_addr=address if num_nodes == 1 else None,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            status = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
            _report_failure(rank, status)
            return status
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


def _launch_agents(hosts: list[tuple[str, int]], command: list[str]) -> int:
    """Run one elastic agent on each host, over ssh where that is not this one; the first failure ends all."""
    address = socket.gethostname() if _is_here(hosts[0][0]) else hosts[0][0]
    if all(_is_here(host) for host, _ in hosts):
        address = "127.0.0.1"
    port = _free_port()
    agents = []
    for node, (host, processes) in enumerate(hosts):
        where = [str(node), str(len(hosts)), str(processes), address, str(port)]
        local = [sys.executable, "-m", "distill.backends.launch", *where, json.dumps(command)]
        # The terminal (-tt) makes the remote agent end when the connection does.
        agents.append(
            subprocess.Popen(local if _is_here(host) else ["ssh", "-tt", "-o", "BatchMode=yes", host, _remote(local)])
        )
    return _wait(agents)


def _remote(command: list[str]) -> str:
    variables = [f"{name}={value}" for name, value in os.environ.items() if EXPORTED.fullmatch(name)]
    return f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*variables, *command])}"


def _launch_horovod(hosts: list[tuple[str, int]], command: list[str]) -> int:
    """Run Horovod's own launcher; its prefixes are taken off rank 0's output and its traceback becomes one line."""
    total = sum(ranks for _, ranks in hosts)
    runner = [sys.executable, "-m", "horovod.runner.launch", "-np", str(total), "--gloo"]
    if len(hosts) > 1 or not _is_here(hosts[0][0]):
        runner += ["-H", ",".join(f"{host}:{ranks}" for host, ranks in hosts)]
    # A session of its own: Ctrl-C at the terminal reaches the ranks once, through us.
    child = subprocess.Popen(
        [*runner, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    own_lines: list[str] = []
    pumps = [
        threading.Thread(target=_pump, args=(source, target, own_lines))
        for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
    ]
    for pump in pumps:
        pump.start()
    status = _wait([child])
    for pump in pumps:
        pump.join()
    if status in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        return status
    found = {
        what: int(match[1]) for line in own_lines for what, form in FAILURE_LINES.items() if (match := form.match(line))
    }
    if "status" not in found:
        print(f"Horovod's launcher failed: {own_lines[-1] if own_lines else 'it says nothing'}", file=sys.stderr)
        return status
    _report_failure(found["rank"], found["status"])
    return found["status"]


def _pump(source: IO[bytes], target: IO[str], own_lines: list[str]) -> None:
    """Hand on the lines of the ranks, those of rank 0 as they are; collect the launcher's own."""
    rest = b""
    while data := os.read(source.fileno(), 65536):
        *lines, rest = re.split(rb"(?<=[\r\n])", rest + data)
        for line in [text.decode(errors="replace") for text in lines]:
            of_rank = OF_RANK.match(line)
            if of_rank is None:
                own_lines.extend([line.strip()] if line.strip() else [])
                continue
            target.write(("" if of_rank[1] == "0" else f"rank {of_rank[1]}: ") + line[of_rank.end() :])
            target.flush()


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all children, passing signals on; end all when one fails. Returns the first status that is not 0."""
    caught: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        for child in children:
            child.send_signal(number)

    former = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    first = 0
    try:
        while any(child.poll() is None for child in children):
            failed = [child.returncode for child in children if child.returncode]
            if failed and not first:
                first = failed[0]
                for child in children:
                    child.terminate()
            time.sleep(0.05)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if caught:
        return 128 + caught[0]
    return first or next((child.returncode for child in children if child.returncode), 0)


def _report_failure(rank: int, status: int) -> None:
    """Say which rank ended the run, unless it is rank 0 that ended by itself and has said why."""
    if rank > 0 or status > 128:
        how = f"was killed by {signal.Signals(status - 128).name}" if status > 128 else f"ended with status {status}"
        print(f"rank {rank} {how}; its output is in logs/rank{rank}.log of the run folder", file=sys.stderr)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    node, num_nodes, processes, address, port, command = sys.argv[1:]
    sys.exit(_agent(int(node), int(num_nodes), int(processes), address, int(port), json.loads(command)))
