"""Engines of torch.distributed that come as plug-ins: a job on one, and what they lack said in one line."""

import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import free_port, run_ranks
from job import ROOT, Shelf, assert_same, command, results

from distill.config.settings import BackendConfig
from distill.distributed import ddp, join_ranks
from distill.distributed.collective import load_collective, parse_collective, try_out
from distill.runtime.errors import SettingError

CPU = torch.device("cpu")
DDP = BackendConfig(name="ddp", device="cpu", threads=1, timeout=60.0)
# What the trial of each engine in `plug_in` has to say.
LACKING = {
    "no_int64": "cannot sum int64 on cpu, which a run needs: no_int64: unsupported data type Long; leave it null",
    "no_uint8": "cannot broadcast uint8 on cpu, which a run needs: no_uint8: unsupported data type Byte; leave it null",
    "mean": "cannot sum float32 on cpu, which a run needs: the result is wrong; leave it null",
    "broken": "does not start: broken: there is no such network card; leave it null",
    "silent": "cannot sum float32 on cpu, which a run needs: no answer in 4 s; leave it null",
}


def meet(folder: Path, engine: str) -> None:
    """Wait until both ranks have come here with this engine."""
    (folder / f"{engine}-{os.environ['RANK']}").touch()
    until = time.monotonic() + 60
    while len(list(folder.glob(f"{engine}-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.01)


def refusals(ports: list[int], folder: Path) -> dict[str, str]:
    """On one rank: what a run on each of these engines says."""
    said = {}
    for engine, port in zip(LACKING, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        if engine == "silent":
            # Of the trial alone: on a busy machine the ranks may be further apart than this when they start.
            ddp.try_out = partial(with_limit, ddp.try_out, 4.0)
        try:
            join_ranks(DDP.changed(collective=f"plug_in:{engine}"))
        except SettingError as error:
            said[engine] = str(error)
            # The store is rank 0's and goes with this error; the other rank may not yet have seen that both are there.
            meet(folder, engine)
        if dist.is_initialized():
            dist.destroy_process_group()
    return said


def with_limit(trial: Callable[..., None], limit: float, *arguments: Any) -> None:
    """The trial of an engine with another limit of time than the run's, its last argument."""
    trial(*arguments[:-1], limit)


@pytest.mark.slow
def test_what_an_engine_lacks_is_said_in_one_line_and_is_no_endless_wait(tmp_path: Path) -> None:
    for said in run_ranks(2, tmp_path, refusals, [free_port() for _ in LACKING], tmp_path):
        assert said == {engine: f"backend.collective=plug_in:{engine} {why}" for engine, why in LACKING.items()}


def passes(wire: list[torch.dtype]) -> str:
    """The trial with further formats passes on Gloo, whatever the number of ranks; gives the engine's words."""
    with join_ranks(DDP.changed(collective="gloo")) as ranks:
        try_out("gloo", ranks.rank, CPU, wire, 60.0)
        return ranks.engine


def test_the_trial_passes_where_all_is_right(tmp_path: Path) -> None:
    engines = run_ranks(3, tmp_path, passes, [torch.bfloat16, torch.float16])
    assert engines == ["torch.distributed on gloo"] * 3


@pytest.mark.slow
def test_a_job_of_two_ranks_sends_all_through_the_plug_in(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The student is bitwise that of Gloo, and the plug-in was handed each element of the gradients at each step."""
    ranks = ["backend=ddp", "backend.processes=2", "train.accumulate=1"]
    monkeypatch.setenv("PLUG_IN_LOG", str(tmp_path))
    for folder, more in {"gloo": [], "plug-in": ["backend.collective=plug_in:counting"]}.items():
        arguments = shelf.arguments(tmp_path / folder, *ranks, *more)
        process = command(*arguments, path=ROOT / "tests")
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    assert_same(tmp_path / "gloo", tmp_path / "plug-in")
    block = results(tmp_path / "plug-in")["backend"]
    assert block["collective"] == "plug_in:counting" and "counting" in block["rings"]["engine"]
    assert results(tmp_path / "gloo")["backend"]["collective"] is None
    reports = [(tmp_path / folder / "report.md").read_text() for folder in ("gloo", "plug-in")]
    assert "plug_in:counting" not in reports[0] and "Collective" in reports[1] and "plug_in:counting" in reports[1]
    parameters = results(tmp_path / "plug-in")["student"]["parameters"]
    calls = [Counter((tmp_path / f"{rank}.log").read_text().splitlines()) for rank in range(2)]
    assert calls[0] == calls[1]
    sums = [call.split()[1:] for call in calls[0].elements() if call.startswith("allreduce")]
    large = [int(count) for dtype, count in sums if dtype == "torch.float32" and int(count) >= parameters]
    assert len(large) == block["syncs"] > 0
    assert {dtype for dtype, _ in sums} >= {"torch.float32", "torch.float64", "torch.int64"}


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("ucc", (None, "ucc")),
        (
            "smdistributed.dataparallel.torch.torch_smddp:smddp",
            ("smdistributed.dataparallel.torch.torch_smddp", "smddp"),
        ),
        ("package:NAME", ("package", "name")),
    ],
)
def test_the_name_of_an_engine(text: str, meaning: tuple[str | None, str]) -> None:
    assert parse_collective(text) == meaning


@pytest.mark.parametrize("text", ["", ":smddp", "package:", "cpu:gloo,cuda:nccl", "../plug_in:counting", "a b"])
def test_what_names_no_engine(text: str) -> None:
    with pytest.raises(SettingError, match=r"NAME, or MODULE:NAME"):
        parse_collective(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("smddp", ["no process-group backend smddp", "gloo", "as in MODULE:smddp"]),
        ("undefined", ["no process-group backend undefined"]),
        ("no_such_package.part:smddp", ["no_such_package.part does not load", "No module named"]),
        ("json:smddp", ["no process-group backend smddp", "import another module"]),
        ("plug_in:for_gpus", ["for_gpus serves cuda", "the run is on cpu", "backend.device"]),
    ],
)
def test_an_engine_that_is_not_there(text: str, words: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        load_collective(text, CPU)
    message = str(caught.value)
    assert message.startswith(f"backend.collective={text}") and "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BackendConfig(collective="gloo"), ["backend.collective=gloo", "backend.name=single", "backend=ddp"]),
        (BackendConfig(name="horovod", collective="gloo"), ["backend.name=horovod", "leave it null"]),
        (BackendConfig(name="ddp", collective="gloo", rings="4"), ["backend.rings=4", "leave it at 1"]),
        (BackendConfig(name="ddp", collective="a:b:c"), ["backend.collective=a:b:c"]),
    ],
)
def test_settings_that_do_not_go_with_a_plug_in(settings: BackendConfig, words: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        join_ranks(settings)
    assert all(word in str(caught.value) for word in words), caught.value
