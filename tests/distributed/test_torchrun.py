"""torchrun's own elastic agents start the command: an agent is lost with its rank, and another one joins."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import free_port
from job import TINY, Shelf, assert_alike, distill, environment, metrics, wait_for

STEPS = 400


def arguments(shelf: Shelf, folder: Path) -> list[str]:
    sizes = ["train.batch_size=4", "train.sequences_per_step=7", "train.epochs=null", f"train.steps={STEPS}"]
    more = [TINY, "corpus.vocab_size=400", "train.log_every=1", "precision=fp32", f"evaluate.every_steps={STEPS}"]
    return ["+recipe=bert_pretrain", *shelf.corpus, *sizes, *more, f"hydra.run.dir={folder}"]


def children(process: int) -> list[int]:
    """Ranks are no members of their agent's process group."""
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


class Agents:
    """torchrun on pretended hosts of one rank each, which need not be there at the same time."""

    def __init__(self, command: list[str]) -> None:
        self.command, self.port, self.all = command, free_port(), list["subprocess.Popen[bytes]"]()

    def start(self, log: Path) -> "subprocess.Popen[bytes]":
        waits = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=9,join_timeout=90"
        options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9", "--rdzv-backend=c10d", "--rdzv-id=mine"]
        options += [f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf={waits}", "--local-addr=127.0.0.1"]
        agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, "-m", "distill", *self.command, "backend=ddp"],
            # Without it agents keep the address of the first store when its host is gone, or another one comes first.
            env=environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.all.append(agent)
        return agent

    def have_a_store(self) -> bool:
        """Whether an agent has opened the store where all of them meet."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture
def agents(shelf: Shelf, tmp_path: Path) -> Iterator[Agents]:
    made = Agents(arguments(shelf, tmp_path / "run"))
    yield made
    for agent in made.all:
        for pid in [*children(agent.pid), agent.pid] if agent.poll() is None else []:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_torchrun_starts_ranks_again(shelf: Shelf, agents: Agents, tmp_path: Path) -> None:
    """The first agent holds the store, so it is the second that is lost."""
    folder = tmp_path / "run"
    alone = distill(*arguments(shelf, tmp_path / "alone"))
    assert alone == 0

    def num_steps() -> int:
        return len(metrics(folder)) if (folder / "metrics.jsonl").exists() else 0

    first = agents.start(tmp_path / "first.txt")
    wait_for(agents.have_a_store, first)
    second = agents.start(tmp_path / "second.txt")
    wait_for(lambda: num_steps() > 3, first)
    for pid in [*children(second.pid), second.pid]:
        os.kill(pid, signal.SIGKILL)
    reached = num_steps() + 1
    wait_for(lambda: num_steps() > reached, first)
    third = agents.start(tmp_path / "third.txt")
    said = tmp_path / "first.txt"
    assert first.wait(timeout=500) == 0 and third.wait(timeout=500) == 0, said.read_text()[-3000:]
    assert "(1 micro-batch of at most 4 on each of 2 ranks)" in said.read_text()
    assert "(2 micro-batches of at most 4)" in said.read_text()
    assert said.read_text().count("resuming after step") == 2
    assert_alike(folder, tmp_path / "alone")
