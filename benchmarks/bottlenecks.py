"""Breaks a run on purpose, in seven ways, and compares what its profile says with what relief really gains.

    python benchmarks/bottlenecks.py            # as root, with the emulated network, control groups and a swap file

The severities are drawn by a seed. Each broken run is profiled; then the change that the profile advises is made, or,
where it is no setting (a slow host, stalls, too little memory), the break itself is taken away. Both take turns.

    loader      each window costs computing outside of Python's lock, as decompression does, of 1.3 to 3 healthy steps
    storage     each window waits for storage for 1.5 to 6 healthy steps
    exchange    two hosts with a link of 200 to 1,000 Mbit/s between them
    slow rank   one of two ranks may use 0.35 to 0.7 of a core
    saves       checkpoints every 3 to 8 steps on storage that takes 5 to 20 steps longer for each
    stalls      3 to 10 % of the steps stop for 5 to 20 steps
    memory      the process may take 0.4 to 0.7 of what it takes, and swaps the rest
    healthy     nothing is broken, on one rank and on two
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import Cluster, Network, _allow
from machine import save, table, title

from distill.runs import profiling
from distill.runs.profile.figures import Figures

EXPECTED = {
    "loader": "CPU-bound loader",
    "storage": "I/O wait",
    "exchange": "exchange",
    "slow rank": "load imbalance between ranks",
    "saves": "step outliers",
    "stalls": "step outliers",
    "memory": "memory",
    "healthy": None,
    "healthy, 2 ranks": None,
}
CPU_GROUPS, MEMORY_GROUPS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/memory")
BLOCK = bytes(2**18)


# --- in the process of a run: how it is broken


def break_run(how: dict[str, Any]) -> None:
    """Break this process before the run begins in it."""
    for name, value in how.items():
        BREAKS[name](value)


def slow_windows(seconds: float, spend: Callable[[float], None]) -> None:
    """Let the preparation of each window spend so many seconds more."""
    from distill.data.batches import Batches

    window = Batches.window

    def slow(self: Batches, step: int) -> Any:
        spend(seconds)
        return window(self, step)

    Batches.window = slow  # type: ignore[method-assign]


def compute(seconds: float) -> None:
    """Take a processor for so long, without Python's lock."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        hashlib.sha256(BLOCK)


def slow_saves(seconds: float) -> None:
    from distill.runs.checkpoint import Checkpoints

    store = Checkpoints.save

    def slow(self: Checkpoints, *given: Any) -> bool:
        saved = store(self, *given)
        time.sleep(seconds)
        return saved

    Checkpoints.save = slow  # type: ignore[method-assign]


def stalls(given: dict[str, float]) -> None:
    """Some steps stop for a while, as when a host is busy with something else."""
    from distill import train

    draw, work = random.Random(int(given["seed"])), train.accumulate_gradients

    def stalling(*values: Any) -> Any:
        if draw.random() < given["share"]:
            time.sleep(given["seconds"])
        return work(*values)

    train.accumulate_gradients = stalling


def in_group(given: dict[str, Any]) -> None:
    """Enter a control group when training begins, on this rank or on all."""
    from distill import train

    if given.get("rank") not in (None, os.environ.get("RANK")):
        return
    work, entered = train.accumulate_gradients, []

    def inside(*values: Any) -> Any:
        if not entered:
            entered.append(True)
            (Path(given["group"]) / "cgroup.procs").write_text(str(os.getpid()))
        return work(*values)

    train.accumulate_gradients = inside


def with_memory(given: dict[str, Any]) -> None:
    """Leave this process a share of the memory that it takes after a few steps, from then on.

    How much that was is written down by the first run, so that one which takes less gets as much.
    """
    from distill import train

    work, steps = train.accumulate_gradients, []
    group, limit = Path(given["group"]), Path(given["limit"])
    (group / "memory.limit_in_bytes").write_text("-1")  # that of an earlier run
    (group / "memory.swappiness").write_text("100")
    (group / "cgroup.procs").write_text(str(os.getpid()))

    def limited(*values: Any) -> Any:
        steps.append(True)
        if len(steps) == 3:
            taken = int((group / "memory.usage_in_bytes").read_text())
            if not limit.exists():
                limit.write_text(str(int(given["share"] * taken)))
            lower_limit(group, taken, int(limit.read_text()))
        return work(*values)

    train.accumulate_gradients = limited


def lower_limit(group: Path, taken: int, limit: int) -> None:
    """Lower a group's limit bit by bit: at once, Linux kills what it cannot swap out as quickly as it is asked to."""
    for part in range(1, 17):
        with contextlib.suppress(OSError):  # not yet: the next try goes further
            (group / "memory.limit_in_bytes").write_text(str(taken + (limit - taken) * part // 16))
        time.sleep(0.25)
    (group / "memory.limit_in_bytes").write_text(str(limit))


BREAKS: dict[str, Callable[[Any], None]] = {
    "computing": lambda seconds: slow_windows(seconds, compute),
    "waiting": lambda seconds: slow_windows(seconds, time.sleep),
    "saves": slow_saves,
    "stalls": stalls,
    "group": in_group,
    "memory": with_memory,
}


def job(given: str) -> None:
    """A run, or a rank of one, that is broken as asked for."""
    from distill.__main__ import main

    content = json.loads(given)
    break_run(content["how"])
    sys.argv = ["distill", *content["arguments"]]
    sys.exit(main())


# --- runs and their profiles


@dataclass
class Case:
    """A run: how it is broken, on how many ranks, with which settings, on which network."""

    name: str
    how: dict[str, Any] = field(default_factory=dict)
    settings: list[str] = field(default_factory=list)
    ranks: int = 1
    network: Network | None = None
    severity: str = ""


def run(case: Case, change: list[str], options: argparse.Namespace) -> tuple[float, dict[str, Any]]:
    """Seconds of a step, and the summary of the profile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        arguments = [*settings_of(options), *case.settings, *change, f"hydra.run.dir={folder}"]
        given = json.dumps({"how": case.how, "arguments": arguments})
        command = [sys.executable, str(Path(__file__).resolve()), "--job", given]
        if case.ranks == 1:
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            if done.returncode:
                raise RuntimeError(f"{case.name}: {done.stderr[-2000:]}")
        else:
            with Cluster(case.ranks, case.network) as cluster:
                cluster.run(command)
        profile, content = profiling.read(folder)
        return float(Figures(profile).with_checkpoints.mean()), content["summary"]


def settings_of(options: argparse.Namespace) -> list[str]:
    settings = [f"+recipe={options.recipe}", "profile=on", f"profile.stop_after={options.steps}", "train.workers=1"]
    settings += ["backend.threads=1", "evaluate=heldout", "evaluate.rows=8", "resume=never", "precision=fp32"]
    return [*settings, *([f"corpus.cache={options.cache}"] if options.cache else []), *options.settings]


def cases(draw: random.Random, step: float, folder: Path) -> Iterator[Case]:
    """The broken runs, with severities drawn as the head of this file says; `step`: seconds of a healthy one."""
    times = draw.uniform(1.3, 3.0)
    yield Case("loader", {"computing": times * step}, severity=f"{times:.2f} steps of computing a window")
    times = draw.uniform(1.5, 6.0)
    yield Case("storage", {"waiting": times * step}, severity=f"{times:.2f} steps of waiting a window")
    rate = draw.uniform(200, 1000)
    two = ["backend=ddp"]
    yield Case("exchange", {}, two, 2, Network(rate, 500), f"{rate:.0f} Mbit/s")
    share = draw.uniform(0.35, 0.7)
    group = {"group": str(folder), "rank": "1", "share": share}
    yield Case("slow rank", {"group": group}, two, 2, severity=f"{share:.2f} of a core")
    every, times = draw.randint(3, 8), draw.uniform(5, 20)
    settings = [f"train.save_every={every}"]
    yield Case("saves", {"saves": times * step}, settings, severity=f"every {every} steps, {times:.1f} steps each")
    often, times = draw.uniform(0.03, 0.1), draw.uniform(5, 20)
    stalling = {"share": often, "seconds": times * step, "seed": draw.randrange(10**6)}
    yield Case("stalls", {"stalls": stalling}, severity=f"{100 * often:.1f} % of the steps, {times:.1f} steps each")
    share = draw.uniform(0.4, 0.7)
    large = ["train.batch_size=32"]
    yield Case("memory", {"memory": {"share": share}}, large, severity=f"{share:.2f} of its memory")


@contextlib.contextmanager
def groups_for(case: Case, swap: Path) -> Iterator[None]:
    """The control group, and the swap file, that a break needs."""
    made: list[Path] = []
    if "group" in case.how:
        group = CPU_GROUPS / f"bench{os.getpid()}"
        group.mkdir()
        made.append(group)
        _allow(group, case.how["group"]["share"])
        case.how["group"]["group"] = str(group)
    if "memory" in case.how:
        group = MEMORY_GROUPS / f"bench{os.getpid()}"
        group.mkdir()
        made.append(group)
        case.how["memory"] |= {"group": str(group), "limit": str(swap.with_suffix(".limit"))}
        subprocess.run(["dd", "if=/dev/zero", f"of={swap}", "bs=1M", "count=2048", "status=none"], check=True)
        swap.chmod(0o600)
        subprocess.run(["mkswap", str(swap)], check=True, capture_output=True)
        subprocess.run(["swapon", str(swap)], check=True)
    try:
        yield
    finally:
        if "memory" in case.how:
            subprocess.run(["swapoff", str(swap)], check=True)
            swap.unlink()
            swap.with_suffix(".limit").unlink(missing_ok=True)
        for group in made:
            group.rmdir()


def run_or_inf(case: Case, change: list[str], options: argparse.Namespace) -> float:
    """Seconds of a step; infinite where the run ends early, as one that is killed for want of memory does."""
    try:
        return run(case, change, options)[0]
    except RuntimeError as error:
        print(f"{case.name} {' '.join(change)}: {str(error)[-300:]}", file=sys.stderr, flush=True)
        return math.inf


def relieved(case: Case) -> Case:
    """The same run without its break."""
    return Case(case.name, {}, case.settings, case.ranks, None)


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """The broken run in turns with its relief: the change that its first profile advises, else without the break.

    What is predicted for too little memory is the gain of memory enough, so there both are tried.
    """
    broken: list[float] = []
    better: list[float] = []
    advised: list[float] = []
    with groups_for(case, Path(tempfile.gettempdir()) / f"bench{os.getpid()}.swap"):
        seconds, summary = run(case, [], options)
        broken.append(seconds)
        first = (summary["findings"] or [{"change": {}, "gain": 1.0, "lost": 0.0}])[0]
        change = [f"{name}={value}" for name, value in first["change"].items()]
        for turn in range(options.turns):
            by_setting = change and case.name != "memory"
            better.append(run(case, change, options)[0] if by_setting else run(relieved(case), [], options)[0])
            if change and not by_setting:
                advised.append(run_or_inf(case, change, options))
            if turn + 1 < options.turns:
                broken.append(run(case, [], options)[0])
    return {
        "case": case.name,
        "severity": case.severity,
        "named": summary["bottleneck"],
        "right": summary["bottleneck"] == EXPECTED[case.name],
        "lost": first["lost"],
        "change": change if by_setting else [],
        "predicted": first["gain"],
        "measured": statistics.median(broken) / statistics.median(better),
        "advised": {"change": change, "measured": statistics.median(broken) / statistics.median(advised)}
        if advised
        else None,
        "broken": broken,
        "better": better,
        "with_advice": advised,
        "conclusion": summary["conclusion"],
    }


def healthy(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs that are not broken; the first one gives the length of a step."""
    found = []
    for name, settings, ranks in (("healthy", [], 1), ("healthy, 2 ranks", ["backend=ddp"], 2)):
        seconds, summary = run(Case(name, {}, settings, ranks), [], options)
        named = summary["bottleneck"]
        about = {"case": name, "severity": f"{1000 * seconds:.0f} ms a step", "named": named, "right": named is None}
        found.append(about | {"seconds": seconds, "conclusion": summary["conclusion"]})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def off(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.0f} %"


def show(results: list[dict[str, Any]]) -> str:
    rows = []
    for each in results:
        cells = [each["case"], each["severity"], each["named"] or "none", "yes" if each["right"] else "no"]
        if "measured" in each:
            cells += [" ".join(each["change"]) or "without the break", f"{each['predicted']:.2f}"]
            cells += [f"{each['measured']:.2f}", off(each["predicted"], each["measured"])]
        rows.append([*cells, *[""] * (8 - len(cells))])
        if advised := each.get("advised"):
            gain = advised["measured"]
            relief = " ".join(advised["change"])
            measured = [f"{gain:.2f}", off(each["predicted"], gain)] if gain else ["killed", ""]
            rows.append(["", "", "", "", relief, f"{each['predicted']:.2f}", *measured])
    return table(["broken", "how much", "named", "right", "relief", "predicted", "measured", "off by"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the severities")
    parser.add_argument("--steps", type=int, default=80, help="of each run")
    parser.add_argument("--turns", type=int, default=2, help="of each broken run and its relief")
    parser.add_argument("--only", help="of the cases, separated by commas")
    parser.add_argument("--recipe", default="distilbert_gutenberg")
    parser.add_argument("--cache", help="corpus.cache of the runs")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", help="further settings of the runs")
    options = parser.parse_args()
    if options.job is not None:
        job(options.job)
    results: list[dict[str, Any]] = healthy(options)
    for case in cases(random.Random(options.seed), results[0]["seconds"], CPU_GROUPS):
        if options.only is None or case.name in options.only.split(","):
            results.append(measure(case, options))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(f"{title()}\n\n{show(results)}")
    save(options.json, results)


if __name__ == "__main__":
    main()
