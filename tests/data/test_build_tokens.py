"""Sequences that several processes make or wait for, and builds that are killed."""

import fcntl
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job import ROOT, is_alive, wait_for
from text import tokens_of
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config, DataConfig
from distill.data.disk_cache import workers
from distill.data.shards import Shards
from distill.runtime.errors import SettingError

# --- others at work, and death


def test_the_second_process_waits_and_says_so(reviews: Config, tokenizer: PreTrainedTokenizerFast) -> None:
    found = tokens_of(reviews, tokenizer)
    assert isinstance(found.sequences, Shards)
    folder = Path(found.sequences.folder.place)
    kept = folder.rename(folder.with_name("kept"))
    said: list[str] = []
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        class Finish(logging.Handler):  # the first process publishes its work and lets go
            def emit(self, record: logging.LogRecord) -> None:
                said.append(record.getMessage())
                kept.rename(folder)
                fcntl.flock(lock, fcntl.LOCK_UN)

        handler, package = Finish(), logging.getLogger("distill")
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        try:
            assert tokens_of(reviews, tokenizer).digest == found.digest
        finally:
            package.removeHandler(handler)
    assert len(said) == 1 and "another process" in said[0] and "waiting" in said[0]


def test_a_killed_worker_is_one_clear_line() -> None:
    killed = pytest.raises(SettingError, match=r"^data\.workers=2: a process .* was killed")
    with killed, workers(DataConfig(workers=2)) as pool:
        assert pool is not None
        pool.submit(os.kill, pool.submit(os.getpid).result(), signal.SIGKILL).result()


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import os, time\nfrom distill.data.disk_cache import workers\n"
        "from distill.config.settings import DataConfig\n"
        "if __name__ == '__main__':\n    with workers(DataConfig(workers=2)) as pool:\n"
        "        print(pool.submit(os.getpid).result(), flush=True)\n        time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    os.kill(worker, 0)
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_alive(worker))


def test_workers_load_neither_torch_nor_transformers() -> None:
    heavy = "('torch', 'transformers', 'datasets', 'hydra')"
    code = f"import sys, distill.data.tokens; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


UNGUARDED = """
from distill.config.settings import DataConfig
from distill.data.disk_cache import workers

print("once", flush=True)
with workers(DataConfig(workers=2)) as pool:
    print(pool.submit(abs, -3).result(), __file__)
"""


def test_processes_do_not_run_the_program_again(tmp_path: Path) -> None:
    """A program without `if __name__ == "__main__"` starts them, and is as before afterwards."""
    (tmp_path / "program.py").write_text(UNGUARDED)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    once, value, file = done.stdout.split()
    assert (once, value, Path(file).name) == ("once", "3", "program.py")
