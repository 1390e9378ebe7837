"""The hosts of an elastic run: which of them answer, and which of those take part."""

import os
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from distill.distributed.launch import is_here

# A host that vanishes without a word is noticed after 15 seconds.
SSH = (
    "ssh",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=5",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
)
ANSWER = 15.0  # seconds that a host has to say that it is there
SHORTEST_REST, LONGEST_REST = 10.0, 600.0  # seconds that one is left alone which was lost again and again


@dataclass
class Host:
    """A machine and its ranks.

    Attributes:
        losses: how often in a row it was lost without a checkpoint in between.
        rests_until: when it may be tried again, on the monotonic clock.
    """

    name: str
    ranks: int
    losses: int = 0
    rests_until: float = 0.0

    def lose(self) -> None:
        """It was lost: at first it is tried again at once, then after twice as long each time."""
        self.losses += 1
        if self.losses > 1:
            self.rests_until = time.monotonic() + min(LONGEST_REST, SHORTEST_REST * 2 ** (self.losses - 2))


def answering(hosts: Iterable[Host], also_resting: bool = False) -> list[Host]:
    """Those that can take part now, in their order."""
    tried = [host for host in hosts if also_resting or host.rests_until <= time.monotonic()]
    with ThreadPoolExecutor(max_workers=32) as pool:
        found = list(pool.map(lambda host: answers(host.name), tried))
    return [host for host, there in zip(tried, found, strict=True) if there]


def answers(name: str) -> bool:
    """Whether a host can be reached."""
    if is_here(name):
        return True
    try:
        done = subprocess.run(
            [*SSH, name, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER, env=os.environ
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def at_most(hosts: Iterable[Host], most: int) -> list[Host]:
    """The first of them, with `most` ranks together at the most."""
    chosen: list[Host] = []
    for host in hosts:
        if num_ranks([*chosen, host]) <= most:
            chosen.append(host)
    return chosen


def num_ranks(hosts: Iterable[Host]) -> int:
    """The ranks of these hosts together."""
    return sum(host.ranks for host in hosts)
