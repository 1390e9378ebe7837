"""Pretended hosts whose agents are forks of the launcher, which spares each rank an interpreter of its own."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from forked import Child

AGENT = [sys.executable, "-m", "distill.distributed.agent"]


def fork_agents(folder: Path) -> None:
    """In a launcher: fork the agents of hosts in the place of ssh; `folder` is that of the `PretendedHosts`."""
    from distill.distributed import agents, elastic

    elastic.LOOK = 0.1  # hosts that are back are looked for more often
    agents.subprocess = SimpleNamespace(Popen=partial(Agent, folder), PIPE=subprocess.PIPE)  # type: ignore[attr-defined]


class Agent(Child):
    """What `ssh HOST cd FOLDER && exec env NAME=VALUE ... COMMAND` would run."""

    def __init__(
        self, folder: Path, command: list[str], stdin: int, preexec_fn: Callable[[], None], process_group: int
    ) -> None:
        host, words = command[-2], shlex.split(command[-1])
        start = words.index(AGENT[0])
        assert words[start : start + len(AGENT)] == AGENT and words[4] == "env"
        given = dict(word.split("=", 1) for word in words[5:start])
        source, target = os.pipe()

        def prepare() -> None:
            os.setpgid(0, process_group)
            os.dup2(source, 0)
            preexec_fn()

        work = partial(be_agent, folder, host, words[start + len(AGENT) :], given)
        super().__init__(work, prepare)
        os.close(source)
        self.stdin: Any = os.fdopen(target, "wb")


def be_agent(folder: Path, host: str, arguments: list[str], given: dict[str, str]) -> NoReturn:
    """What the pretended ssh does, and then the agent."""
    if (folder / f"{host}.away").exists():
        os._exit(255)
    group = folder / f"{host}.new"
    group.write_text(f"{os.getpid()}\n")
    group.rename(folder / f"{host}.group")
    os.environ |= given
    sys.argv, sys.stdin = ["agent", *arguments], os.fdopen(0)
    from distill.distributed import agent

    status = agent.main()
    sys.stderr.flush()
    os._exit(status)
