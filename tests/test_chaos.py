"""A little of benchmarks/chaos.py and elastic.py: whatever happens to runs, they end with the undisturbed student."""

import subprocess
import sys

import pytest
from job import ROOT, environment


def test_half_a_minute_of_chaos() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "chaos.py")]
    options = ["--events", "kill,term,stop,damage", "--minutes", "0.5", "--number", "20", "--seed", "7"]
    done = subprocess.run([*script, *options], env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "problems: 0" in done.stdout


@pytest.mark.slow
def test_some_hosts_are_lost_and_come_back() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "elastic.py")]
    options = ["--kills", "3", "--returns", "1", "--restarts", "1", "--steps", "400", "--pause", "5"]
    done = subprocess.run([*script, *options], env=environment(), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "problems: 0" in done.stdout
