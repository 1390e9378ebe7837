"""A Slurm cluster that is pretended on one machine: real daemons of Slurm and munge, nodes that can die and come back.

Each node has an address and a name of its own, and its processes are those with that host name; so a node is killed
with everything on it. All of it lives in namespaces of processes, mounts, network and host name (`inside`), and in a
temporary folder: nothing of the machine is changed, and nothing stays when the program ends, however it does.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TOOLS = {
    "unshare": "util-linux", "ip": "iproute2", "munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd",
    "sbatch": "slurm-client", "scontrol": "slurm-client",
}  # fmt: skip
NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--uts")
HEAD = "head"  # the machine of the scheduler
NETWORK = "10.78.0"
SILENCE = 20  # seconds without a node's answer, after which it is down

CONFIGURATION = """
ClusterName=pretended
SlurmctldHost={head}({network}.1)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={silence}
KillWait=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """What this machine lacks for a pretended cluster, or None."""
    if os.geteuid() != 0:
        return "it needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]
    if missing:
        packages = sorted({TOOLS[tool] for tool in missing})
        return (
            f"{', '.join(missing)} not found; on Debian: apt-get install --no-install-recommends {' '.join(packages)}"
        )
    tried = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


def inside(command: Sequence[str]) -> int:
    """`command` in namespaces of its own, with the path of a temporary folder behind it; gives its exit status."""
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        return subprocess.run(["unshare", *NAMESPACES, *command, folder], env=os.environ | {"PATH": _path()}).returncode


@dataclass
class SlurmCluster:
    """`size` nodes of `cpus` processors each, to be used within `inside`; their names are node1, node2 and so on."""

    folder: Path
    size: int
    cpus: int = 2
    daemons: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __enter__(self) -> Self:
        (self.folder / "state").mkdir(parents=True)
        _do("ip", "link", "set", "lo", "up")
        # Addresses that are none of the loopback's, or Slurm's look-ups of names find that there is no network.
        hosts = {HEAD: f"{NETWORK}.1"} | {self.node(n): f"{NETWORK}.{10 + n}" for n in range(1, self.size + 1)}
        for address in hosts.values():
            _do("ip", "addr", "add", f"{address}/24", "dev", "lo")
        names = self.folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in hosts.items()))
        _do("mount", "--bind", names, "/etc/hosts")
        _do("hostname", HEAD)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={address} Port={7000 + n} CPUs={self.cpus} RealMemory=4000"
            for n, (name, address) in enumerate(hosts.items())
            if name != HEAD
        )
        configuration = CONFIGURATION.format(
            head=HEAD, network=NETWORK, folder=self.folder, silence=SILENCE, nodes=nodes
        )
        (self.folder / "slurm.conf").write_text(configuration)
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        try:
            self._start_daemons()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @staticmethod
    def node(number: int) -> str:
        return f"node{number}"

    def start_node(self, name: str) -> None:
        """Bring a node up, for the first time or again."""
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        self._start(name, "unshare", "--uts", "sh", "-c", f"hostname {name} && exec slurmd -D -N {name}")

    def kill_node(self, name: str) -> None:
        """SIGKILL to all processes of a node, as when its power fails."""
        self.kill_processes(name)
        self.daemons.pop(name).wait()

    def kill_processes(self, node: str, word: str = "") -> None:
        """SIGKILL to those processes of a node whose command line has `word` in it."""
        home = _host_name_space(self.daemons[node].pid)
        for process in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
            if home == _host_name_space(process) and word in _command_line(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def submit(self, script: Path, *arguments: str, **environment: str) -> int:
        """`sbatch` from the folder of the script; gives the job's number."""
        command = ["sbatch", "--parsable", str(script), *arguments]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        variables["SLURM_CONF"] = os.environ["SLURM_CONF"]
        done = subprocess.run(
            command, cwd=script.parent, env=variables | environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout.strip())

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says of a job, such as JobState, Restarts and NodeList."""
        done = subprocess.run(["scontrol", "show", "job", "-o", str(number)], capture_output=True, text=True)
        return dict(re.findall(r"(\S+?)=(\S*)", done.stdout))

    def nodes_of(self, number: int) -> list[str]:
        """The nodes on which a job runs, the one with its script first."""
        listed = self.job(number).get("NodeList", "")
        done = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True)
        return done.stdout.split()

    def idle_nodes(self) -> int:
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True)
        return done.stdout.split().count("idle")

    def _start_daemons(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.folder.chmod(0o755)  # munge looks at who could change its socket
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in files.items()]
        self._start("munged", "munged", "--force", "--foreground", *options)
        wait_for(lambda: (self.folder / "munge.socket").exists(), 20, "munge")
        self._start("slurmctld", "slurmctld", "-D")
        for number in range(1, self.size + 1):
            self.start_node(self.node(number))
        wait_for(lambda: self.idle_nodes() == self.size, 60, "the nodes")

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _stop(self) -> None:
        for name in [*self.daemons]:
            if name.startswith("node"):
                self.kill_node(name)
        for daemon in self.daemons.values():
            daemon.terminate()
            daemon.wait()
        _do("umount", "/etc/hosts")


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Raises RuntimeError when it takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"waited {seconds:g} s for {what}")
        time.sleep(0.2)


def _host_name_space(process: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{process}/ns/uts")
    return ""


def _command_line(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _path() -> str:
    """Where programs are, those for root included."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _do(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(
        why_not()
        or "this machine can pretend to be a cluster: benchmarks/reliability/slurm_job.py runs the job file on one"
    )
