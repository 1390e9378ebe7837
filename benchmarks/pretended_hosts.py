"""Hosts that are process groups of this machine behind a pretended ssh: they are killed, stay away and come back."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

SSH = """#!/bin/sh
# ssh [-tt] [-o OPTION] ... HOST COMMAND, on this machine.
while case $1 in -tt) shift ;; -o) shift 2 ;; *) false ;; esac; do :; done
host=$1; shift
[ -e "{folder}/$host.away" ] && exit 255
[ "$*" = true ] && exit 0
echo $$ > "{folder}/$host.new" && mv "{folder}/$host.new" "{folder}/$host.group"
exec sh -c "$*"
"""


class PretendedHosts:
    """`number` hosts, which have addresses of this machine as their names: 127.0.0.2 and so on.

    Attributes:
        names: all of them.
        away: those that do not answer.
        folder: of what is known of them.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.names = [f"127.0.0.{2 + n}" for n in range(number)]
        self.away: set[str] = set()
        self.folder = folder
        folder.mkdir(parents=True)
        program = folder / "ssh"
        program.write_text(SSH.format(folder=folder))
        program.chmod(0o755)

    def environment(self) -> dict[str, str]:
        """In which a launcher takes them for hosts."""
        return {"PATH": f"{self.folder}:{os.environ['PATH']}"}

    def setting(self, ranks: int = 1) -> str:
        """Their names and ranks, for `backend.hosts`."""
        return "'" + ",".join(f"{name}:{ranks}" for name in self.names) + "'"

    def is_at_work(self, name: str) -> bool:
        """Whether anything runs there."""
        return bool(self.processes(name))

    def processes(self, name: str) -> list[int]:
        """The processes that run there."""
        if (group := self._group(name)) is None:
            return []
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _group_of(entry) == group]

    def kill(self, name: str, stays_away: bool) -> None:
        """End everything on a host at once; whether it answers afterwards is another question."""
        if stays_away:
            (self.folder / f"{name}.away").touch()
            self.away.add(name)
        if (group := self._group(name)) is not None:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def come_back(self, name: str) -> None:
        """Let a host that was away answer again."""
        (self.folder / f"{name}.away").unlink()
        self.away.remove(name)

    def end(self) -> None:
        """Kill what is left on all of them."""
        for name in self.names:
            until = time.monotonic() + 5
            while self.is_at_work(name) and time.monotonic() < until:
                self.kill(name, stays_away=False)
                time.sleep(0.05)

    def _group(self, name: str) -> int | None:
        path = self.folder / f"{name}.group"
        return int(path.read_text()) if path.exists() else None


def _group_of(entry: Path) -> int | None:
    """The process group of a living process, by its folder in /proc."""
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[2])
