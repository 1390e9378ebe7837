"""Half a minute of benchmarks/chaos.py: runs that are killed, stopped and damaged end with the undisturbed student."""

import subprocess
import sys

from job import ROOT, environment


def test_half_a_minute_of_chaos() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "chaos.py")]
    options = ["--events", "kill,term,stop,damage", "--minutes", "0.5", "--number", "20", "--seed", "7"]
    done = subprocess.run([*script, *options], env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "problems: 0" in done.stdout
