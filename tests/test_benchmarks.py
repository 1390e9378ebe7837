"""The benchmarks count right, time what a run does, and run, at sizes that say nothing about speed."""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from forked import Forked
from job import ROOT, composed, library, save_model
from tiny import loop
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import cluster, gpu, gpu_parts
from benchmarks.acceptance import accepted
from benchmarks.common import Results
from benchmarks.headline import ROWS, Line
from benchmarks.step.beside_peers import faster_by
from benchmarks.step.models import SHAPES, Work, batches, make_student, make_teacher, operations, pair_operations
from benchmarks.step.training import Variant, objective_of, plain_loss, train_variant
from benchmarks.sums import save_tokenizer
from benchmarks.time_to_quality import Course, contestants, reached
from distill.config.settings import PrecisionConfig
from distill.models.loaded import load_model
from distill.runs.check import check

ENGINES = "ddp,horovod" if find_spec("horovod") else "ddp"
CPU = torch.device("cpu")


def run(name: str, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows of a script, which it has printed as well."""
    script, out = ROOT / "benchmarks" / name, tmp_path / "results.json"
    done = Forked([*arguments, "--out", str(out)], dict(os.environ), script=script)
    output, errors = done.communicate(timeout=500)
    assert done.returncode == 0, errors[-2000:]
    content = json.loads(out.read_text())
    assert content["machine"]["torch"] and name in content["command"]
    assert f"{len(content['rows'])} rows in {out}" in output and output.count("\n") >= len(content["rows"]) + 2
    return content["rows"]


# A script, its arguments, and what a column of its rows has.
EXCHANGE = f"--width 64 --layers 1 --tokens 8 --accumulate 2 --megabytes 1 --rounds 1 --engines {ENGINES}"
SYNC = {"none", "distill window", "distill every", "wrapper window"}
STEPS = "--shapes tiny,gpt2-tiny --accumulate 2 --rounds 1 --rows masked --only"
PERPLEXITY = "perplexity --cases bundled-teacher --rows 1 --length 32 --rounds 1"
PEERS = "peers --teacher TEACHER --layers 0,2 --sequences 20 --length 16 --batch 2 --formats fp32 --quality 0.01"
OF_PEERS = {"distill fp32", "compiled fp32", "teacher", "student before training"}
SUMS = "--seeds 1 --teacher-steps 6 --steps 6 --minutes 0.01 --work RUNS"
SMALL = [
    ("exchange.py", f"sync {EXCHANGE}", "sync", SYNC),
    ("exchange.py", f"rings {EXCHANGE} --rings 1,2", "rings", {"1", "2", "2 bf16"}),
    ("data.py", "prepare --data BOOKS --shard-mb 0.01 --turns 1", "way", {"1 process", "2 processes", "2 hosts"}),
    ("data.py", "load --seconds 0.02 --tokens 524288 --workers 0 1", "workers", {0, 1}),
    ("step/__main__.py", f"plain {STEPS} fp32", "step", {"plain fp32", "distill fp32"}),
    ("step/__main__.py", "objective --shapes 32x200x16x16 --rounds 1", "path", {"plain", "fused", "compiled"}),
    ("step/__main__.py", PERPLEXITY, "path", {"plain", "distill", "distill bf16"}),
    ("step/__main__.py", PEERS, "step", OF_PEERS),
    ("step/__main__.py", f"{PEERS} --on-policy", "step", OF_PEERS),
    ("sums.py", f"{SUMS} sequence-level on-policy", "way", {"teacher", "start", "sequence-level", "on-policy"}),
    ("headline.py", "time --work RUNS --quick --turns 1", "recipe", {None, "example", "distill"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "arguments", "column", "values"), SMALL, ids=[each[1] for each in SMALL])
def test_a_script_in_small(script: str, arguments: str, column: str, values: set[Any], tmp_path: Path) -> None:
    places = {"BOOKS": library(tmp_path / "books", 3), "RUNS": tmp_path / "runs"}
    places["TEACHER"] = save_model(tmp_path / "teacher", "llama", 3)
    rows = run(script, tmp_path, *[str(places.get(word, word)) for word in arguments.split()])
    assert {row.get(column) for row in rows} - {"minicons"} == values


def test_answers_to_sums_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Without a decoder the digits come back with blanks between them, and no answer is right."""
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path))
    assert tokenizer.decode(tokenizer("399+759=8511").input_ids) == "399+759=8511"


def test_the_gap_that_a_teacher_closes_and_its_interval() -> None:
    """From 40 to 10, 20 is half of the way by the logarithm; by accuracy the mean of three seeds has its interval."""
    line = Line("layers", "heldout", "perplexity", 0.5, 2.0, [10.0], [40.0], [20.0], [1.5])
    assert line.closed() == pytest.approx([0.5]) and "plus_minus" not in line.values()
    scores = [[90.0] * 3, [80.0] * 3, [84.0, 85.0, 86.0]]
    values = Line("task", "dev", "accuracy", 0.5, 0.0, *scores, [1.0, 2.0, 3.0]).values()
    assert values["closed_by_seed"] == pytest.approx([0.4, 0.5, 0.6]) and values["minutes"] == 2
    assert values["plus_minus"] == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    no_gap = Line("layers", "heldout", "perplexity", 0.5, 2.0, [40.0], [39.0], [40.7], [1.0])
    assert no_gap.closed() == [] and "gap_closed" not in no_gap.values()


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_headline_have_settings_that_hold(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    for settings in (row.student, row.baseline):
        both = row.both.replace("TEACHER", str(tmp_path))
        check(composed(f"+recipe={row.recipe}", "seed=1", *both.split(), *settings.split()))


@pytest.mark.slow
def test_a_row_of_the_headline_is_resumed_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    settings = ["corpus.max_sequences=32", "corpus.sequence_length=32", "evaluate.max_sequences=8", "backend.threads=1"]
    command = ["headline.py", tmp_path, "rows", "small", "--seeds", "1", "--work", str(tmp_path / "runs"), *settings]
    (line,) = run(*command)
    assert line["teacher"] < line["student"] < line["baseline"] and 0 < line["gap_closed"] < 1
    assert run(*command, "--seeds", "2", "--minutes", "0") == [line]
    rates = run(*command, "--rates", "1e-3,2e-3")
    assert [each["rate"] for each in rates] == ["1e-3", "2e-3"] and rates[0]["baseline"] != rates[1]["baseline"]
    assert len([path for path in (tmp_path / "runs").iterdir() if path.is_dir()]) == 6


def test_the_best_tuned_example_is_named_with_its_time_to_each_target() -> None:
    course = Course([100, 200, 400], [80.0, 40.0, 35.0], 30.0)
    assert course.rows_to(90) == 100 and course.rows_to(40) == pytest.approx(200) and course.rows_to(34.9) is None
    assert course.rows_to(80 / math.sqrt(2)) == pytest.approx(150)  # half of the way by the logarithm
    example, *tuned, own = contestants("masked", 5000)
    assert (example.updates, example.rows, own.updates, own.rows) == (1000, 50, 625, 8)
    assert len({each.settings for each in tuned}) == 4 and all(each.plain for each in [example, *tuned])

    def courses(*values: float) -> list[Course]:
        return [Course([100, 200, 300], list(values), 40.0)]

    found = {"example": courses(90, 80, 70) + courses(90, 79, 69), "example, tuned 0": courses(60, 55, 51)}
    found |= {"example, tuned 1": courses(60, 52, 47), "distill": courses(60, 45, 43)}
    lines = reached("masked", found, {"plain": [0.02], "distill": [0.01]})
    by_name = {(line["until"], line["recipe"]): line for line in lines}
    assert by_name["the end of example", "example"]["seconds"] == pytest.approx(5.894, rel=1e-3)
    assert by_name["the end of example", "distill"]["rows"] == 100
    assert "rows" not in by_name["1.1 x the teacher", "example"]
    assert not any("tuned 0" in line["recipe"] for line in lines)


def test_what_a_teacher_accepts_of_a_draft(tmp_path: Path) -> None:
    """All of its own tokens; of another model's at each token the sum of the smaller probabilities."""
    teacher, draft = (load_model(save_model(tmp_path / f"{n}", "llama", n), "cpu") for n in (1, 2))
    texts = [{"prompt": "the cat", "completion": " and the end"}, {"prompt": "an end", "completion": " of it"}]
    assert accepted(teacher, teacher, texts) == pytest.approx([100.0, 100.0])
    ids = [teacher.tokenizer(texts[1][part]).input_ids for part in ("prompt", "completion")]
    read = torch.tensor([[*ids[0], *ids[1]]])
    with torch.no_grad():
        p, q = (one.model(input_ids=read).logits[0].softmax(-1) for one in (teacher, draft))
    expected = [float(p[at].minimum(q[at]).sum()) for at in range(len(ids[0]) - 1, read.shape[1] - 1)]
    found = accepted(teacher, draft, texts)
    assert found[1] == pytest.approx(100 * sum(expected) / len(expected)) and max(found) < 99


def test_a_peer_is_compared_in_turns() -> None:
    assert faster_by([1.0, 2.0, 4.0], [2.0, 8.0, 4.0]) == {"faster": 2.0, "least": 1.0, "most": 4.0}


def test_operations_of_a_causal_pair() -> None:
    """As many as the formula has: 2 for each weight and token, three times where it is trained."""
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
    teacher, student = (
        LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=layers, tie_word_embeddings=True, **sizes))
        for layers in (3, 2)
    )
    weights, work = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 40, Work(tokens=16, seen=4, head_tokens=14)
    a_layer, head = 2 * 16 * weights + 4 * 16 * 4 * 16, 2 * 14 * 16 * 50
    assert operations(teacher, work) == 3 * a_layer + head
    assert pair_operations(teacher, student, work) == (3 + 3 * 2) * a_layer + (1 + 3) * head


@pytest.mark.parametrize(("name", "rows"), [("tiny", "all"), ("tiny", "masked"), ("gpt2-tiny", "targets")])
def test_the_plain_step_has_the_loss_and_gradient_of_the_objective(name: str, rows: str) -> None:
    shape = SHAPES[name]
    teacher, student = make_teacher(shape, CPU), make_student(shape, CPU).eval()
    (batch,) = batches(shape, 1, 1).window(0)
    objective = tiny.make_objective(objective_of(rows, shape.task), student, teacher, vocab=shape.vocabulary)
    found = []
    for loss in (
        plain_loss(student, teacher, batch, Variant("plain", rows, PrecisionConfig())),
        tiny.loss_of(objective, student, teacher, [batch])[0],
    ):
        student.zero_grad()
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)


def test_what_is_timed_is_the_loop_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    windows, ended, inner = [], [], loop.step

    def counted(training, window, *rest):
        windows.append(len(window.batches))
        return inner(training, window, *rest)

    monkeypatch.setattr(loop, "step", counted)
    shape, variant = SHAPES["tiny"], Variant("distill, eager objective", "all", PrecisionConfig())
    pair = make_teacher(shape, CPU), make_student(shape, CPU)
    train_variant(batches(shape, 3, 2), pair, variant, 1, lambda: ended.append(True))
    assert windows == [3, 3] and len(ended) == 2


def test_a_rank_that_fails_ends_the_others() -> None:
    code = "import os, sys, time; sys.exit('no luck') if os.environ['RANK'] == '1' else time.sleep(60)"
    with cluster.Cluster(2) as two, pytest.raises(RuntimeError, match="rank 1 ended with status 1: no luck"):
        two.run([sys.executable, "-c", code])


@pytest.mark.slow
def test_emulated_hosts_are_slow_and_leave_nothing_behind() -> None:
    if (reason := cluster.why_not()) is not None:
        pytest.skip(f"no emulated hosts: {reason}")
    code = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(500_000)
began = time.perf_counter(); dist.all_reduce(x); print(time.perf_counter() - began)
dist.barrier(); os._exit(0)
"""
    with cluster.Cluster(2, cluster.Network(100, 500), share=0.5, limit=120) as two:
        seconds = float(two.run([sys.executable, "-u", "-c", code]))
    assert seconds >= 2e6 * 8 / 100e6  # 2 MB cross each link once in each direction
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert f"bench{os.getpid()}-" not in left


@pytest.mark.slow
def test_the_distilbert_benchmark(tmp_path: Path) -> None:
    small = ("--loopback", "--rows", "192", "--epochs", "1", "--sets", "heldout", "--folder", str(tmp_path / "runs"))
    rows = run("distilbert.py", tmp_path, *small, "--figure", str(tmp_path / "gain.png"))
    assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * 6, rel=1e-4)
    assert rows[0]["as_fast_as_first"] == 1 and rows[0]["perplexity_heldout_by_epoch"][0] > 1
    assert (tmp_path / "gain.png").read_bytes().startswith(b"\x89PNG")


def rows_in(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in json.loads((folder / "gpu.json").read_text())["rows"]}


def test_a_part_of_the_gpu_script_that_takes_too_long(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--only", "steps", "--out", str(tmp_path / "gpu.json")]
    assert gpu.main(options, parts=(gpu.Part("steps", 0.02),)) == 1
    assert rows_in(tmp_path)["ended"]["status"] == "took too long"


def test_a_row_of_the_gpu_script_keeps_what_it_has_where_it_fails(tmp_path: Path) -> None:
    Results(tmp_path / "gpu.json")
    options = {"part": "steps", "device": "cpu", "out": tmp_path / "gpu.json", "scratch": tmp_path}
    part = gpu_parts.Part(argparse.Namespace(**options, seconds=60.0, times=10.0))
    with part.case("fails", 5) as row:
        row["seconds"] = 1.5
        raise ValueError("no luck")
    with part.case("late", 0.005) as row:
        time.sleep(600)
    rows = rows_in(tmp_path)
    assert rows["fails"]["seconds"] == 1.5 and rows["fails"]["error"] == "ValueError: no luck"
    assert "took more than 0 s" in rows["late"]["error"]


@pytest.mark.slow
def test_all_gpu_checks_in_small(tmp_path: Path) -> None:
    assert gpu.main(["--device", "cpu", "--times", "10", "--out", str(tmp_path / "gpu.json")]) == 0
    rows = rows_in(tmp_path)
    assert rows["memory"]["gb_per_second"] > 0 and max(rows["fused"]["differs"].values()) < 1e-2
    distilled = [row for what, row in rows.items() if what.endswith("distill")]
    assert len(distilled) == 2 and all(row["waits"] > 0 and row["tokens_per_second"] > 0 for row in distilled)
    assert "passed" in rows["sum"]["outcome"] and "failed" not in rows["sum"]["outcome"]
    assert all(rows[name]["status"] == 0 for name in ("single", "fsdp, one rank", "predict", "evaluate", "resumed"))
    assert rows["killed"]["status"] == -9 and rows["resumed and not killed"]["same_bits"]
