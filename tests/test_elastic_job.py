"""An elastic run end to end: a host is killed, the others go on, it comes back and joins: the same student."""

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from forked_hosts import fork_agents
from job import ROOT, TINY, Shelf, assert_alike, distill, environment, metrics, results, wait_for

sys.path.insert(0, str(ROOT / "benchmarks"))

from pretended_hosts import PretendedHosts

NO_HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not set up")
STEPS = 200
# The command itself, which looks for hosts that are back more often.
COMMAND = """
from distill.__main__ import main
from distill.distributed import elastic

elastic.LOOK = 0.1
raise SystemExit(main())
"""


def arguments(shelf: Shelf, folder: Path) -> list[str]:
    sizes = ["train.batch_size=4", "train.rows_per_step=7", "train.epochs=null", f"train.steps={STEPS}"]
    more = [
        TINY,
        "corpus.vocab_size=400",
        "train.save_every=50",
        "train.log_every=1",
        "precision=fp32",
        f"evaluate.every_steps={STEPS}",
    ]
    return ["+recipe=bert_pretrain", *shelf.corpus, *sizes, *more, f"hydra.run.dir={folder}"]


@pytest.fixture(scope="module")
def alone(shelf: Shelf) -> Path:
    folder = shelf.root / "elastic-alone"
    assert distill(*arguments(shelf, folder)) == 0
    return folder


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[PretendedHosts]:
    made = PretendedHosts(tmp_path / "hosts", 2)
    yield made
    made.end()


def start(
    shelf: Shelf, folder: Path, hosts: PretendedHosts, backend: str, *more: str, in_interpreters: bool = False
) -> Any:
    """The command; all processes are forks of others but for `in_interpreters`, see `forked`."""
    ranks = [f"backend={backend}", f"backend.hosts={hosts.setting()}", "backend.elastic=1:2", "backend.device=cpu"]
    given = [*arguments(shelf, folder), *ranks, *more]
    if not in_interpreters:
        return Forked(given, environment() | hosts.environment(), change=partial(fork_agents, hosts.folder))
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *given],
        env=environment() | hosts.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def num_steps(folder: Path) -> int:
    return len(metrics(folder)) if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=[NO_HOROVOD, pytest.mark.slow])])
def test_a_host_is_lost_and_comes_back(
    backend: str, shelf: Shelf, alone: Path, hosts: PretendedHosts, tmp_path: Path
) -> None:
    """With an odd number of rows a step, on two ranks, on one, and on two again."""
    folder, (first, second) = tmp_path / "run", hosts.names
    process = start(shelf, folder, hosts, backend, in_interpreters=backend == "horovod")
    wait_for(lambda: num_steps(folder) > 3, process)
    hosts.kill(second, stays_away=True)
    wait_for(lambda: not hosts.is_at_work(first), process)
    before = num_steps(folder)
    wait_for(lambda: num_steps(folder) > before, process)
    hosts.come_back(second)
    wait_for(lambda: hosts.is_at_work(second), process)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"distill: rank 1 on {second} lost (SIGKILL)" in errors, errors
    assert f"rank 1 on {second} lost (SIGKILL); going on with 1 rank from step {before}\n" in errors, errors
    assert f"{second} joined; going on with 2 ranks from step " in errors and "Traceback" not in errors
    assert [line["step"] for line in metrics(folder)] == list(range(1, STEPS + 1))
    assert_alike(folder, alone)
    assert results(folder)["backend"]["rows_per_step"] == 7


def test_a_signal_ends_it_for_good(shelf: Shelf, hosts: PretendedHosts, tmp_path: Path) -> None:
    """And an error of its own does: a run that is refused is not started again."""
    process = start(shelf, tmp_path / "run", hosts, "ddp")
    wait_for(lambda: num_steps(tmp_path / "run") > 3, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and "lost" not in errors, errors
    assert not any(map(hosts.is_at_work, hosts.names))
    refused = start(shelf, tmp_path / "run", hosts, "ddp", "train.rows_per_step=9")
    _, errors = refused.communicate(timeout=120)
    assert refused.returncode == 2, errors
    assert errors.count("belongs to other settings (train.rows_per_step was 7 and is now 9)") == 1
