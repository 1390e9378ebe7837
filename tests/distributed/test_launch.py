"""Starting ranks for real: their numbers, logs, exit statuses and signals, and what other launchers are handed."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import free_port
from forked import Forked
from job import environment, is_alive, is_handled, wait_for
from torch.distributed import TCPStore

from distill.config.settings import BackendConfig
from distill.distributed import launch, processes
from distill.distributed.launch import should_launch
from distill.distributed.processes import run_ranks
from distill.runtime.errors import SettingError
from distill.runtime.signals import Signals

HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
NAMES = ["ddp", pytest.param("horovod", marks=HOROVOD)]
QUICK_WITH_TORCH = ["ddp", pytest.param("horovod", marks=[HOROVOD, pytest.mark.slow])]
QUICK_WITH_HOROVOD = [pytest.param("ddp", marks=pytest.mark.slow), pytest.param("horovod", marks=HOROVOD)]
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


def start(tmp_path: Path, name: str, what: str, *hosts: str) -> Any:
    """The job above; in interpreters of their own are those that just `run`, the others are forks (see `forked`)."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    arguments = [name, str(tmp_path), what, *hosts]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if what != "run":
        return Forked(arguments, environment, script=script)
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(tmp_path: Path, name: str, what: str, *hosts: str) -> tuple[int, str, str]:
    job = start(tmp_path, name, what, *hosts)
    output, errors = job.communicate(timeout=LIMIT)
    return job.returncode, output, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK_WITH_HOROVOD)
def test_ranks_meet_and_each_keeps_its_log(name: str, tmp_path: Path) -> None:
    status, output, errors = run(tmp_path, name, "run")
    assert status == 0, errors
    assert "rank 0 of 2, sum 3\n" in output and "rank 1" not in output
    assert (tmp_path / "logs/rank0.log").read_text() == "rank 0 of 2, sum 3\n"
    assert (tmp_path / "logs/rank1.log").read_text() == "rank 1 of 2, sum 3\nfrom the shell\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK_WITH_TORCH)
def test_the_status_is_that_of_the_rank_that_failed_first(name: str, tmp_path: Path) -> None:
    status, _, errors = run(tmp_path, name, "status")
    assert status == 7
    assert (
        "distill: rank 1 ended with status 7; its output is in logs/rank1.log" in errors and "Traceback" not in errors
    )
    assert "one bad thing" in (tmp_path / "logs/rank1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK_WITH_TORCH)
def test_an_error_of_all_ranks_is_told_once(name: str, tmp_path: Path) -> None:
    status, _, errors = run(tmp_path, name, "all")
    assert status == 2
    assert errors.count("the same error") == 1 and "Traceback" not in errors


@pytest.mark.parametrize("ended_by", ["KILL", "ABRT"])  # the second is NCCL's, where a rank has lost another one
@pytest.mark.parametrize("name", QUICK_WITH_TORCH)
def test_a_killed_rank_ends_the_run(name: str, ended_by: str, tmp_path: Path) -> None:
    began = time.monotonic()
    status, _, errors = run(tmp_path, name, ended_by)
    assert status == 128 + signal.Signals[f"SIG{ended_by}"]
    assert "distill: rank 1 was " in errors and f"SIG{ended_by}" in errors
    assert time.monotonic() - began < LIMIT


def start_and_wait(tmp_path: Path, name: str, what: str = "wait") -> Any:
    """Two ranks that have begun to wait for a signal."""
    job = start(tmp_path, name, what)
    wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), job)
    return job


@pytest.mark.parametrize("name", QUICK_WITH_HOROVOD)
def test_signals_reach_the_ranks(name: str, tmp_path: Path) -> None:
    """All of them; what ends on request is not reported as killed."""
    job = start_and_wait(tmp_path, name)
    job.send_signal(signal.SIGUSR1)
    wait_for(lambda: all((tmp_path / f"saved{rank}").exists() for rank in range(2)), job)
    number = signal.SIGTERM if name == "ddp" else signal.SIGHUP
    job.send_signal(number)
    output, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 128 + number, errors
    assert "stopped in good order" in output and "killed" not in errors
    assert "stopped in good order" in (tmp_path / "logs/rank1.log").read_text()


def test_a_rank_that_cannot_save_as_it_stops_gives_the_status(tmp_path: Path) -> None:
    """Rank 0 finds the disk full, when a signal ends the run and the others stop as they should."""
    job = start_and_wait(tmp_path, "ddp", "full")
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 74, errors


def test_a_rank_that_is_ended_while_it_gives_way_keeps_its_status(tmp_path: Path) -> None:
    """As srun ends it, which takes the highest of all statuses for that of the run."""
    text = "from distill.distributed import launch; print('leaving', flush=True); launch.leave(138)"
    rank = subprocess.Popen(
        [sys.executable, "-c", text],
        env=environment() | {"RANK": "1", "WORLD_SIZE": "2"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert rank.stdout is not None and rank.stdout.readline() == "leaving\n"
    wait_for(lambda: rank.poll() is not None or is_handled(signal.SIGTERM, rank.pid))
    rank.terminate()
    assert rank.wait(timeout=LIMIT) == 138


def children(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.slow
def test_a_rank_that_is_asked_to_stop_by_itself_is_not_called_killed(tmp_path: Path) -> None:
    job = start_and_wait(tmp_path, "ddp")
    os.kill(children(job.pid)[0], signal.SIGTERM)
    _, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 128 + signal.SIGTERM and "killed" not in errors, errors


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    job = start_and_wait(tmp_path, "ddp")
    ranks = children(job.pid)
    assert len(ranks) == 2 and all(map(is_alive, ranks))
    job.kill()
    job.communicate(timeout=LIMIT)
    wait_for(lambda: not any(map(is_alive, ranks)))


@pytest.mark.parametrize(
    "delay", [pytest.param(0.0, marks=pytest.mark.slow), 0.05, pytest.param(0.3, marks=pytest.mark.slow)]
)
def test_a_signal_while_ranks_are_started_leaves_none_behind(delay: float, tmp_path: Path) -> None:
    """With programs that start quickly, hundreds of which would fill the time."""
    text = (
        "import sys; from distill.distributed.processes import run_ranks\n"
        "open('ready', 'w').close()\n"
        "sys.exit(run_ranks(20, ['sh', '-c', 'echo $$ >> pids; exec sleep 60'], 30.0))"
    )
    job = subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
    wait_for((tmp_path / "pids").exists, job)
    time.sleep(delay)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 128 + signal.SIGTERM and not errors
    assert not any(is_alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_ranks_that_do_not_end_by_themselves_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first failure SIGTERM, which may take its time, and in the end SIGKILL."""
    monkeypatch.setattr("distill.distributed.processes.END_BY_ITSELF", 0.2)
    monkeypatch.setattr("distill.distributed.processes.LAST_END", 1.0)
    deaf = f'echo $$ >> {tmp_path}/pids; trap "" TERM; [ "$RANK" = 0 ] && exit 74; while :; do sleep 0.1; done'
    assert run_ranks(3, ["sh", "-c", deaf], 1.0) == 74
    assert not any(is_alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_a_rank_that_is_stopped_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.distributed.processes.END_BY_ITSELF", 0.2)
    monkeypatch.setattr("distill.distributed.processes.LAST_END", 60.0)
    stopped = f'echo $$ >> {tmp_path}/pids; [ "$RANK" = 0 ] && sleep 1 && exit 4; kill -STOP $$; sleep 100'
    began = time.monotonic()
    assert run_ranks(2, ["sh", "-c", stopped], 60.0) == 4
    assert time.monotonic() - began < 30
    assert not any(is_alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_a_signal_ends_a_rank_that_waits_for_the_others(tmp_path: Path) -> None:
    """Its library would wait where Python is not running."""
    program = (
        "from distill.config.settings import BackendConfig; from distill.distributed import join_ranks\n"
        "from distill.runtime.errors import Interrupted; from distill.runtime.signals import handled\n"
        "try:\n    with handled(): join_ranks(BackendConfig(name='ddp', device='cpu'))\n"
        "except Interrupted as error: raise SystemExit(error.status)"
    )
    port = free_port()
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    rank["MASTER_PORT"] = str(port)
    job = subprocess.Popen([sys.executable, "-c", program], env=environment() | rank, stderr=subprocess.PIPE, text=True)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    wait_for(lambda: store.check(["distill/0/met"]), job)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 143, errors


def test_who_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert should_launch(BackendConfig(name="ddp", processes=2, device="cpu"))
    assert not should_launch(BackendConfig(name="ddp", device="cpu"))
    assert should_launch(BackendConfig(name="ddp", device="cpu", hosts="elsewhere:1"))
    assert not should_launch(BackendConfig(name="single", processes=2))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not should_launch(BackendConfig(name="ddp", processes=2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BackendConfig(name="ddp", hosts="a,b"), "backend.hosts=a,b"),
        (BackendConfig(name="ddp", hosts="a:x"), "a:8,b:8"),
        (BackendConfig(name="horovod", hosts="-Fconfig:2,b:2"), "backend.hosts=-Fconfig"),  # would be an option
        (BackendConfig(name="ddp", hosts="a:2,b:2", processes=2), "has 4 ranks"),
    ],
)
def test_senseless_hosts_are_refused(settings: BackendConfig, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        should_launch(settings)


# --- Several hosts

HOSTS = "127.0.0.1:1,localhost:1"  # two names of this machine


def test_hosts_of_torch_are_refused_with_the_command_of_each_host() -> None:
    settings = BackendConfig(name="fsdp", hosts="a:8,b.example:4", device="cpu")
    with pytest.raises(SettingError, match=r"^backend.hosts=a:8,b.example:4: .*torchrun --nnodes=2 .*--master-addr=a "):
        launch.launch(settings, [sys.executable, "-m", "distill"])


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
    secrets = {"HF_TOKEN": "hf_secret", "WANDB_API_KEY": "secret", "AWS_SECRET_ACCESS_KEY": "secret"}
    secrets |= {"DISTILL_DB_PWD": "secret", "HF_AUTH": "secret"}
    for name, value in (secrets | {"HF_HOME": "/shared/hub", "MY_SETTING": "plain"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        launch.launch(BackendConfig(name="horovod", hosts=HOSTS, device="cpu"), [sys.executable, "job.py", "seed=1"])
    _, command, exported = started
    options = ["-np", "2", "-H", HOSTS]
    assert command == [sys.executable, "-m", "horovod.runner.launch", *options, sys.executable, "job.py", "seed=1"]
    assert exported["HF_HOME"] == "/shared/hub" and exported["PATH"] == os.environ["PATH"]
    assert not exported.keys() & {*secrets, "MY_SETTING"} and "secret" not in str(list(exported.values()))
    errors = capsys.readouterr().err
    assert all(name in errors for name in secrets) and "hf auth login" in errors and "hf_secret" not in errors


@HOROVOD
@pytest.mark.slow
def test_horovodrun_starts_the_ranks(tmp_path: Path) -> None:
    """Its own lines stand around those of the ranks, and its status is 0 or 1."""
    status, output, errors = run(tmp_path, "horovod", "run", HOSTS)
    assert status == 0, errors
    assert "rank 0 of 2, sum 3" in output
    assert "rank 1 of 2, sum 3" in (tmp_path / "logs/rank1.log").read_text()


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
