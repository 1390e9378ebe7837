"""Several hosts for a benchmark: processes on the loopback, or namespaces with an emulated network between them.

`Cluster(4, NETWORKS["1gbit"])` needs root, /dev/net/tun, gcc and iproute2 (`why_not` says what is missing);
`Cluster(2)` needs nothing. Emulated hosts share the processor with the switch between them and with each other, so what
they give are ratios of runs that took turns, not times of a real cluster. With `share` each host gets that part of one
core (a quota of Linux's scheduler in periods of 10 ms), so that more hosts do not slow each other down.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

HERE = Path(__file__).resolve().parent
PERIOD = 10_000  # microseconds: much shorter than a step, so that a quota acts like a slower core


class Network(NamedTuple):
    """Mbit/s of each host's link, one-way delay in microseconds, Mbit/s of one TCP connection (0: no such limit)."""

    rate: float
    delay: int
    per_flow: float = 0


NETWORKS = {
    "1gbit": Network(1000, 500),
    "1gbit-far": Network(1000, 2000),
    "capped": Network(1000, 500, 250),  # clouds cap single connections
}


def why_not() -> str | None:
    """What this machine lacks for emulated hosts, or None."""
    if os.geteuid() != 0:
        return "it needs root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    missing = [tool for tool in ("ip", "gcc", "unshare") if shutil.which(tool) is None]
    return f"{', '.join(missing)} not found (Debian: iproute2, gcc, util-linux)" if missing else None


@dataclass
class Cluster:
    """`size` hosts with one rank each; without `network` they are processes on the loopback of this one.

    Attributes:
        share: part of one core that each host may use; None: no limit.
        limit: seconds after which `run` ends all ranks.
    """

    size: int
    network: Network | None = None
    share: float | None = None
    limit: float = 900.0

    def __enter__(self) -> Self:
        self._held = contextlib.ExitStack()
        self._folder = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        try:
            if self.network is not None:
                self._connect(self.network)
            share = self.share
            self._groups = [self._quota(i, share) for i in range(self.size)] if share else []
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def run(self, command: Sequence[str], **environment: str) -> str:
        """`command` once on every host, as torchrun would start it; gives what rank 0 wrote to stdout.

        Raises RuntimeError with the end of what a rank wrote to stderr when one fails or the limit is over.
        """
        emulated = self.network is not None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks, logs = [], []
        for rank in range(self.size):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": self.size,
                "LOCAL_RANK": 0 if emulated else rank,
                "LOCAL_WORLD_SIZE": 1 if emulated else self.size,
                "MASTER_ADDR": _address(0) if emulated else "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": 1,
                "GLOO_SOCKET_IFNAME": "bench0" if emulated else "lo",
            }
            log = (self._folder / f"{rank}.out").open("w+"), (self._folder / f"{rank}.err").open("w+")
            logs.append(log)
            ranks.append(
                subprocess.Popen(
                    [*self._enter(rank), *command],
                    env=os.environ | {name: str(value) for name, value in variables.items()} | environment,
                    stdout=log[0],
                    stderr=log[1],
                    start_new_session=True,
                )
            )
        failed = _wait(ranks, self.limit)
        texts = [[_read(file) for file in log] for log in logs]
        if failed is not None:
            raise RuntimeError(f"rank {failed[0]} {failed[1]}: {' | '.join(texts[failed[0]][1].splitlines()[-8:])}")
        return texts[0][0]

    def run_json(self, module: str, *arguments: object, **environment: str) -> Any:
        """`python -m MODULE` on every host; what rank 0 printed last, which has to be JSON."""
        command = [sys.executable, "-m", module, *map(str, arguments)]
        return json.loads(self.run(command, **environment).strip().splitlines()[-1])

    def _connect(self, network: Network) -> None:
        if (reason := why_not()) is not None:
            raise RuntimeError(f"no emulated network here: {reason}")
        program = self._folder / "switch"
        _do("gcc", "-O2", "-o", program, HERE / "switch.c")
        names = [self._name(i) for i in range(self.size)]
        for i, name in enumerate(names):
            _do("ip", "netns", "add", name)
            self._held.callback(_do, "ip", "netns", "del", name)
            # Each host has a name that resolves to its own address: Horovod binds its connections to that.
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            self._held.callback(shutil.rmtree, hosts.parent, ignore_errors=True)
            hosts.write_text(
                "127.0.0.1 localhost\n" + "".join(f"{_address(k)} {other}\n" for k, other in enumerate(names))
            )
            assert i < 200, "addresses end at 10.77.0.254"
        values = [str(value) for value in (network.rate, network.delay, network.per_flow, 1024)]
        switch = subprocess.Popen([program, *values, *names], stdout=subprocess.PIPE, text=True)
        self._held.callback(_stop, switch)
        assert switch.stdout is not None
        if switch.stdout.readline() != "ready\n":
            raise RuntimeError("the switch of the emulated network did not start")
        for i, name in enumerate(names):
            inside = ("ip", "netns", "exec", name)
            _do(*inside, "ip", "link", "set", "lo", "up")
            _do(*inside, "ip", "addr", "add", f"{_address(i)}/24", "dev", "bench0")
            _do(*inside, "ip", "link", "set", "bench0", "mtu", "1500", "txqueuelen", "2000", "up")
            _do(*inside, "sysctl", "-qw", "net.ipv6.conf.bench0.disable_ipv6=1")

    def _name(self, rank: int) -> str:
        return f"bench{os.getpid()}-{rank}"

    def _quota(self, rank: int, share: float) -> Path:
        """A control group that may use this part of a core. Raises RuntimeError where there is none at hand."""
        old = Path("/sys/fs/cgroup/cpu")
        group = (old if old.is_dir() else Path("/sys/fs/cgroup")) / self._name(rank)
        try:
            group.mkdir()
            self._held.callback(_remove, group)
            _allow(group, share)
        except OSError as error:
            raise RuntimeError(f"no share of a core for each host here: {error}") from error
        return group

    def _enter(self, rank: int) -> list[str]:
        """The command that goes before another to run it on this host."""
        # Into the group first: `ip netns exec` mounts a /sys of its own.
        before = ["sh", "-c", f'echo $$ > {self._groups[rank]}/cgroup.procs; exec "$@"', "x"] if self._groups else []
        if self.network is None:
            return before
        name = self._name(rank)
        inside = ["ip", "netns", "exec", name, "unshare", "--uts"]
        return [*before, *inside, "sh", "-c", f'hostname {name}; exec "$@"', "x"]


def _allow(group: Path, share: float) -> None:
    """Let a control group use this part of a core."""
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{round(share * PERIOD)} {PERIOD}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD)))


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _do(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


def _stop(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


def _remove(group: Path) -> None:
    for _ in range(50):  # its processes may still be going
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


def _wait(ranks: list[subprocess.Popen[Any]], limit: float) -> tuple[int, str] | None:
    """Until all ranks have ended; the first that failed and how, or None. Afterwards none is left."""
    end = time.monotonic() + limit
    try:
        while any(rank.poll() is None for rank in ranks):
            if failed := _failed(ranks):
                return failed
            if time.monotonic() > end:
                return 0, f"took over {limit:g} s"
            time.sleep(0.05)
        return _failed(ranks)
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def _failed(ranks: list[subprocess.Popen[Any]]) -> tuple[int, str] | None:
    return next(((i, f"ended with status {rank.returncode}") for i, rank in enumerate(ranks) if rank.poll()), None)


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def end_rank(ranks: Any, found: Any) -> NoReturn:
    """Print what a rank has measured, for `run_json`, and end it as Distill's own ranks do.

    Gloo's threads may abort a normal end.
    """
    if ranks.rank == 0:
        print(json.dumps(found), flush=True)
    ranks.close()
    os._exit(0)
