"""The benchmark scripts run, at sizes that say nothing about speed; the cost model gives what was published."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from distill import train as loop
from distill.config import PrecisionConfig

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
HAS_HOROVOD = importlib.util.find_spec("horovod") is not None
ENGINES = "ddp,horovod" if HAS_HOROVOD else "ddp"

sys.path.insert(0, str(FOLDER))


def script(name: str, tmp_path: Path, *arguments: str) -> tuple[str, Any]:
    """What a script prints, and the results it writes."""
    command = [sys.executable, str(FOLDER / name), *arguments, "--json", str(tmp_path / "results.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["machine"]["torch"]
    return done.stdout, content["results"]


def test_sync(tmp_path: Path) -> None:
    sizes = ("--width", "64", "--layers", "1", "--tokens", "8", "--accumulate", "2", "--rounds", "1")
    _, results = script("sync.py", tmp_path, *sizes, "--engines", ENGINES)
    for measured in results["measured"]:
        assert set(measured["medians"]) >= {
            "none",
            "distill window",
            "distill every",
            "wrapper window",
            "wrapper every",
        }


def test_optimizers(tmp_path: Path) -> None:
    printed, (result,) = script("optimizers.py", tmp_path, "--models", "tiny", "--rounds", "2", "--device", "cpu")
    assert (
        result["ratio"] == pytest.approx(result["seconds"]["lamb"] / result["seconds"]["adamw"]) and "tiny" in printed
    )
    assert all(len(taken) == 2 for taken in result["all"].values())


def test_loader_workers(tmp_path: Path) -> None:
    sizes = ("--rows", "4", "--length", "32", "--megabytes", "1", "--step", "2", "--seconds", "0.5", "--warm-up", "0.5")
    printed, results = script("loader_workers.py", tmp_path, "--workers", "0", "8", "--latency", "0", "5", *sizes)
    assert [(each["storage"], each["workers"]) for each in results] == [
        (storage, workers) for storage in ("0 ms", "5 ms") for workers in (0, 8, "auto")
    ]
    none, eight, auto = (each["batches_per_second"] for each in results[3:])
    assert none < 1 / (4 * 0.005 + 0.002) and min(eight, auto) > 1.5 * none and "| 5 ms | auto |" in printed


def test_rings(tmp_path: Path) -> None:
    _, results = script("rings.py", tmp_path, "--engines", ENGINES, "--megabytes", "1", "--rounds", "1", "--autos", "1")
    for measured in results:
        assert {"1", "2", "4", "8", "2 bf16"} <= set(measured["seconds"])
        assert measured["auto"][0]["rings"] in (1, 2, 4)


def test_scaling_and_its_model() -> None:
    scaling = __import__("scaling")
    projected = {case: (float(model), published) for case, model, published in scaling.projection()}
    assert projected["8 nodes, Horovod"][0] == pytest.approx(37, rel=0.02)
    assert projected["8 nodes, Horovod, multi-ring"][0] == pytest.approx(32, rel=0.08)
    exact = scaling.Model(compute=0.5, latency=0.001, transfer=0.8)
    results = [
        {"size": size, "accumulate": many, "seconds": exact.step(size, many)} for size in (1, 2, 4) for many in (1, 50)
    ]
    found = scaling.fit(results, latency=0.001)
    assert (found.compute, found.transfer) == (pytest.approx(0.5), pytest.approx(0.8))
    assert found.efficiency(4, 50) > found.efficiency(4, 1)


def test_emulated_hosts_are_slow_and_leave_nothing_behind() -> None:
    cluster = __import__("cluster")
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
    cluster = __import__("cluster")
    code = "import os, sys, time; sys.exit('no luck') if os.environ['RANK'] == '1' else time.sleep(60)"
    with cluster.Cluster(2) as two, pytest.raises(RuntimeError, match="rank 1 ended with status 1: no luck"):
        two.run([sys.executable, "-c", code])


@pytest.mark.parametrize(("shape", "rows"), [("tiny", "all"), ("tiny", "masked"), ("gpt2-tiny", "targets")])
def test_the_plain_step_has_the_loss_and_gradient_of_the_objective(shape: Any, rows: str) -> None:
    step, cpu = __import__("step"), torch.device("cpu")
    shape = step.SHAPES[shape]
    teacher, student = step.make_teacher(shape, cpu), step.make_student(shape, cpu).eval()
    (batch,) = step.batches(shape, 1, 1).window(0)
    objective = tiny.make_objective(step.settings(rows, shape.task), student, teacher, vocab=shape.vocabulary)
    found = []
    for loss in (
        __import__("plain_step").plain_loss(student, teacher, batch, step.Variant("plain", rows, PrecisionConfig())),
        tiny.loss_of(objective, student, teacher, [batch])[0],
    ):
        student.zero_grad()
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)


def test_rows_of_the_causal_pair_hold_several_documents() -> None:
    step = __import__("step")
    shape = step.SHAPES["gpt2-tiny"]
    for batch in step.batches(shape, 2, 1).window(0):
        starts = batch.inputs["position_ids"] == 0
        assert (starts.sum(1) == shape.documents).all() and starts[:, 0].all()
        assert len(batch.targets.positions) == shape.rows * (shape.tokens - shape.documents)


def test_what_is_timed_is_the_loop_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark with a loop of its own would go on to time what a run no longer does."""
    step, cpu = __import__("step"), torch.device("cpu")
    windows, ended = [], []
    inner = loop.accumulate_gradients

    def counted(model, teacher, objective, window, *rest):
        windows.append(len(window))
        return inner(model, teacher, objective, window, *rest)

    monkeypatch.setattr(loop, "accumulate_gradients", counted)
    shape, variant = step.SHAPES["tiny"], step.Variant("distill, eager objective", "all", PrecisionConfig())
    pair = step.make_teacher(shape, cpu), step.make_student(shape, cpu)
    step.train_with_distill(step.batches(shape, 3, 2), pair, variant, 1, lambda: ended.append(True))
    assert windows == [3, 3] and len(ended) == 2


def test_step(tmp_path: Path) -> None:
    printed, results = script(
        "step.py", tmp_path, "--shapes", "tiny", "--rows", "masked", "--only", "fp32|distill bf16$"
    )
    assert [result["variant"] for result in results] == ["plain fp32", "distill fp32", "distill bf16"]
    assert all(len(result["all"]) == 3 and result["peak"] > 2**20 for result in results)
    assert printed.count("tiny") == 0 and printed.count("2x64 -> 1x64, V 500, 2 x 16, masked rows") == 3


def test_step_of_a_causal_pair(tmp_path: Path) -> None:
    only = ("--only", "plain|distill bf16$|int8", "--rounds", "1", "--accumulate", "2")
    printed, results = script("step.py", tmp_path, "--shapes", "gpt2-tiny", *only)
    names = ["plain fp32", "plain bf16", "distill bf16", "distill bf16, int8 teacher"]
    assert [result["variant"] for result in results] == names
    assert printed.count("GPT-2 2x64 -> 1x64, V 500, 2 x 16 of 3 documents, targets rows") == 4


@pytest.mark.slow
def test_precision_ladder(tmp_path: Path) -> None:
    small = ("--size", "tiny", "--rows", "2", "--tokens", "16", "--rounds", "1", "--formats", "bf16,fp16")
    printed, results = script("precision_ladder.py", tmp_path, *small)
    assert len(results) == 9 and results[0]["rung"] == "fp32" and printed.count("fp16") == 4
    assert all(result["seconds"] > 0 and result["peak"] > 2**20 for result in results)


@pytest.mark.parametrize("shape", ["tiny", "gpt2-tiny"])
def test_profile(shape: str, tmp_path: Path) -> None:
    _, results = script("profile_step.py", tmp_path, "--shape", shape, "--accumulate", "2")
    assert sum(results["phases"].values()) == pytest.approx(2 * results["seconds"], rel=1e-3)
    # Operators are the most of a step, but not all of it: at this size Python's own time counts.
    assert results["seconds"] < sum(results["kernels"].values()) < 2.2 * results["seconds"]
    assert results["phases"]["backward"] > 0 and results["kernels"]["matrix products"] > 0


@pytest.mark.slow
def test_the_distilbert_benchmark(tmp_path: Path) -> None:
    small = ("--loopback", "--rows", "192", "--epochs", "1", "--sets", "heldout", "--folder", str(tmp_path / "runs"))
    printed, results = script("distilbert_benchmark.py", tmp_path, *small, "--figure", str(tmp_path / "gain.png"))
    losses = [row["result"]["history"][0]["loss"]["total"] for row in results]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
    assert printed.count("| row |") == 4
    assert (tmp_path / "gain.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_all_gpu_checks_in_small(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "gpu.py"), "--device", "cpu", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert [line.split("|")[2].strip() for line in done.stdout.splitlines()[-2:]] == ["done", "done"]
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and "is not empty" in again.stderr
