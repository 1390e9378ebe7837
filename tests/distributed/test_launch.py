"""Starting ranks for real: their numbers, logs, exit statuses and signals, with both launchers."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from job import environment, is_alive, wait_for

from distill.config.settings import BackendConfig
from distill.distributed.launch import should_launch
from distill.runtime.errors import SettingError

HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
NAMES = ["ddp", pytest.param("horovod", marks=HOROVOD)]
LIMIT = 120  # seconds
JOB = """
import os, signal, sys, time
from pathlib import Path
import torch
from distill.distributed import RankLost, build, launch
from distill.config.settings import BackendConfig

if __name__ == "__main__":
    name, folder, what = sys.argv[1:4]
    hosts = sys.argv[4] if len(sys.argv) > 4 else None
    settings = BackendConfig(
        name=name, processes=None if hosts else 2, hosts=hosts, device="cpu", threads=1, timeout=30.0
    )
    if launch.should_launch(settings):
        sys.exit(launch.launch(settings))
    launch.keep_log(Path(folder))
    workers = build(settings)
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
        if what == "kill" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "wait":
            def stop(number, frame):
                print("stopped in good order", flush=True)
                launch.leave(128 + number)
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


@pytest.mark.parametrize("name", NAMES)
def test_ranks_meet_and_each_keeps_its_log(name: str, tmp_path: Path) -> None:
    status, output, errors = run(tmp_path, name, "run")
    assert status == 0, errors
    assert "rank 0 of 2, sum 3\n" in output and "rank 1" not in output
    assert (tmp_path / "logs/rank0.log").read_text() == "rank 0 of 2, sum 3\n"
    assert (tmp_path / "logs/rank1.log").read_text() == "rank 1 of 2, sum 3\nfrom the shell\n"


@pytest.mark.parametrize("name", NAMES)
def test_the_status_is_that_of_the_rank_that_failed_first(name: str, tmp_path: Path) -> None:
    status, _, errors = run(tmp_path, name, "status")
    assert status == 7
    assert "rank 1 ended with status 7; its output is in logs/rank1.log" in errors and "Traceback" not in errors
    assert "one bad thing" in (tmp_path / "logs/rank1.log").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_an_error_of_all_ranks_is_told_once(name: str, tmp_path: Path) -> None:
    status, _, errors = run(tmp_path, name, "all")
    assert status == 2
    assert errors.count("the same error") == 1 and "Traceback" not in errors


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_rank_ends_the_run(name: str, tmp_path: Path) -> None:
    began = time.monotonic()
    status, _, errors = run(tmp_path, name, "kill")
    assert status == 128 + signal.SIGKILL and "rank 1 was killed by SIGKILL" in errors
    assert time.monotonic() - began < 60


def start_and_wait(tmp_path: Path, name: str) -> Any:
    """Two ranks that have begun to wait for a signal."""
    job = start(tmp_path, name, "wait")
    wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), job)
    return job


@pytest.mark.parametrize("name", NAMES)
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
    time.sleep(0.5)
    rank.terminate()
    assert rank.wait(timeout=LIMIT) == 138


def children(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


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
    deadline = time.monotonic() + 10
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3])
def test_a_signal_while_ranks_are_started_leaves_none_behind(delay: float, tmp_path: Path) -> None:
    """With programs that start quickly, hundreds of which would fill the time."""
    text = (
        "import sys; from distill.distributed.ranks import run_ranks\n"
        "open('ready', 'w').close()\n"
        "sys.exit(run_ranks(0, 20, 20, '127.0.0.1', 0, ['sh', '-c', 'echo $$ >> pids; exec sleep 60']))"
    )
    job = subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
    wait_for((tmp_path / "pids").exists, job)
    time.sleep(delay)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM and not errors
    assert not any(is_alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


@pytest.mark.parametrize("name", NAMES)
def test_several_hosts(name: str, tmp_path: Path) -> None:
    """Two names of this machine stand for two hosts, with one rank and two."""
    status, output, errors = run(tmp_path, name, "run", "localhost:1,127.0.0.1:2")
    assert status == 0, errors
    assert "rank 0 of 3, sum 6" in output
    assert "rank 2 of 3, sum 6" in (tmp_path / "logs/rank2.log").read_text()


def test_who_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert should_launch(BackendConfig(name="ddp", processes=2, device="cpu"))
    assert not should_launch(BackendConfig(name="ddp", device="cpu"))
    assert not should_launch(BackendConfig(name="single", processes=2))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not should_launch(BackendConfig(name="ddp", processes=2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BackendConfig(name="ddp", processes=0), "backend.processes=0"),
        (BackendConfig(name="ddp", hosts="a,b"), "backend.hosts=a,b"),
        (BackendConfig(name="ddp", hosts="a:x"), "a:8,b:8"),
        (BackendConfig(name="ddp", hosts="-Fconfig:2,b:2"), "backend.hosts=-Fconfig"),  # would be an option of ssh
        (BackendConfig(name="ddp", hosts="a:2,b:2", processes=2), "has 4 ranks"),
    ],
)
def test_senseless_hosts_are_refused(settings: BackendConfig, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        should_launch(settings)
