"""Starting ranks for real: their numbers, logs, exit statuses and signals, and what other launchers are handed."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import free_port
from forked import Forked
from job import TINY, Shelf, assert_alike, distill, environment, is_alive, is_handled, metrics, wait_for
from torch.distributed import TCPStore

from distill.config.settings import BackendConfig
from distill.distributed import launch, processes
from distill.distributed.launch import should_launch
from distill.distributed.processes import run_ranks
from distill.runtime.errors import SettingError
from distill.runtime.signals import Signals

HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
QUICK_WITH_TORCH = ["ddp", pytest.param("horovod", marks=[HOROVOD, pytest.mark.slow])]
LIMIT = 240  # seconds, on a busy machine
JOB = """
import os, signal, sys, time
from pathlib import Path
import torch
from distill.distributed import RankLost, join_ranks, launch
from distill.config.settings import BackendConfig

if __name__ == "__main__":
    name, folder, what, hosts = [*sys.argv[1:], None][:4]
    settings = BackendConfig(name=name, processes=2, hosts=hosts, device="cpu", threads=1, timeout=30.0)
    if launch.should_launch(settings):
        sys.exit(launch.launch(settings, [sys.executable, *sys.orig_argv[1:]]))
    launch.keep_log(Path(folder))
    workers = join_ranks(settings)
    rank = workers.rank
    print(f"rank {rank} of {workers.size}, sum {workers.sum(torch.tensor(rank + 1)).item()}", flush=True)
    os.system("echo from the shell")
    try:
        if what == "status" and rank == 1:
            print("one bad thing", file=sys.stderr)
            launch.leave(7)
        if what == "all":
            print("the same error", file=sys.stderr)
            launch.leave(2)
        if what in ("KILL", "ABRT") and rank == 1:
            os.kill(os.getpid(), signal.Signals[f"SIG{what}"])
        if what in ("wait", "full"):
            def stop(number, frame):
                print("stopped in good order", flush=True)
                launch.leave(74 if what == "full" and rank == 0 else 128 + number)
            signal.signal(signal.SIGTERM, stop)
            signal.signal(signal.SIGHUP, stop)
            signal.signal(signal.SIGUSR1, lambda *_: Path(folder, f"saved{rank}").touch())
            Path(folder, f"ready{rank}").touch()
            while True:
                time.sleep(0.1)
        workers.barrier()
        workers.sum(torch.ones(1))
        workers.close()
        launch.leave(0)
    except RankLost as error:
        print(error, file=sys.stderr)
        launch.leave(error.status, error)
"""


def interpreter(*arguments: str, **more: Any) -> Any:
    given = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], **(given | more))


def start(tmp_path: Path, name: str, what: str, *hosts: str) -> Any:
    """The job above; in interpreters of their own are those that just `run`, the others are forks (see `forked`)."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    arguments = [name, str(tmp_path), what, *hosts]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return interpreter(str(script), *arguments, env=env) if what == "run" else Forked(arguments, env, script=script)


def run(tmp_path: Path, name: str, what: str, *hosts: str) -> tuple[int, str, str]:
    job = start(tmp_path, name, what, *hosts)
    output, errors = job.communicate(timeout=LIMIT)
    return job.returncode, output, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("ddp", []),
        pytest.param("horovod", [], marks=HOROVOD),
        pytest.param("horovod", ["127.0.0.1:1,localhost:1"], marks=HOROVOD),  # by horovodrun
    ],
)
def test_ranks_meet_and_each_keeps_its_log(name: str, hosts: list[str], tmp_path: Path) -> None:
    status, output, errors = run(tmp_path, name, "run", *hosts)
    assert status == 0, errors
    assert "rank 0 of 2, sum 3\n" in output and "rank 1" not in output
    assert (tmp_path / "logs/rank0.log").read_text() == "rank 0 of 2, sum 3\n"
    assert (tmp_path / "logs/rank1.log").read_text() == "rank 1 of 2, sum 3\nfrom the shell\n"


KEPT = "its output is in logs/rank1.log of the run folder"


@pytest.mark.parametrize("name", QUICK_WITH_TORCH)
@pytest.mark.parametrize(
    ("what", "expected", "line", "log"),
    [
        pytest.param("status", 7, "rank 1 ended with status 7; its output is in", "bad thing", marks=pytest.mark.slow),
        pytest.param("all", 2, "the same error", "", marks=pytest.mark.slow),
        ("KILL", 137, f"rank 1 was killed by SIGKILL; {KEPT}; the same command resumes", ""),
        ("ABRT", 134, "rank 1 was aborted (SIGABRT)", ""),  # as by NCCL, where a rank has lost another one
    ],
)
def test_the_first_rank_that_fails_gives_the_status(
    what: str, expected: int, line: str, log: str, name: str, tmp_path: Path
) -> None:
    status, _, errors = run(tmp_path, name, what)
    assert status == expected and errors.count(line) == 1 and "Traceback" not in errors, errors
    assert log in (tmp_path / "logs/rank1.log").read_text()


# --- signals


def start_and_wait(tmp_path: Path, name: str, what: str) -> Any:
    """Two ranks that have begun to wait for a signal."""
    job = start(tmp_path, name, what)
    wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), job)
    return job


@pytest.mark.parametrize(
    ("name", "what", "number", "status"),
    [
        pytest.param("ddp", "wait", signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param("horovod", "wait", signal.SIGHUP, 129, marks=HOROVOD),
        ("ddp", "full", signal.SIGTERM, 74),  # rank 0 finds the disk full, and the other stops as it should
    ],
)
def test_signals_reach_the_ranks(name: str, what: str, number: int, status: int, tmp_path: Path) -> None:
    """All of them; what ends on request is not reported as killed."""
    job = start_and_wait(tmp_path, name, what)
    job.send_signal(signal.SIGUSR1)
    wait_for(lambda: all((tmp_path / f"saved{rank}").exists() for rank in range(2)), job)
    job.send_signal(number)
    output, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == status, errors
    assert "stopped in good order" in output and "killed" not in errors
    assert "stopped in good order" in (tmp_path / "logs/rank1.log").read_text()


def test_a_rank_that_is_ended_while_it_gives_way_keeps_its_status() -> None:
    """As srun ends it, which takes the highest of all statuses for that of the run."""
    text = "from distill.distributed import launch; print('leaving', flush=True); launch.leave(138)"
    rank = interpreter("-c", text, env=environment() | {"RANK": "1", "WORLD_SIZE": "2"})
    assert rank.stdout.readline() == "leaving\n"
    wait_for(lambda: rank.poll() is not None or is_handled(signal.SIGTERM, rank.pid))
    rank.terminate()
    assert rank.wait(timeout=LIMIT) == 138


def test_a_signal_ends_a_rank_that_waits_for_the_others() -> None:
    """Its library would wait where Python is not running."""
    program = (
        "from distill.config.settings import BackendConfig; from distill.distributed import join_ranks\n"
        "from distill.runtime.errors import Interrupted; from distill.runtime.signals import handled\n"
        "try:\n    with handled(): join_ranks(BackendConfig(name='ddp', device='cpu'))\n"
        "except Interrupted as error: raise SystemExit(error.status)"
    )
    port = free_port()
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    job = interpreter("-c", program, env=environment() | rank | {"MASTER_PORT": str(port)})
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    wait_for(lambda: store.check(["distill/0/met"]), job)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 143, errors


def children(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


# --- no rank is left behind


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    job = start_and_wait(tmp_path, "ddp", "wait")
    ranks = children(job.pid)
    assert len(ranks) == 2 and all(map(is_alive, ranks))
    job.kill()
    job.communicate(timeout=LIMIT)
    wait_for(lambda: not any(map(is_alive, ranks)))


def assert_ended(folder: Path) -> None:
    assert not any(is_alive(int(pid)) for pid in (folder / "pids").read_text().split())


def test_a_signal_while_ranks_are_started_leaves_none_behind(tmp_path: Path) -> None:
    """With programs that start quickly, hundreds of which would fill the time."""
    text = (
        "import sys; from distill.distributed.processes import run_ranks\n"
        "sys.exit(run_ranks(20, ['sh', '-c', 'echo $$ >> pids; exec sleep 60'], 30.0))"
    )
    job = interpreter("-c", text, cwd=tmp_path)
    wait_for((tmp_path / "pids").exists, job)
    time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 128 + signal.SIGTERM and not errors
    assert_ended(tmp_path)


@pytest.mark.parametrize(
    ("script", "status", "last_end"),
    [
        ('trap "" TERM; [ "$RANK" = 0 ] && exit 74; while :; do sleep 0.1; done', 74, 1.0),  # SIGKILL in the end
        ('[ "$RANK" = 0 ] && sleep 1 && exit 4; kill -STOP $$; sleep 100', 4, 60.0),  # a stopped one acts on SIGTERM
    ],
)
def test_ranks_that_do_not_end_by_themselves_are_ended(
    script: str, status: int, last_end: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "END_BY_ITSELF", 0.2)
    monkeypatch.setattr(processes, "LAST_END", last_end)
    began = time.monotonic()
    assert run_ranks(3, ["sh", "-c", f"echo $$ >> {tmp_path}/pids; {script}"], last_end) == status
    assert time.monotonic() - began < 50
    assert_ended(tmp_path)


def test_rank_0_has_the_timeout_to_save_after_another_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that SIGKILL alone ends, on a clock of the test."""
    now, killed = [0.0], dict[int, float]()
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(processes, "time", clock)

    def rank(number: int, status: int | None = None) -> Any:
        made = SimpleNamespace(returncode=status, terminate=lambda: None, send_signal=lambda _: None)
        made.poll = lambda: made.returncode
        made.kill = lambda: killed.update({number: now[0]}) or vars(made).update(returncode=-9)
        return made

    assert processes._wait([rank(0), rank(1), rank(2, 4)], Signals(), 100.0) == 2
    assert killed == pytest.approx({0: 103.0, 1: 33.0}, abs=0.1)


# --- who launches, and what other launchers are given


@pytest.mark.parametrize(
    ("settings", "launches"),
    [
        ({"name": "ddp", "processes": 2}, True),
        ({"name": "ddp"}, False),
        ({"name": "ddp", "hosts": "elsewhere:1"}, True),
        ({"name": "single", "processes": 2}, False),
        ({"name": "ddp", "hosts": "a,b"}, "backend.hosts=a,b"),
        ({"name": "ddp", "hosts": "a:x"}, "a:8,b:8"),
        ({"name": "horovod", "hosts": "-Fconfig:2,b:2"}, "backend.hosts=-Fconfig"),  # would be an option
        ({"name": "ddp", "hosts": "a:2,b:2", "processes": 2}, "has 4 ranks"),
    ],
)
def test_who_launches(settings: dict[str, Any], launches: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BackendConfig(device="cpu", **settings)
    if isinstance(launches, str):
        with pytest.raises(SettingError, match=launches):
            should_launch(backend)
        return
    assert should_launch(backend) == launches
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not should_launch(backend), "one of several that a launcher has started"


def test_hosts_of_torch_are_refused_with_the_command_of_each_host() -> None:
    settings = BackendConfig(name="fsdp", hosts="a:8,b.example:4", device="cpu")
    with pytest.raises(SettingError, match=r"^backend.hosts=a:8,b.example:4: .*torchrun --nnodes=2 .*--master-addr=a "):
        launch.launch(settings, [sys.executable, "-m", "distill"])


OPEN = {"HF_HOME": "/shared/hub", "AWS_ENDPOINT_URL": "http://minio:9000", "SSL_CERT_FILE": "/etc/ca.pem"}
OPEN["GOOGLE_APPLICATION_CREDENTIALS"] = "/shared/key.json"


@HOROVOD
def test_horovodrun_is_given_hosts_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes what it has of the environment on the command lines of its ranks."""
    started: list[Any] = []

    def execve(*arguments: Any) -> None:
        started.extend(arguments)
        raise SystemExit  # the process is another program from here on

    monkeypatch.setattr(os, "execve", execve)
    secrets = {"HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DISTILL_DB_PWD", "HF_AUTH"}
    for name, value in (dict.fromkeys(secrets, "hidden") | OPEN | {"MY_SETTING": "plain"}).items():
        monkeypatch.setenv(name, value)
    hosts, job = "127.0.0.1:1,localhost:1", [sys.executable, "job.py", "seed=1"]
    with pytest.raises(SystemExit):
        launch.launch(BackendConfig(name="horovod", hosts=hosts, device="cpu"), job)
    _, command, exported = started
    assert command == [sys.executable, "-m", "horovod.runner.launch", "-np", "2", "-H", hosts, *job]
    assert exported.items() >= OPEN.items() and exported["PATH"] == os.environ["PATH"]
    assert not exported.keys() & {*secrets, "MY_SETTING"} and "hidden" not in exported.values()
    errors = capsys.readouterr().err
    assert all(name in errors for name in secrets) and "hf auth login" in errors and "hidden" not in errors


# --- torchrun's own elastic agents: one is lost with its rank, and another one joins

STEPS = 400


def arguments(shelf: Shelf, folder: Path) -> list[str]:
    sizes = ["train.batch_size=4", "train.sequences_per_step=7", "train.epochs=null", f"train.steps={STEPS}"]
    more = [TINY, "corpus.vocab_size=400", "train.log_every=1", "precision=fp32", f"evaluate.every_steps={STEPS}"]
    return ["+recipe=bert_pretrain", *shelf.corpus, *sizes, *more, f"hydra.run.dir={folder}"]


def kill(agent: Any) -> None:
    """With its ranks, which are no members of its process group."""
    for pid in [*children(agent.pid), agent.pid] if agent.poll() is None else []:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start_agent(shelf: Shelf, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Starts torchrun on pretended hosts of one rank each, which need not be there at the same time; gives each one."""
    port, agents = free_port(), list[Any]()
    waits = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=9,join_timeout=90"
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9", "--rdzv-backend=c10d", "--rdzv-id=mine"]
    options += [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={waits}", "--local-addr=127.0.0.1"]
    command = ["-m", "torch.distributed.run", *options, "-m", "distill", *arguments(shelf, tmp_path / "run")]
    # Without it agents keep the address of the first store when its host is gone, or another one comes first.
    env = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def start(log: str) -> Any:
        with (tmp_path / log).open("wb") as file:
            given = {"env": env, "stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
            agents.append(interpreter(*command, "backend=ddp", **given))
        with socket.socket() as probe:  # the first opens the store where all of them meet
            wait_for(lambda: probe.connect_ex(("127.0.0.1", port)) == 0, agents[-1])
        return agents[-1]

    yield start
    for agent in agents:
        kill(agent)


@pytest.mark.slow
def test_torchrun_starts_ranks_again(shelf: Shelf, start_agent: Callable[[str], Any], tmp_path: Path) -> None:
    """The first agent holds the store, so it is the second that is lost."""
    folder = tmp_path / "run"
    assert distill(*arguments(shelf, tmp_path / "alone")) == 0

    def num_steps() -> int:
        return len(metrics(folder)) if (folder / "metrics.jsonl").exists() else 0

    first, second = start_agent("first.txt"), start_agent("second.txt")
    wait_for(lambda: num_steps() > 3, first)
    kill(second)
    reached = num_steps() + 1
    wait_for(lambda: num_steps() > reached, first)
    third = start_agent("third.txt")
    statuses = [agent.wait(timeout=500) for agent in (first, third)]
    log = (tmp_path / "first.txt").read_text()
    assert statuses == [0, 0], log[-3000:]
    assert "(1 micro-batch of at most 4 on each of 2 ranks)" in log and "(2 micro-batches of at most 4)" in log
    assert log.count("resuming after step") == 2
    assert_alike(folder, tmp_path / "alone")
