"""Start several ranks on this machine for a test, the way a launcher would, and collect what each of them gives."""

import multiprocessing
import multiprocessing.forkserver
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

START_LIMIT = 120  # seconds
# What nearly every rank and run imports: a server that has them forks processes, which would spend seconds on them.
PRELOADED = ["torch.distributed.fsdp", "distill.distributed.ddp", "distill.distributed.fsdp", "distill.job"]
PRELOADED += ["tiny", "forked", "distill.report.figures", "matplotlib.figure", "matplotlib.backends.backend_agg"]
PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "distilbert", "albert", "gpt2")]
PRELOADED += ["distill.tasks.mlm_sop", "distill.tasks.clm", "distill.tasks.classes", "distill.evaluation.labelled"]
PRELOADED += ["distill.evaluation.pseudo_perplexity", "hydra.main", "hydra._internal.hydra"]
TESTS = Path(__file__).resolve().parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOADED)


def start_server() -> None:
    """Start the server that ranks and runs are forked from, unless it is there.

    Its environment is what libraries read as they are imported. Each process gets that of its own afterwards.
    """
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = f"{TESTS.parent}{os.pathsep}{TESTS}"
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` in `size` processes that are ranks of one run; their results by rank.

    The function has to be importable. Raises AssertionError with the traceback of a rank that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    start_server()
    # The server has the environment that there was when it started, so each rank is given today's.
    places = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [{**os.environ, **places, "RANK": rank, "LOCAL_RANK": rank} for rank in range(size)]
    ranks = [FORKS.Process(target=_rank, args=(folder, each, function, arguments)) for each in environments]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(START_LIMIT)
    late = [rank for rank in ranks if rank.is_alive()]
    for rank in late:
        rank.kill()
    errors = [path.read_text() for path in folder.glob("*.error")]
    assert not errors and not late, "\n".join([f"{len(late)} ranks hung", *errors])
    assert all(rank.exitcode == 0 for rank in ranks), [rank.exitcode for rank in ranks]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(folder: Path, environment: dict[str, Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    rank = environment["RANK"]
    os.environ.clear()
    os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        torch.save(function(*arguments), folder / f"{rank}.pt")
        # As `launch.leave` does: a test may end without closing, and then the library's threads abort a normal end.
        os._exit(0)
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
