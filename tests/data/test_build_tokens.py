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
from text import some_text, tokens_of
from tiny import changed, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config, DataConfig
from distill.data import work
from distill.data.disk_cache import workers
from distill.data.sources import _files
from distill.runtime.errors import SettingError

# --- others at work, and death


CHILD = """
import logging, os, sys, time
from pathlib import Path
from distill.data import build_tokens, work
from distill.data.sources import _files
from distill.data.tokens import corpus_text, prepare
from distill.data.new_tokenizer import SPECIAL
from tiny import parts, text_config
from transformers import PreTrainedTokenizerFast

if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    path, cache, tokenizer = sys.argv[1:]
    _files.SHARD_BYTES = work.SMALLEST = 1
    pack = build_tokens.pack

    def slow(*args):  # real books take longer than these
        time.sleep(0.2)
        while "WAITS" in os.environ and len(list(Path(cache).glob("tokens/*/parts/*.json"))) >= 2:
            time.sleep(0.01)  # until it is killed
        return pack(*args)

    build_tokens.pack = slow
    given = {"kind": "text", "path": path, "heldout": 0.1, "sequence_length": 32}
    corpus, data = parts(text_config(**given, cache=cache, workers=1))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer, **SPECIAL)
    print(prepare(corpus_text(corpus, data), tokenizer, corpus, data, "train").digest)
"""


@pytest.fixture
def child(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> tuple[Config, list[str], dict[str, str]]:
    """A corpus of eight shards, and the command and environment of a process that prepares it slowly."""
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(work, "SMALLEST", 1)
    folder = tmp_path / "books"
    folder.mkdir()
    for seed in range(8):
        (folder / f"{seed}.txt").write_text(some_text(seed, 4000))
    (tmp_path / "child.py").write_text(CHILD)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    arguments = [str(folder), str(tmp_path / "cache"), str(tmp_path / "tokenizer.json")]
    config = text_config(
        kind="text", path=str(folder), cache=str(tmp_path / "cache"), workers=1, heldout=0.1, sequence_length=32
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return config, [sys.executable, str(tmp_path / "child.py"), *arguments], environment


def test_a_killed_build_goes_on_and_gives_the_same(
    child: tuple[Config, list[str], dict[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    lines: list[str],
) -> None:
    config, command, environment = child
    process = subprocess.Popen(command, env=environment | {"WAITS": "1"}, stdout=subprocess.DEVNULL)
    wait_for(lambda: len(list((tmp_path / "cache").glob("tokens/*/parts/*.json"))) == 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = tokens_of(config, tokenizer)
    assert any("resuming a preparation: " in line for line in lines)
    assert found.digest == tokens_of(changed(config, cache=str(tmp_path / "fresh")), tokenizer).digest
    left = [
        path for path in (tmp_path / "cache" / "tokens").rglob("*") if path.name.endswith((".build", ".new", "parts"))
    ]
    assert not left


def test_two_at_once_make_it_once(child: tuple[Config, list[str], dict[str, str]]) -> None:
    _, command, environment = child
    pair = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    (a, b) = (process.communicate(timeout=500)[0].splitlines() for process in pair)
    assert a[-1] == b[-1] and [process.returncode for process in pair] == [0, 0]
    assert sum("preparing tokens" in line for line in a + b) == 1


def test_the_second_process_waits_and_says_so(reviews: Config, tokenizer: PreTrainedTokenizerFast) -> None:
    found = tokens_of(reviews, tokenizer)
    assert found.stored is not None
    folder = Path(found.stored.place)
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
