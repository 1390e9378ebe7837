"""A little of benchmarks/reliability/chaos.py: whatever happens to runs, they end with the undisturbed student."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from forked import RUN, Forked
from job import environment


@pytest.mark.slow
def test_some_chaos(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first undisturbed run has an interpreter of its own; all others are forks, which start in no time."""
    chaos: Any = import_module("benchmarks.reliability.chaos")
    start = chaos.Chaos.start

    def fork_later(self: Any, folder: Path) -> Any:
        log = self.work / "output.txt"
        if not log.exists():
            return start(self, folder)
        log.write_bytes(b"")
        return Forked(self.command(folder)[len(RUN) :], environment(), new_session=True, log=log)

    monkeypatch.setattr(chaos.Chaos, "start", fork_later)
    options = ["--events", "kill,term,stop,damage", "--minutes", "0.5", "--number", "10", "--seed", "7"]
    monkeypatch.setattr(sys, "argv", ["chaos.py", *options])
    status, output = chaos.main(), capsys.readouterr().out
    assert status == 0 and "problems: 0" in output, output[-6000:]
