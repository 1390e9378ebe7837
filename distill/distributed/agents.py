"""One start of all ranks of an elastic run: an agent on each host, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from distill.distributed.hosts import SSH, Host
from distill.distributed.launch import free_port, is_here, meeting_address, remote_command
from distill.runtime.children import dying_with
from distill.runtime.errors import RankLost
from distill.runtime.signals import STOPPING

# Seconds after the first failure: until then the others may end by themselves, where it is not clear yet which rank is
# the cause; then they get SIGTERM, by which rank 0 can still finish a checkpoint; then a second one, which ends them
# even within a library; at last they are killed.
OWN_END, SAVED_END, LAST_END = 3.0, 20.0, 30.0
GONE = 255  # the status of ssh for a connection that ended or never was
ABORTED = 128 + signal.SIGABRT  # Gloo's threads may end a rank so when others are gone


@dataclass
class Agent:
    """The process here that stands for the ranks of a host, itself or by a connection."""

    host: Host
    first_rank: int
    process: "subprocess.Popen[bytes]"

    @property
    def status(self) -> int | None:
        """The exit status of its ranks, as a shell has it; None while they run."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """Let its ranks heed a signal."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended
            self.process.stdin.write(f"{number}\n".encode())
            self.process.stdin.flush()

    def __str__(self) -> str:
        last, code = self.first_rank + self.host.ranks - 1, self.process.poll()
        one = "" if code is None or code < 0 or code == GONE else "one of "  # else the agent itself is gone
        ranks = f"rank {last}" if self.host.ranks == 1 else f"{one}ranks {self.first_rank} to {last}"
        return f"{ranks} on {self.host.name}"


@dataclass(frozen=True)
class End:
    """How a start of the ranks ended.

    Attributes:
        status: its exit status; that of RankLost where ranks were lost.
        lost: the agents that were, as far as that is known.
    """

    status: int
    lost: tuple[Agent, ...] = ()

    @property
    def is_loss(self) -> bool:
        return self.status == RankLost.status

    @property
    def is_stopped(self) -> bool:
        """By a signal, with a checkpoint."""
        return self.status - 128 in STOPPING


class Agents:
    """The agents of one start."""

    def __init__(self) -> None:
        self._agents: list[Agent] = []
        self._is_stopping = False

    def start(self, hosts: list[Host], command: list[str]) -> None:
        """Start `command` as the ranks of all hosts."""
        address, port = meeting_address([host.name for host in hosts]), free_port()
        total, first = sum(host.ranks for host in hosts), 0
        for host in hosts:
            where = [str(number) for number in (first, host.ranks, total)]
            agent = [sys.executable, "-m", "distill.distributed.agent", *where, address, str(port), json.dumps(command)]
            if not is_here(host.name):
                agent = [*SSH, host.name, remote_command(agent)]
            # A group of their own keeps Ctrl-C at the terminal away: signals come through the pipe, to all hosts alike.
            process = subprocess.Popen(
                agent, stdin=subprocess.PIPE, preexec_fn=dying_with(os.getpid()), process_group=0
            )
            self._agents.append(Agent(host, first, process))
            first += host.ranks

    def send(self, number: int) -> None:
        """Let all ranks heed a signal."""
        self._is_stopping = self._is_stopping or number in STOPPING
        for agent in self._agents:
            agent.send(number)

    def wait(self, has_company: Callable[[], bool]) -> End:
        """Wait until all have ended, which the first failure brings about.

        Args:
            has_company: whether another host could join; the ranks are stopped then, with a checkpoint.
        """
        since: float | None = None
        by_itself: list[tuple[Agent, int]] = []
        sent = 0
        while any(agent.status is None for agent in self._agents):
            now = time.monotonic()
            if since is None and any(agent.status for agent in self._agents):
                since = now
            if since is None and not self._is_stopping and has_company():
                self.send(signal.SIGTERM)
            past = now - since if since is not None else 0.0
            is_clear = sent == 0 and any(is_killed(status) for _, status in self._statuses())
            if is_clear or (sent < 2 and past > (OWN_END, SAVED_END)[sent]):
                by_itself = by_itself or self._statuses()  # what ends from here on was ended
                sent += 1
                if sent == 2 or not self._is_stopping:  # else they are ending already, and a second one would cut that
                    self.send(signal.SIGTERM)
            if past > LAST_END:
                for agent in self._agents:
                    agent.process.kill()
            time.sleep(0.05)
        return end_by(by_itself or self._statuses())

    def _statuses(self) -> list[tuple[Agent, int]]:
        return [(agent, status) for agent in self._agents if (status := agent.status) is not None]


def end_by(statuses: list[tuple[Agent, int]]) -> End:
    """What ended the ranks, by the statuses of those that ended by themselves.

    A rank that is killed and a host that is gone bring others down in any way. Next comes an error of a rank's own, as
    all others only meet the end of that one.
    """
    lost = tuple(agent for agent, status in statuses if is_killed(status))
    if lost:
        return End(RankLost.status, lost)
    failures = [status for _, status in statuses if status]
    own = [status for status in failures if status not in (RankLost.status, ABORTED)]
    return End(own[0] if own else RankLost.status if failures else 0)


def is_killed(status: int) -> bool:
    """Whether an agent's status says that a rank was killed by a signal, or that its host is gone."""
    stopped = status - 128 in STOPPING
    return status == GONE or (status > 128 and not stopped and status != ABORTED)
