"""Elastic runs: ranks and hosts that are lost, and those that come back, do not end the run and need nobody.

The ranks of all hosts are started, as new processes each time. When one is lost the others end, and all that answer are
started again, from the newest checkpoint; when a host comes back they are stopped with a checkpoint and started with
it. A step has the same rows however many ranks share it (`train.rows_per_step`), so the student is the same but for
rounding. Only a loss counts: a run that fails by an error of its own ends with it.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from distill.config.settings import BackendConfig
from distill.distributed.agents import GONE, Agent, Agents, End
from distill.distributed.elastic_range import parse_elastic
from distill.distributed.hosts import Host, answering, at_most, num_ranks
from distill.distributed.launch import hosts_of, require_installed, this_command
from distill.distributed.rank import EVENT
from distill.runtime.errors import RankLost, SettingError
from distill.runtime.progress import say
from distill.runtime.signals import ALL, handled

LOOK = 5.0  # seconds between two looks whether a host is back
SAY_AGAIN = 60.0  # seconds between two lines of a run that waits
MOST_LOSSES = 10  # in a row without a new checkpoint between them: it is not the machines then


def launch(settings: BackendConfig, folder: Path, command: list[str] | None = None) -> int:
    """Run `command`, by default this very command line, on as many ranks as there are; return the exit status.

    Args:
        folder: of the run; a new checkpoint in it shows that the run gets on.

    Raises SettingError for hosts that make no sense.
    """
    elastic = parse_elastic(settings.elastic)
    assert elastic is not None
    require_installed(settings)
    hosts = [Host(name, ranks) for name, ranks in hosts_of(settings)]
    if num_ranks(hosts) < elastic[0] or not at_most(hosts, elastic[1]):
        raise SettingError(
            f"backend.elastic={settings.elastic}: there are hosts for {num_ranks(hosts)} ranks; name more of them, or "
            "other numbers"
        )
    return Elastic(hosts, *elastic, settings.elastic_wait, folder, command or this_command()).run()


class Elastic:
    """One run from its first start to its end."""

    def __init__(
        self, hosts: list[Host], fewest: int, most: int, patience: float, folder: Path, command: list[str]
    ) -> None:
        self._hosts, self._fewest, self._most, self._patience = hosts, fewest, most, patience
        self._folder, self._command = folder, command
        self._losses = 0  # in a row without a new checkpoint

    def run(self) -> int:
        """Start the ranks again and again until the run ends; gives its exit status."""
        chosen: list[Host] = []
        while True:
            before, chosen = chosen, self._gather()
            if not chosen:
                return RankLost.status
            if back := [host.name for host in chosen if before and host not in before]:
                self._add_event(f"{' and '.join(back)} joined")
            newest = self._newest()
            end, stopped = self._start(chosen)
            os.environ.pop(EVENT, None)
            if stopped is not None and end.status:
                return 128 + stopped
            if not (end.is_loss or end.is_stopped):
                return end.status
            if end.is_loss and not self._note_loss(end, newest != self._newest()):
                return end.status

    def _gather(self) -> list[Host]:
        """The hosts to start on, waited for where they are too few; none when that took too long."""
        began, said = time.monotonic(), -SAY_AGAIN
        while True:
            there = answering(self._hosts)
            if num_ranks(there) < self._fewest:
                there = answering(self._hosts, also_resting=True)
            chosen = at_most(there, self._most)
            if num_ranks(chosen) >= self._fewest:
                return chosen
            now, missing = time.monotonic(), [host.name for host in self._hosts if host not in there]
            state = f"{num_ranks(chosen)} of at least {self._fewest} ranks are there, without {', '.join(missing)}"
            if now - began > self._patience:
                _say(f"{state}, for {self._patience:g} s (backend.elastic_wait); the same command goes on")
                return []
            if now - said >= SAY_AGAIN:
                _say(f"waiting for hosts: {state}")
                said = now
            time.sleep(min(1.0, LOOK))

    def _start(self, chosen: list[Host]) -> tuple[End, int | None]:
        """One start of the ranks: how it ended, and by which signal to this process, if it was one."""
        company, over = threading.Event(), threading.Event()
        watch = threading.Thread(target=self._watch, args=(chosen, company, over), name="hosts", daemon=True)
        agents = Agents()
        with handled() as signals, signals.deferred(agents.send):
            agents.start(chosen, self._command)
            for number in signals.received:  # before all were there
                agents.send(number)
            watch.start()
            end = agents.wait(company.is_set)
            over.set()
            stopped = signals.agreed_stop([float(number in signals.received) for number in ALL])
            signals.received.clear()  # the ranks have heeded them
        return end, stopped

    def _watch(self, chosen: list[Host], company: threading.Event, over: threading.Event) -> None:
        """Look for hosts that are back, and with which there would be more ranks."""
        while not over.wait(LOOK):
            others = [host for host in self._hosts if host not in chosen]
            if num_ranks(at_most([*chosen, *answering(others)], self._most)) > num_ranks(chosen):
                company.set()
                return

    def _note_loss(self, end: End, has_saved: bool) -> bool:
        """Say what was lost; false where the run is to end, as it does not get on."""
        for agent in end.lost:
            agent.host.losses = 0 if has_saved else agent.host.losses
            agent.host.lose()
        self._losses = 1 if has_saved else self._losses + 1
        what = f"{' and '.join(map(str, end.lost))} lost ({_how(end.lost)})" if end.lost else "a rank did not answer"
        _say(what)
        if self._losses > MOST_LOSSES:
            _say(f"{self._losses} losses without a checkpoint between them: the run does not get on, so it ends here")
            return False
        self._add_event(what)
        return True

    def _add_event(self, what: str) -> None:
        """Let rank 0 say it when it knows from which step the run goes on."""
        os.environ[EVENT] = "; ".join(filter(None, [os.environ.get(EVENT), what]))

    def _newest(self) -> str:
        """The name of the newest checkpoint; empty where there is none, or where this host does not see the folder."""
        return max((path.name for path in self._folder.glob("checkpoints/step-*")), default="")


def _how(lost: tuple[Agent, ...]) -> str:
    """By what statuses it is known."""
    names = {128 + each: each.name for each in signal.Signals} | {GONE: "its host is gone"}
    return ", ".join(sorted({names.get(agent.status or 0, f"status {agent.status}") for agent in lost}))


def _say(text: str) -> None:
    say(sys.stderr, f"distill: {text}\n")
