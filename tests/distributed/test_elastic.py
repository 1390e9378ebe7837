"""What an elastic run makes of how its ranks end, and of which hosts there are."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed import free_port
from job import ROOT, composed, environment, is_alive, wait_for
from torch.distributed import TCPStore

from distill.checks import check
from distill.config.settings import BackendConfig
from distill.distributed import build
from distill.distributed.agents import Agent, Agents, End, end_by
from distill.distributed.elastic_range import parse_elastic
from distill.distributed.hosts import Host, answering, at_most, num_ranks
from distill.runtime.errors import SettingError

sys.path.append(str(ROOT / "benchmarks"))  # behind the tests, which have a module of the same name

from pretended_hosts import PretendedHosts

KILLED, GONE, LOST, ABORTED, TERM = 137, 255, 4, 134, 143


def agents(*statuses: int) -> list[tuple[Agent, int]]:
    process = subprocess.Popen(["true"])
    process.wait()
    return [(Agent(Host(f"host{n}", 1), n, process), status) for n, status in enumerate(statuses)]


@pytest.mark.parametrize(
    ("statuses", "status", "lost"),
    [
        ((0, 0, 0), 0, []),
        ((LOST, KILLED, LOST), LOST, [1]),
        ((1, LOST, KILLED), LOST, [2]),  # an error that only came of the other's end
        ((GONE, LOST, GONE), LOST, [0, 2]),
        ((2, LOST, ABORTED), 2, []),
        ((LOST, 74), 74, []),
        ((ABORTED, LOST), LOST, []),
        ((TERM, TERM), TERM, []),
        ((TERM, KILLED), LOST, [1]),
        ((0, KILLED), LOST, [1]),  # at the very end: the next start finds the run finished
    ],
)
def test_what_ended_a_start(statuses: tuple[int, ...], status: int, lost: list[int]) -> None:
    ended = agents(*statuses)
    assert end_by(ended) == End(status, tuple(ended[number][0] for number in lost))


def test_hosts_up_to_the_most_ranks() -> None:
    hosts = [Host("a", 2), Host("b", 4), Host("c", 2)]
    assert [host.name for host in at_most(hosts, 8)] == ["a", "b", "c"]
    assert [host.name for host in at_most(hosts, 5)] == ["a", "c"], "the next that fits"
    assert at_most(hosts, 1) == [] and num_ranks(hosts) == 8


def test_a_host_that_is_lost_again_and_again_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = PretendedHosts(tmp_path / "hosts", 2)
    monkeypatch.setenv("PATH", pretended.environment()["PATH"])
    hosts = [Host(name, 1) for name in pretended.names]
    assert answering(hosts) == hosts
    pretended.kill(hosts[0].name, stays_away=True)
    assert answering(hosts) == hosts[1:]
    pretended.come_back(hosts[0].name)
    assert answering(hosts) == hosts
    hosts[1].lose()
    assert answering(hosts) == hosts, "once is no reason"
    hosts[1].lose()
    assert answering(hosts) == hosts[:1] and answering(hosts, also_resting=True) == hosts
    rest = hosts[1].rests_until - time.monotonic()
    hosts[1].lose()
    assert hosts[1].rests_until - time.monotonic() == pytest.approx(2 * rest, rel=0.1)


@pytest.mark.parametrize("text", ["2", "0:2", "3:2", "2:", "a:b", "2:4:6", "-1:2"])
def test_senseless_numbers_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match=f"backend.elastic={text}: give the fewest and the most"):
        parse_elastic(text)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "set train.rows_per_step, such as 768 "),
        (("train.rows_per_step=2",), "leaves ranks without a row"),
        (("train.rows_per_step=24", "optimizer.clip_each_rank=true"), "optimizer.clip_each_rank=true"),
        (("train.rows_per_step=24", "resume=never"), "resume=never: what is started again"),
    ],
)
def test_nothing_may_follow_from_the_number_of_ranks(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        check(composed("+recipe=bert_pretrain", "backend=ddp", "backend.elastic=2:3", *overrides))


def test_other_launchers_start_again_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BackendConfig(name="ddp", elastic="2:4")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    with pytest.raises(SettingError, match="torchrun started the ranks"):
        build(settings)
    with pytest.raises(SettingError, match="`single` is one process"):
        monkeypatch.delenv("RANK")
        build(BackendConfig(name="single", elastic="2:4"))


def run(text: str, folder: Path, **more: str) -> "subprocess.Popen[str]":
    """A launcher of `sh -c text` on two ranks of this machine, at least two and at most two."""
    program = (
        "import sys; from pathlib import Path; from distill.distributed import elastic; "
        "from distill.config.settings import BackendConfig; "
        "settings = BackendConfig(name='ddp', elastic='2:2', device='cpu', elastic_wait=1.0, "
        f"hosts={more.get('hosts')!r}); elastic.LOOK = 0.2; elastic.MOST_LOSSES = 2; "
        f"sys.exit(elastic.launch(settings, Path('.'), ['sh', '-c', {text!r}]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    )


def test_an_error_of_its_own_ends_a_run_at_once(tmp_path: Path) -> None:
    job = run("echo start >> starts; exit 2", tmp_path)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 2 and "lost" not in errors
    assert len((tmp_path / "starts").read_text().split()) == 2, "one start of two ranks"


def test_ranks_that_die_without_getting_on_end_it_after_some_tries(tmp_path: Path) -> None:
    job = run('echo $RANK >> starts; [ "$RANK" = 1 ] && kill -9 $$; exec sleep 60', tmp_path)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 4
    assert errors.count("distill: one of ranks 0 to 1 on localhost lost (SIGKILL)") == 3
    assert "3 losses without a checkpoint between them" in errors
    assert (tmp_path / "starts").read_text().split().count("1") == 3


def test_a_run_waits_for_hosts_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = PretendedHosts(tmp_path / "hosts", 2)
    monkeypatch.setenv("PATH", pretended.environment()["PATH"])
    pretended.kill(pretended.names[0], stays_away=True)
    job = run("exit 0", tmp_path, hosts=pretended.setting().strip("'"))
    _, errors = job.communicate(timeout=60)
    state = f"1 of at least 2 ranks are there, without {pretended.names[0]}"
    assert job.returncode == 4
    assert f"distill: waiting for hosts: {state}\n" in errors
    assert f"distill: {state}, for 1 s (backend.elastic_wait); the same command goes on\n" in errors


def test_a_signal_ends_a_rank_that_waits_for_the_others(tmp_path: Path) -> None:
    """Its library would wait where Python is not running, and the next start with it."""
    program = (
        "from distill.distributed import build; from distill.config.settings import BackendConfig; "
        "from distill.runtime.errors import Interrupted; from distill.runtime.signals import handled\n"
        "try:\n    with handled(): build(BackendConfig(name='ddp', device='cpu'))\n"
        "except Interrupted as error: raise SystemExit(error.status)"
    )
    port = free_port()
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    job = subprocess.Popen([sys.executable, "-c", program], env=environment() | rank, stderr=subprocess.PIPE, text=True)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    wait_for(lambda: store.check(["distill/0/met"]), job)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=15)
    assert job.returncode == 143, errors


def test_a_port_that_is_taken_is_no_reason_to_end(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        where = ["0", "1", "1", "127.0.0.1", str(taken.getsockname()[1]), '["true"]']
        job = subprocess.Popen(
            [sys.executable, "-m", "distill.distributed.agent", *where],
            env=environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert job.wait(60) == LOST and job.stderr is not None
        assert "the ranks cannot meet at port" in job.stderr.read()


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    job = run("echo $$ >> pids; exec sleep 60", tmp_path)
    wait_for(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2, job)
    job.send_signal(signal.SIGKILL)
    job.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while any(is_alive(int(pid)) for pid in (tmp_path / "pids").read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_agents_that_do_not_end_by_themselves_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM first, which may take its time, and in the end SIGKILL."""
    monkeypatch.setattr("distill.distributed.agents.OWN_END", 0.2)
    monkeypatch.setattr("distill.distributed.agents.SAVED_END", 1.0)
    monkeypatch.setattr("distill.distributed.agents.LAST_END", 3.0)
    started = Agents()
    deaf = f'echo $$ >> {tmp_path}/pids; trap "" TERM; [ "$RANK" = 0 ] && exit 1; while :; do sleep 1; done'
    started.start([Host("localhost", 1), Host("127.0.0.1", 1)], ["sh", "-c", deaf])
    assert started.wait(lambda: False) == End(1)
    pids = (tmp_path / "pids").read_text().split()
    deadline = time.monotonic() + 10
    while any(is_alive(int(pid)) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
