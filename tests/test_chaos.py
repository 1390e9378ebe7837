"""A little of benchmarks/chaos.py and elastic.py: whatever happens to runs, they end with the undisturbed student."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import RUN, Forked
from job import ROOT, environment


@pytest.mark.slow
def test_some_chaos(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first undisturbed run has an interpreter of its own; all others are forks, which start in no time."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    chaos: Any = __import__("chaos")
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


@pytest.mark.slow
def test_some_hosts_are_lost_and_come_back() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "elastic.py")]
    options = ["--kills", "3", "--returns", "1", "--restarts", "1", "--steps", "400", "--pause", "5"]
    done = subprocess.run([*script, *options], env=environment(), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "problems: 0" in done.stdout
