"""Profiles: phases on the clock of the host or of a GPU, the bottleneck that rules name, and whole runs with one."""

import gzip
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from job import Shelf, assert_same, distill, metrics, results

from distill.commands.cli import main
from distill.config.settings import BackendConfig
from distill.config.training import ProfileConfig
from distill.distributed.single import Single
from distill.runs.facts import Finding
from distill.runs.profile import phases as module
from distill.runs.profile import sampler as sampling
from distill.runs.profile.bottleneck import RunSettings, conclusion, diagnose, summary, table
from distill.runs.profile.phases import (
    BACKWARD,
    DATA,
    FORWARD,
    OTHER,
    PHASES,
    SAMPLING,
    RankProfile,
    Recorder,
    phase,
)
from distill.runs.profile.sampler import Sampler

CPU = torch.device("cpu")

# --- phases --------------------------------------------------------------------------------------------------------


def recorder(folder: Path, trace_steps: int = 0) -> Recorder:
    ranks = Single(BackendConfig(device="cpu", threads=1))
    return Recorder(ProfileConfig(enabled=True, trace_steps=trace_steps), folder, 1, ranks)


def by_name(step: list[float]) -> dict[str, float]:
    return {phase: seconds for phase, seconds in zip(PHASES, step, strict=True) if seconds > 0}


class Clock:
    """The clock of the host, set by hand: seconds that binary fractions hold exactly. No step is untypical."""

    now = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(module, "UNTYPICAL_STEPS", 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_phase_gets_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A phase within another one interrupts that; what is in no phase is another thing.

    On a GPU the events of a step, made up here, are read after the next one: reading them earlier would wait for it.
    """
    clock, read_at, record = Clock(monkeypatch), list[float](), recorder(tmp_path)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            self.at = clock.now

        def elapsed_time(self, other: "Event") -> float:
            read_at.append(clock.now)
            return 1000 * (other.at - self.at)

    if device == "cuda":
        for name, made in (("Event", Event), ("current_stream", str), ("synchronize", str)):
            monkeypatch.setattr(torch.cuda, name, made)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6e9, 8e9))
        record._ranks.device = record._sampler._device = torch.device("cuda")
    with record:
        for _ in range(2):
            with phase(FORWARD):
                clock.now += 0.25
            with phase(BACKWARD):
                clock.now += 0.5
                with phase(DATA):
                    clock.now += 1.0
                clock.now += 0.25
        record.end_step()
        clock.now += 0.125  # before the first phase of a step
        with phase(DATA):
            clock.now += 2.0
        record.end_step()
        clock.now += 8.0  # before another step, which does not come
    profile = record.record()
    first, second = map(by_name, profile.steps)
    assert first == {FORWARD: 0.5, BACKWARD: 1.5, DATA: 2.0} and second == {OTHER: 0.125, DATA: 2.0}
    assert by_name([*profile.totals.values()]) == {FORWARD: 0.5, BACKWARD: 1.5, DATA: 4.0, OTHER: 0.125}
    assert profile.num_steps == 2 and len(profile.samples["seconds"]) == 1
    assert device == "cpu" or min(read_at) == 6.125


@pytest.mark.parametrize(
    ("trace_steps", "ends", "traced", "typical"), [(2, 9, [4, 5], 3), (2, 5, [4], 0), (2, 3, [], 0), (0, 5, [], 2)]
)
def test_a_step_warms_the_profiler_up_before_those_of_the_trace(
    tmp_path: Path, trace_steps: int, ends: int, traced: list[int], typical: int
) -> None:
    """The first steps and the traced ones are not typical."""
    path = tmp_path / "profile" / "trace-rank-0.json.gz"
    with recorder(tmp_path, trace_steps) as record:
        for number in range(ends):
            with phase(FORWARD), torch.profiler.record_function(f"step-{number}"):
                torch.ones(3).sum()
            record.end_step()
    assert path.exists() == bool(traced)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if traced else []
    names = [event.get("name") for event in events]
    assert [name for name in names if str(name).startswith("step-")] == [f"step-{number}" for number in traced]
    assert names.count(FORWARD) == len(traced)
    profile = record.record()
    assert profile.num_steps == ends and len(profile.steps) == typical and profile.totals[FORWARD] > 0


def test_this_process_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it has computed is in the samples, whatever else the machine does meanwhile; those of a long run fit."""
    monkeypatch.setattr(sampling, "INTERVAL", 0.02)
    sampler, before = Sampler(CPU), time.process_time()
    sampler.start()
    while len(sampler.series().get("seconds", [])) < 3:
        sum(range(10_000))
    sampler.stop()
    sampler.sample()
    computed, series = time.process_time() - before, sampler.series()
    assert len({len(values) for values in series.values()}) == 1
    spans = [now - then for then, now in zip([0.0, *series["seconds"]], series["seconds"], strict=False)]
    used = sum(rate * span for rate, span in zip(series["process_cpu"], spans, strict=True))
    assert used == pytest.approx(computed, abs=0.05) and all(0 <= fraction <= 1 for fraction in series["machine_cpu"])
    assert min(series["process_memory"]) > 10e6 and {"network_sent", "network_received"} <= series.keys()
    monkeypatch.setattr(sampling, "MAX_SAMPLES", 8)
    for _ in range(64):
        sampler.sample()
    seconds = sampler.series()["seconds"]
    assert 4 <= len(seconds) < 8 and sorted(seconds) == seconds and sampler._interval > sampling.INTERVAL


def test_a_gpu_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory always; its utilisation where NVML's module is there."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6e9, 8e9))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 75)
    sampler = Sampler(torch.device("cuda"))
    sampler.sample()
    series = sampler.series()
    assert (series["gpu_memory"], series["gpu_memory_total"], series["gpu_busy"]) == ([2e9], [8e9], [0.75])
    monkeypatch.delattr(torch.cuda, "utilization")
    assert "gpu_busy" not in sampler._levels()


# --- the bottleneck ------------------------------------------------------------------------------------------------

STEPS = 40
HEALTHY = {"data": 0.001, "teacher": 0.03, "forward": 0.02, "backward": 0.04, "optimizer": 0.01}
Profile = tuple[list[RankProfile], RunSettings]


def step(**seconds: float) -> list[float]:
    """The phases of a step of 100 ms, or those that are named here."""
    return [{**HEALTHY, **seconds}.get(phase, 0.0) for phase in PHASES]


def rank(number: int = 0, steps: list[list[float]] | None = None, **samples: list[float]) -> RankProfile:
    steps = steps or [step()] * STEPS
    totals = {phase: sum(one[place] for one in steps) for place, phase in enumerate(PHASES)}
    return RankProfile(number, f"host{number}", steps, totals, len(steps), samples)


def each(*steps: list[float], **settings: Any) -> Profile:
    """A run of ranks whose steps are all alike."""
    return run(*(rank(number, [one] * STEPS) for number, one in enumerate(steps)), **settings)


def run(*ranks: RankProfile, **settings: Any) -> Profile:
    given = {"batch_size": 8, "micro_batches": 4, "checkpoints": {"train.save_every": 100}, **settings}
    return [*ranks], RunSettings(**given)


def named(profile: Profile) -> Finding | None:
    """The finding that is named, of which there is at most one."""
    findings = diagnose(*profile)
    assert findings and not any(finding.named for finding in findings[1:])
    assert conclusion(findings).startswith("The bottleneck: " if findings[0].named else "No bottleneck: ")
    return findings[0] if findings[0].named else None


QUICK, SLOW = step(exchange=0.06), step(forward=0.08)
EXCHANGE = [step(exchange=0.101), step(exchange=0.151)]  # the second waits for the first besides
SAVES = [step(checkpoint=1.0 if place % 10 == 0 else 0.0) for place in range(STEPS)]


@pytest.mark.parametrize(
    ("profile", "rule", "lost", "words"),
    [
        # The wait of the rank in the middle is half of its step.
        (each(*(step(data=wait) for wait in (0.0, 0.1, 0.1)), workers=0), "data", 0.5, "train.workers=1"),
        (each(step(data=0.1), workers=2), "data", 0.5, "train.workers=4"),
        # That of the rank that came last is; the other one waits for it.
        (each(*EXCHANGE, sync="every"), "exchange", 0.4, "backend.sync=window"),
        (each(*EXCHANGE, sync="every", micro_batches=1), "exchange", 0.4, "backend.compression=bf16"),
        (each(*EXCHANGE), "exchange", 0.4, "backend.compression=bf16"),
        (each(*EXCHANGE, compression="bf16"), "exchange", 0.4, "a faster network"),
        # Three ranks wait 60 ms in each step of 160 ms for the fourth; for ranks that are slow in turn nothing helps.
        (each(QUICK, QUICK, SLOW, QUICK), "slow rank", 0.06 / 0.161, "rank 2 on host2"),
        # A second in every tenth step of 100 ms: half of the time. These steps are typical ones otherwise.
        (run(rank(0, SAVES), checkpoints={"train.save_every": 10}), "checkpoints", 0.5, "train.save_every=40"),
        (run(rank(0, SAVES)), "checkpoints", 0.5, "set train.async_checkpoints=true, or"),
        (run(rank(0, SAVES), async_checkpoints=True), "checkpoints", 0.5, "set train.save_every=400"),
    ],
)
def test_a_bottleneck_is_named_with_what_helps(profile: Profile, rule: str, lost: float, words: str) -> None:
    finding = named(profile)
    assert finding is not None and finding.rule == rule and words in finding.sentence
    assert finding.lost == pytest.approx(lost, abs=0.01)


@pytest.mark.parametrize(
    "profile",
    [
        *(each(*[step(exchange=0.005)] * ranks) for ranks in (1, 2, 4)),
        run(*(rank(n, [SLOW if place % 4 == n else QUICK for place in range(STEPS)]) for n in range(4))),
        run(
            rank(0, [step(forward=0.14), QUICK] * (STEPS // 2)),
            rank(1, [step(exchange=0.12), SLOW] * (STEPS // 2)),
        ),
        # Odd steps and evaluation do not count.
        run(rank(0, [step(data=9.0), *[step(evaluation=5.0)] * (STEPS - 2), step(data=3.0)])),
    ],
)
def test_a_healthy_run_has_none(profile: Profile) -> None:
    assert named(profile) is None


def test_too_few_steps_say_nothing() -> None:
    profile = run(rank(0, [step(data=5.0)] * 4))
    assert diagnose(*profile) == [] and "fewer than 5 typical steps" in conclusion([])
    assert summary(*profile).step_seconds is None


@pytest.mark.parametrize(
    ("busy", "used", "micro_batches", "lost"),
    [(0.45, 8e9, 4, 0.44), (0.45, 60e9, 4, None), (0.85, 8e9, 4, None), (0.45, 8e9, 1, None)],
)
def test_a_gpu_that_waits_for_the_host(busy: float, used: float, micro_batches: int, lost: float | None) -> None:
    """It computes in half of the time, which is all but what 90 of 101 ms need; with most of its memory free."""
    samples = {"seconds": [0.5], "gpu_busy": [busy], "gpu_memory": [used], "gpu_memory_total": [80e9]}
    finding = named(run(rank(0, None, **samples), micro_batches=micro_batches))
    assert (finding is None) == (lost is None)
    if finding is not None:
        assert finding.rule == "small micro-batches" and "train.batch_size=16" in finding.sentence
        assert finding.lost == pytest.approx(lost, abs=0.01)


def test_the_summary_and_its_table() -> None:
    block = summary(*run(rank(0, [step(data=0.1)] * STEPS, process_cpu=[1.0])))
    assert (block.bottleneck, block.steps, block.ranks, block.samples) == ("data", STEPS, 1, {"process_cpu": [1.0]})
    assert block.phases["data"] == pytest.approx(0.1 * STEPS) and block.step_seconds is not None
    assert block.step_seconds.mean == block.step_seconds.longest == pytest.approx(0.2)
    lines = table(block).splitlines()
    assert lines[1].split() == ["waiting", "for", "data", "4.00", "50.0%", "100.00"] and lines[-1] == block.conclusion


# --- whole runs ----------------------------------------------------------------------------------------------------


def test_a_profiled_run_gives_the_same_student_and_a_page(
    done: Path, shelf: Shelf, capfd: pytest.CaptureFixture
) -> None:
    folder = shelf.root / "profiled"
    assert shelf.run(folder, "profile=on", "profile.trace_steps=1") == 0
    assert_same(done, folder)
    assert [line["loss/total"] for line in metrics(done)] == [line["loss/total"] for line in metrics(folder)]
    content, record = json.loads((folder / "profile" / "profile.json").read_text()), results(folder)
    (one,) = (RankProfile(**each) for each in content["ranks"])
    steps = record["training"]["steps"]
    assert one.num_steps == steps == content["summary"]["steps"] and len(one.steps) == steps - 5
    assert all((one.totals[phase] > 0) is (phase != SAMPLING) for phase in PHASES)
    # The phases add up to what the loop says of its own time, which ends a little before the step does.
    training = [place for place, phase in enumerate(PHASES) if phase not in ("checkpoint", "evaluation")]
    own = metrics(folder)[-1]["seconds"] - metrics(folder)[4]["seconds"]
    assert sum(step[phase] for step in one.steps for phase in training) >= own - 0.001 * steps
    with gzip.open(folder / "profile" / "trace-rank-0.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert {"teacher", "backward", "optimizer", "data"} <= set(names)
    assert names.count("forward") == 2 and any("aten::" in str(name) for name in names)  # one step of two micro-batches
    assert "aten::" in (folder / "profile" / "trace-rank-0.txt").read_text()
    assert "## Where the time goes" in (folder / "report.md").read_text()
    assert (folder / "plots" / "utilisation.png").exists()
    # The finished run without a profile is the same run with one.
    assert shelf.run(done, "profile=on") == 0
    assert "finished and nothing was changed" in capfd.readouterr().err and not (done / "profile").exists()


@pytest.mark.parametrize(("length", "profiled_steps"), [([], 6), (["train.epochs=null", "train.steps=4"], 4)])
def test_the_command_ends_after_its_steps_and_leaves_no_student(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture, length: list[str], profiled_steps: int
) -> None:
    """As often as it is given, also of a run that is shorter."""
    folder = tmp_path / "run"
    for _ in range(2):
        assert main(["profile", *shelf.arguments(folder, *length, "train.save_every=2"), "steps=6"]) == 0
        assert "waiting for data" in capfd.readouterr().err
        assert not {path.name for path in folder.iterdir()} & {"results.json", "student"}
        assert not list(folder.glob("checkpoints/step-*"))
    content = json.loads((folder / "profile" / "profile.json").read_text())
    assert RankProfile(**content["ranks"][0]).num_steps == profiled_steps
    assert content["summary"]["conclusion"] in (folder / "profile" / "profile.txt").read_text()


def slow_second_rank(folder: Path, arguments: list[str]) -> dict[str, Any] | None:
    """One of two ranks of a profiled run, of which rank 1 takes five times as long for each of its steps, as it is."""
    from tiny import loop

    from distill.commands import ending

    quick = loop.step

    def slow(*values: Any) -> Any:
        began = time.perf_counter()
        sums = quick(*values)
        if os.environ["RANK"] == "1":
            time.sleep(0.05 + 4 * (time.perf_counter() - began))
        return sums

    loop.step = slow
    ending.end_rank = lambda status, error=None: None  # it would end the process before it gives anything back
    assert distill(*arguments, f"hydra.run.dir={folder}") == 0
    profile = json.loads((folder / "profile" / "profile.json").read_text()) if os.environ["RANK"] == "0" else None
    return profile


@pytest.mark.slow
def test_a_slow_rank_is_found(shelf: Shelf, tmp_path: Path) -> None:
    given = ["backend=ddp", "backend.device=cpu", "backend.threads=1", "train.batch_size=4", "train.epochs=4"]
    given += ["profile=on", "profile.trace_steps=0", "profile.stop_after=14", "train.save_every=100"]
    found, _ = run_ranks(2, tmp_path / "ranks", slow_second_rank, tmp_path / "run", shelf.arguments(tmp_path, *given))
    assert found["summary"]["bottleneck"] == "slow rank" and "rank 1" in found["summary"]["conclusion"]
    assert [len(rank["steps"]) for rank in found["ranks"]] == [11, 11]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["steps=many"], "steps=many: should be a valid integer"),
        (["steps=0"], "steps=0: should be greater than or equal to 1"),
        (["profile.stop_after=3"], "profile.stop_after is set by `distill profile`"),
        (["profile=off"], "profile is set by `distill profile`"),
        (["+recipe=smoke", "seed=0,1", "--multirun"], "--multirun makes several runs"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 2
    assert f"distill: {words}" in capsys.readouterr().err
