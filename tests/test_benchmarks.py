"""The benchmark scripts run, at sizes that say nothing about speed.

Whole scripts, which start interpreters and ranks, are among the slow tests; what they are made of is not.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from forked import Forked
from job import ROOT, library
from tiny import loop

from distill.config.settings import PrecisionConfig

FOLDER = ROOT / "benchmarks"
HAS_HOROVOD = importlib.util.find_spec("horovod") is not None
ENGINES = "ddp,horovod" if HAS_HOROVOD else "ddp"


def script(name: str, tmp_path: Path, *arguments: str) -> tuple[str, Any]:
    """What a script prints, and the results it writes."""
    arguments = (*arguments, "--json", str(tmp_path / "results.json"))
    done = Forked(list(arguments), dict(os.environ), script=FOLDER / name)
    output, errors = done.communicate(timeout=500)
    assert done.returncode == 0, errors[-2000:]
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["machine"]["torch"]
    return output, content["results"]


@pytest.mark.slow
def test_prepare(tmp_path: Path) -> None:
    books = library(tmp_path / "books", 3)
    sizes = ("--shard-mb", "0.01", "--turns", "1")
    printed, results = script("data/prepare.py", tmp_path, "--data", str(books), *sizes)
    tokens = {run["tokens"] for runs in results["rates"].values() for run in runs}
    assert len(tokens) == 1 and min(tokens) > 1000 and len(results["rates"]) == 3
    assert "| 2 hosts |" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "measured"),
    [
        ("sync", {"none", "distill window", "distill every", "wrapper window", "wrapper every"}),
        ("rings", {"1", "2", "4", "8", "2 bf16"}),
    ],
)
def test_exchange(what: str, measured: set[str], tmp_path: Path) -> None:
    sizes = (
        "--width",
        "64",
        "--layers",
        "1",
        "--tokens",
        "8",
        "--accumulate",
        "2",
        "--megabytes",
        "1",
        "--rounds",
        "1",
    )
    _, results = script("scaling/exchange.py", tmp_path, what, *sizes, "--engines", ENGINES)
    for one in results["measured"]:
        assert set(one["medians"]) >= measured


@pytest.mark.slow
def test_a_late_share_holds_once_all_ranks_are_ready() -> None:
    cluster = import_module("benchmarks.scaling.cluster")
    code = """
import sys, time
sys.path.insert(0, sys.argv[1])
from benchmarks.scaling.cluster import ready
def share():
    began, own = time.perf_counter(), time.process_time()
    while time.process_time() - own < 0.2: pass
    return 0.2 / (time.perf_counter() - began)
early = max(share() for _ in range(5))
ready()
print(early, share())
"""
    try:
        with cluster.Cluster(2, share=0.1, late=True, limit=120) as two:
            early, late = map(float, two.run([sys.executable, "-c", code, str(ROOT)]).split())
    except RuntimeError as error:
        if "no share of a core" not in str(error):
            raise
        pytest.skip(str(error))
    assert late < 0.12 and early > 2 * late


@pytest.mark.slow
def test_emulated_hosts_are_slow_and_leave_nothing_behind() -> None:
    cluster = import_module("benchmarks.scaling.cluster")
    if (reason := cluster.why_not()) is not None:
        pytest.skip(f"no emulated hosts: {reason}")
    code = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(500_000)
dist.all_reduce(x)
began = time.perf_counter(); dist.all_reduce(x); taken = time.perf_counter() - began
if dist.get_rank() == 0: print(taken, float(x[0]))
dist.barrier(); os._exit(0)
"""
    with cluster.Cluster(2, cluster.Network(100, 500), share=0.5, limit=120) as two:
        names = [two._name(rank) for rank in range(2)]
        seconds, value = map(float, two.run([sys.executable, "-c", code]).split())
    assert value == 4 and seconds >= 2e6 * 8 / 100e6  # 2 MB cross each link once in each direction
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert not any(name in left for name in names)


def test_a_rank_that_fails_ends_the_others() -> None:
    cluster = import_module("benchmarks.scaling.cluster")
    code = "import os, sys, time; sys.exit('no luck') if os.environ['RANK'] == '1' else time.sleep(60)"
    with cluster.Cluster(2) as two, pytest.raises(RuntimeError, match="rank 1 ended with status 1: no luck"):
        two.run([sys.executable, "-c", code])


@pytest.mark.parametrize(("shape", "rows"), [("tiny", "all"), ("tiny", "masked"), ("gpt2-tiny", "targets")])
def test_the_plain_step_has_the_loss_and_gradient_of_the_objective(shape: Any, rows: str) -> None:
    step, cpu = import_module("benchmarks.step.step"), torch.device("cpu")
    shape = step.SHAPES[shape]
    teacher, student = step.make_teacher(shape, cpu), step.make_student(shape, cpu).eval()
    (batch,) = step.batches(shape, 1, 1).window(0)
    objective = tiny.make_objective(step.settings(rows, shape.task), student, teacher, vocab=shape.vocabulary)
    found = []
    for loss in (
        import_module("benchmarks.step.plain").plain_loss(
            student, teacher, batch, step.Variant("plain", rows, PrecisionConfig())
        ),
        tiny.loss_of(objective, student, teacher, [batch])[0],
    ):
        student.zero_grad()
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)


def test_rows_of_the_causal_pair_hold_several_documents() -> None:
    step = import_module("benchmarks.step.step")
    shape = step.SHAPES["gpt2-tiny"]
    for batch in step.batches(shape, 2, 1).window(0):
        starts = batch.inputs["position_ids"] == 0
        assert (starts.sum(1) == shape.documents).all() and starts[:, 0].all()
        assert len(batch.targets.positions) == shape.rows * (shape.tokens - shape.documents)


def test_what_is_timed_is_the_loop_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark with a loop of its own would go on to time what a run no longer does."""
    step, cpu = import_module("benchmarks.step.step"), torch.device("cpu")
    windows, ended = [], []
    inner = loop.step

    def counted(training, window, *rest):
        windows.append(len(window.batches))
        return inner(training, window, *rest)

    monkeypatch.setattr(loop, "step", counted)
    shape, variant = step.SHAPES["tiny"], step.Variant("distill, eager objective", "all", PrecisionConfig())
    pair = step.make_teacher(shape, cpu), step.make_student(shape, cpu)
    step.train_with_distill(step.batches(shape, 3, 2), pair, variant, 1, lambda: ended.append(True))
    assert windows == [3, 3] and len(ended) == 2


@pytest.mark.slow
def test_step(tmp_path: Path) -> None:
    only = ("--only", "fp32|distill bf16$", "--accumulate", "2")
    printed, results = script("step/step.py", tmp_path, "--shapes", "tiny", "--rows", "masked", *only)
    assert [result["variant"] for result in results] == ["plain fp32", "distill fp32", "distill bf16"]
    assert all(len(result["all"]) == 3 and result["peak"] > 2**20 for result in results)
    assert printed.count("tiny") == 0 and printed.count("2x64 -> 1x64, V 500, 2 x 16, masked rows") == 3


@pytest.mark.slow
def test_step_of_a_causal_pair(tmp_path: Path) -> None:
    only = ("--only", "plain|distill bf16$", "--rounds", "1", "--accumulate", "2")
    printed, results = script("step/step.py", tmp_path, "--shapes", "gpt2-tiny", *only)
    names = ["plain fp32", "plain bf16", "distill bf16"]
    assert [result["variant"] for result in results] == names
    assert printed.count("GPT-2 2x64 -> 1x64, V 500, 2 x 16 of 3 documents, targets rows") == 3


@pytest.mark.slow
def test_the_distilbert_benchmark(tmp_path: Path) -> None:
    small = ("--loopback", "--rows", "192", "--epochs", "1", "--sets", "heldout", "--folder", str(tmp_path / "runs"))
    printed, results = script(
        "scaling/distilbert_benchmark.py", tmp_path, *small, "--figure", str(tmp_path / "gain.png")
    )
    losses = [row["result"]["history"][0]["loss"]["total"] for row in results]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
    assert printed.count("| row |") == 4
    assert (tmp_path / "gain.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def gpu_rows(tmp_path: Path) -> Callable[..., dict[str, dict[str, Any]]]:
    """Run a part of `gpu.py` on the CPU; what it writes, by the name of a row."""

    def rows(part: str, **arguments: Any) -> dict[str, dict[str, Any]]:
        out, main = tmp_path / "rows.jsonl", import_module("benchmarks.gpu").main
        status = main(["--device", "cpu", "--only", part, "--out", str(out), "--times", "10"], **arguments)
        written = {row["what"]: row for row in map(json.loads, out.read_text().splitlines())}
        assert status == int(written["ended"]["status"] != 0)
        return written

    return rows


def test_the_ceilings_and_the_objective_of_a_gpu(tmp_path: Path) -> None:
    for part in ("ceilings", "objective"):
        options = ["--device", "cpu", "--out", str(tmp_path / "rows"), "--scratch", str(tmp_path), "--seconds", "60"]
        import_module("benchmarks.gpu_parts").main([part, *options])
    rows = {row["what"]: row for row in map(json.loads, (tmp_path / "rows").read_text().splitlines())}
    assert torch.__version__.startswith(rows["versions"]["torch"])  # which may name its build, as +cu130
    assert rows["matrix product, fp32"]["tflops"] > 0 and rows["memory"]["gb_per_second"] > 0
    assert rows["floor"]["seconds"] > 0 and rows["plain"]["seconds"] > 0
    assert max(rows["chunked"]["differs"].values()) < 1e-4 and rows["chunked"]["of_roofline"] > 0


def test_a_part_of_the_gpu_script_that_takes_too_long(gpu_rows: Callable[..., Any]) -> None:
    part = import_module("benchmarks.gpu").Part
    rows = gpu_rows("steps", parts=(part("steps", 0.02),))
    assert rows["ended"]["status"] == "took too long" and rows["ended"]["seconds"] < 120


def test_a_row_of_the_gpu_script_keeps_what_it_has_where_it_fails(tmp_path: Path) -> None:
    parts = import_module("benchmarks.gpu_parts")
    options = argparse.Namespace(
        part="steps", device="cpu", out=tmp_path / "rows", scratch=tmp_path, seconds=9.0, times=1.0
    )
    part = parts.Part(options)
    with part.case("fails", 5) as row:
        row["seconds"] = 1.23456789
        raise ValueError("no luck")
    with part.case("late", 0.05) as row:
        row["seconds"] = 2.0
        time.sleep(60)
    fails, late = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert fails["seconds"] == 1.2346 and fails["error"] == "ValueError: no luck" and fails["where"]
    assert late["seconds"] == 2 and "0 s" in late["error"] and late["took"] < 40


def test_steps_of_a_gpu_script_count_where_a_gpu_would_be_waited_for() -> None:
    pairs, waited = import_module("benchmarks.gpu_pairs"), torch.ones(3)
    with pairs.Waits(torch.device("cpu")) as waits:
        waited.sum().item()
        waited.add(1)
    ((place, count),) = waits.places.items()
    assert count == 1 and "tests/test_benchmarks.py:" in place


@pytest.mark.slow
def test_all_gpu_checks_in_small(gpu_rows: Callable[..., Any]) -> None:
    steps = gpu_rows("steps")
    distilled = [row for what, row in steps.items() if what.endswith("distill")]
    assert len(distilled) == 2 and all(row["waits"] > 0 and row["tokens_per_second"] > 0 for row in distilled)
    tests = gpu_rows("tests")
    assert tests["sum"]["outcome"].startswith("6 passed")
    runs = gpu_rows("runs")
    assert all(runs[name]["status"] == 0 for name in ("single", "fsdp, one rank", "predict", "evaluate", "resumed"))
    assert runs["killed"]["status"] == -9 and runs["resumed and not killed"]["same_bits"]
