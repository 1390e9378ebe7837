"""Takes hosts from an elastic run and gives them back at random moments, and says what each event cost.

    python benchmarks/elastic.py                              # 20 kills and 10 returns, three hosts, torch.distributed
    python benchmarks/elastic.py --engine horovod
    python benchmarks/elastic.py --kills 2 --returns 1 --restarts 1 --steps 300        # a short one

Hosts are process groups of this machine behind a pretended ssh. Half of the kills (as many as there are returns) take a
host away until it comes back; after the others it answers at once. An event comes at a random moment after the one
before it is over, one time in four while the ranks are still starting. A run that ends before all events is followed by
another one in a new folder. What an event costs is the time until the run has logged a step that it had not reached
when the event came, so it holds what has to be computed again. A plain restart is measured in the same way: the same
run on a fixed number of ranks is killed as a whole, and the same command is started at once.

At the end the student of every run is compared with that of an undisturbed one.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos import ROOT, SIZE, make_books, members, send, steps_of
from machine import save, table, title
from pretended_hosts import PretendedHosts
from safetensors.torch import load_file

ROWS = 25  # of a step: neither two ranks nor three divide them
LONGEST = 240.0  # seconds without a further step, after which the run hangs


@dataclass
class Tally:
    """Seconds that each event cost, and what came of the runs."""

    kills: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    restarts: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Clock:
    """When a run last got further than ever before, and which events it has not got over yet."""

    highest: int = 0  # step
    since: float = field(default_factory=time.monotonic)
    pending: list[tuple[list[float], str]] = field(default_factory=list)  # where the cost goes, and who has to be there

    def look(self, steps: int, is_there: Callable[[str], bool]) -> bool:
        """Note how far the run is; whether it has just got over all events, which then know what they cost."""
        if steps <= self.highest:
            return False
        gap, self.highest, self.since = time.monotonic() - self.since, steps, time.monotonic()
        if not self.pending or not all(is_there(host) for _, host in self.pending if host):
            return False
        for costs, _ in self.pending:
            costs.append(gap / len(self.pending))
        self.pending = []
        return True


class Trial:
    """Runs of one engine on hosts that come and go."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.draw = random.Random(options.seed)
        self.hosts = PretendedHosts(work / "hosts", options.hosts)
        self.tally = Tally()
        self.last: subprocess.Popen[bytes] | None = None

    def command(self, folder: Path, elastic: bool) -> list[str]:
        options, number = self.options, self.options.hosts
        settings = [
            f"corpus.path={self.work / 'books'}", f"corpus.cache={self.work / 'cache'}", "corpus.workers=1",
            "corpus.sequence_length=32", "corpus.vocab_size=300", "corpus.heldout=0.2", "evaluate.sets=[heldout]",
            "evaluate.rows=8", f"evaluate.every_steps={options.steps}", SIZE, "precision=fp32", "train.batch_size=4",
            f"train.rows_per_step={ROWS}", "train.epochs=null", f"train.steps={options.steps}", "train.log_every=1",
            f"train.save_every={options.save_every}", f"hydra.run.dir={folder}", f"backend={options.engine}",
            f"backend.hosts={self.hosts.setting()}", "backend.device=cpu", "backend.timeout=60",
        ]  # fmt: skip
        if elastic:
            settings += [f"backend.elastic={options.fewest}:{number}"]
        return [sys.executable, "-m", "distill", "+recipe=bert_pretrain", *settings, *options.settings]

    def start(self, folder: Path, elastic: bool = True) -> "subprocess.Popen[bytes]":
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (self.work / "output.txt").open("ab") as log:
            process = subprocess.Popen(
                self.command(folder, elastic),
                env=os.environ | own | self.hosts.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.last = process
        return process

    def end(self) -> None:
        """Leave nothing behind."""
        if self.last is not None:
            self.kill_all(self.last)

    def trouble(self, folder: Path, reference: Path) -> None:
        """One run in which things happen until it ends, or nothing is left to happen."""
        process, clock, moment = self.start(folder), Clock(), float("inf")
        while process.poll() is None:
            over = clock.look(steps_of(folder), self.hosts.is_at_work)
            if over or (clock.highest and moment == float("inf") and not clock.pending):
                self.say(clock)
                moment = time.monotonic() + self.draw.uniform(0.2, self.options.pause)
            if time.monotonic() >= moment:
                moment = float("inf")
                if clock.highest < self.options.steps - 1 and (event := self.happen()):
                    time.sleep(0.3)  # what was still to be logged
                    clock.look(steps_of(folder), self.hosts.is_at_work)
                    clock.pending.append(event)
                    if self.draw.random() < 0.25:  # then the next one meets ranks that are starting
                        moment = time.monotonic() + self.draw.uniform(0.0, 8.0)
            if time.monotonic() - clock.since > LONGEST:
                self.tally.problems.append(f"no step after {clock.highest} within {LONGEST:.0f} s:\n{self.output()}")
                self.kill_all(process)
            time.sleep(0.02)
        for name in list(self.hosts.away):
            self.hosts.come_back(name)
        if process.returncode:
            self.tally.problems.append(f"status {process.returncode}:\n{self.output()}")
        else:
            self.tally.differences.append(difference(folder, reference))

    def left(self) -> tuple[int, int]:
        """How many kills and returns are still to happen; fewer than none where there were more kills."""
        returns = self.tally.happened["a host came back"]
        return self.options.kills - (self.tally.happened.total() - returns), self.options.returns - returns

    def is_over(self) -> bool:
        return max(self.left()) <= 0

    def happen(self) -> tuple[list[float], str] | None:
        """Let one of the events that are left happen; where its cost goes, and which host has to be there then."""
        happened, options, (kills, returns) = self.tally.happened, self.options, self.left()
        if self.hosts.away and (kills <= 0 or self.draw.random() < 0.5):
            name = self.draw.choice(sorted(self.hosts.away))
            self.hosts.come_back(name)
            happened["a host came back"] += 1
            return self.tally.returns, name
        there = [name for name in self.hosts.names if name not in self.hosts.away]
        if kills <= 0 and returns <= 0:
            return None
        name = self.draw.choice(there)
        may_leave = len(there) > options.fewest and returns > len(self.hosts.away)
        # A run that ends while a host is away owes its return, for which one more host has to leave.
        if may_leave and (kills <= 0 or self.draw.random() < (returns - len(self.hosts.away)) / kills):
            self.hosts.kill(name, stays_away=True)
            happened["a host was killed and stayed away"] += 1
        elif self.draw.random() < 0.5:
            self.hosts.kill(name, stays_away=False)
            happened["a host was killed"] += 1
        else:
            for pid in self.draw.sample(processes := self.hosts.processes(name), min(1, len(processes))):
                send(pid, signal.SIGKILL)
            happened["a process was killed"] += 1
        return self.tally.kills, ""

    def restart(self, folder: Path) -> None:
        """Kill a run on a fixed number of ranks, start the same command, and note how long it took to get further."""
        process, clock = self.start(folder, elastic=False), Clock()
        self.follow(process, clock, folder, lambda: clock.highest > 0)
        moment = time.monotonic() + self.draw.uniform(0.2, self.options.pause)
        self.follow(process, clock, folder, lambda: time.monotonic() > moment)
        self.kill_all(process)
        clock.look(steps_of(folder), self.hosts.is_at_work)
        clock.pending.append((self.tally.restarts, ""))
        process = self.start(folder, elastic=False)
        self.follow(process, clock, folder, lambda: not clock.pending)
        self.kill_all(process)
        print(f"a plain restart: {self.tally.restarts[-1]:.1f} s", flush=True)

    def follow(
        self, process: "subprocess.Popen[bytes]", clock: Clock, folder: Path, is_over: Callable[[], bool]
    ) -> None:
        """Look at the clock until something is over."""
        while not is_over():
            if process.poll() is not None or time.monotonic() - clock.since > LONGEST:
                raise SystemExit(f"the run that is to be restarted does not get on:\n{self.output()}")
            clock.look(steps_of(folder), self.hosts.is_at_work)
            time.sleep(0.02)

    def kill_all(self, process: "subprocess.Popen[bytes]") -> None:
        """End the launcher and everything on the hosts."""
        for pid in members(process.pid):
            send(pid, signal.SIGKILL)
        process.wait()
        self.hosts.end()

    def output(self) -> str:
        return (self.work / "output.txt").read_text(errors="replace")[-4000:]

    def say(self, clock: Clock) -> None:
        done = sum(self.tally.happened.values())
        costs = f"kills {shown(self.tally.kills)}, returns {shown(self.tally.returns)}"
        print(f"step {clock.highest}, {done} events; seconds: {costs}", flush=True)


def difference(one: Path, other: Path) -> float:
    """The largest difference between the weights of two students."""
    first, second = (load_file(folder / "student" / "model.safetensors") for folder in (one, other))
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def shown(seconds: list[float]) -> str:
    """Their median and their largest."""
    return f"{statistics.median(seconds):.1f} (at most {max(seconds):.1f})" if seconds else "-"


def measure(trial: Trial) -> None:
    """The undisturbed run, plain restarts, and then runs until everything has happened."""
    options, work = trial.options, trial.work
    process = trial.start(work / "undisturbed", elastic=False)
    if process.wait():
        raise SystemExit(f"the undisturbed run ended with status {process.returncode}:\n{trial.output()}")
    for number in range(options.restarts):
        trial.restart(work / f"restarted-{number}")
    number = 0
    while not trial.is_over() and not trial.tally.problems:
        trial.trouble(work / f"run-{number}", work / "undisturbed")
        shutil.rmtree(work / f"run-{number}", ignore_errors=True)
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", default="ddp", help="ddp, horovod or fsdp")
    parser.add_argument("--hosts", type=int, default=3, help="of one rank each")
    parser.add_argument("--fewest", type=int, default=2, help="ranks with which the run goes on")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--returns", type=int, default=10)
    parser.add_argument("--restarts", type=int, default=5, help="plain ones, to compare with")
    parser.add_argument("--steps", type=int, default=1500, help="of a run")
    parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--pause", type=float, default=10.0, help="seconds at most between two events")
    parser.add_argument("--rounding", type=float, default=1e-3, help="by which a weight may differ")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", help="of the run, such as precision.compile=true")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then too nothing is left behind
    with tempfile.TemporaryDirectory(prefix="elastic-") as temporary:
        trial = Trial(options, Path(temporary))
        make_books(trial.work / "books")
        try:
            measure(trial)
        finally:
            trial.end()
    tally = trial.tally
    print(f"\n{title()}, {options.engine}, {options.hosts} ranks\n")
    print(table(["event", "times"], [[name, str(count)] for name, count in sorted(tally.happened.items())]))
    costs = [("a kill", tally.kills), ("a return", tally.returns), ("a plain restart", tally.restarts)]
    rows = [[name, str(len(each)), shown(each)] for name, each in costs]
    print(f"\n{table(['seconds until the run is further than before', 'measured', 'median (largest)'], rows)}")
    largest = max(tally.differences, default=float("nan"))
    print(f"\n{len(tally.differences)} runs finished; largest difference of a weight: {largest:.2g}")
    if not largest <= options.rounding:
        tally.problems.append(f"a weight differs by {largest}, which is more than rounding ({options.rounding})")
    print(f"problems: {len(tally.problems)}")
    for problem in tally.problems:
        print(f"\n{problem}")
    save(options.json, vars(tally))
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
