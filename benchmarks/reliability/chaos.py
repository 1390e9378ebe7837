"""Breaks runs at random moments and goes on with them: the student that comes out has to be bitwise the same.

    python benchmarks/reliability/chaos.py                                   # 100 kills of a run in one process
    python benchmarks/reliability/chaos.py --engine ddp --processes 2        # of the ranks and the launcher of one
    sudo python benchmarks/reliability/chaos.py --events stop,damage,full    # what else happens; `full`: a mounted disk
    python benchmarks/reliability/chaos.py precision.compile=true            # further settings of the run

A small run is made once without disturbance. Then the same command is started again and again in another folder, and
at a random moment, one time in four of its start and else from its first step to its end, one thing happens to it:

* `kill`: SIGKILL to one of its processes, or to all;
* `term`: SIGTERM, SIGHUP or SIGINT to the one that was started, which then has its time to end;
* `stop`: SIGSTOP to one of its processes, and SIGCONT two seconds later;
* `damage`: it is killed, and one file of its folder is cut, changed or removed before the next start;
* `full`: its disk is filled, and freed once it has ended.

When it has finished, its student is compared with the undisturbed one, and a new round begins in an empty folder. At
the end there is a table: what happened in which phase how often, how the processes ended, and every difference.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import save, table, title

ROOT = Path(__file__).resolve().parent.parent.parent
EVENTS = ("kill", "term", "stop", "damage", "full")
WORDS = ["river", "house", "letter", "winter", "captain", "garden", "mother", "soldier", "morning", "road", "horse"]
SIZE = "student.config={hidden_size:32,num_hidden_layers:2,num_attention_heads:2,intermediate_size:64}"
STEPS = 200
LONGEST = 120.0  # seconds that a run may take after an event; beyond, it hangs
LEFT_BEHIND = 15.0  # seconds after which a process whose run has ended counts as left behind
# Statuses that a run may end with when one of these things happens to it; -9 is that of a killed launcher. A signal
# that comes before the program handles it, or after its last work, has Python's own status: these are negative.
ENDS = {"kill": {-9, 137, 4}, "damage": {-9, 137, 4}, "stop": set(), "full": {74}, "term": {129, 130, 143}}
UNHANDLED = {-15, -1, -2}


@dataclass
class Tally:
    """What happened, and what came of it."""

    phases: Counter[str] = field(default_factory=Counter)  # of each event
    statuses: Counter[int] = field(default_factory=Counter)
    finished: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def events(self) -> int:
        return sum(self.phases.values())


@dataclass
class Chaos:
    """One engine under attack."""

    engine: str
    processes: int
    events: list[str]
    work: Path
    draw: random.Random
    settings: list[str] = field(default_factory=list)  # of the run, besides those of `command`
    tally: Tally = field(default_factory=Tally)

    def command(self, folder: Path) -> list[str]:
        rows = 8 // (self.processes if self.engine != "single" else 1)
        settings = [
            f"corpus.path={self.work / 'books'}", f"data.cache={self.work / 'cache'}", "data.workers=1",
            "corpus.sequence_length=32", "corpus.vocab_size=300", "corpus.heldout=0.2", "evaluate.sets=[heldout]",
            "evaluate.max_sequences=8", SIZE, "precision=fp32", f"train.batch_size={rows}", "train.accumulate=2",
            "train.epochs=null", f"train.steps={STEPS}", "train.log_every=1", "train.save_every=2",
            "evaluate.every_steps=60", f"hydra.run.dir={folder}",
        ]  # fmt: skip
        if self.engine != "single":
            settings += [f"backend={self.engine}", f"backend.processes={self.processes}", "backend.timeout=30"]
        return [sys.executable, "-m", "distill", "+recipe=bert_pretrain", *settings, *self.settings]

    def start(self, folder: Path) -> "subprocess.Popen[bytes]":
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        log = (self.work / "output.txt").open("wb")
        return subprocess.Popen(self.command(folder), env=environment, stdout=log, stderr=log, start_new_session=True)

    def undisturbed(self, folder: Path) -> tuple[float, float]:
        """Run to the end; gives the seconds up to the first step and from there of a second run.

        That one finds tokenizer and tokens in the cache, as those that follow do.
        """
        first = last = 0.0
        for _ in range(2):
            shutil.rmtree(folder, ignore_errors=True)
            began = time.monotonic()
            process = self.start(folder)
            while not steps_of(folder) and process.poll() is None:
                time.sleep(0.01)
            first = time.monotonic() - began
            if status := process.wait():
                raise SystemExit(f"the undisturbed run ended with status {status}:\n{self.output()}")
            last = time.monotonic() - began - first
        return first, last

    def attack(self, folder: Path, first: float, last: float) -> bool:
        """Start the run and let one thing happen to it; whether it has finished.

        Args:
            first, last: seconds that it takes up to the first step, and from there.
        """
        event, early, before = self.draw.choice(self.events), self.draw.random() < 0.25, steps_of(folder)
        process = self.start(folder)
        while not early and steps_of(folder) == before and process.poll() is None:
            time.sleep(0.01)
        moment = time.monotonic() + self.draw.uniform(0, first if early else last * (1 - before / (STEPS + 1)))
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(0.01)
        phase = "nothing, as it had ended"
        if process.poll() is None:
            # What lies in the folder is of the starts before until this one has logged a step or cut the log.
            phase = phase_of(folder) if steps_of(folder) != before else "the start"
            self.tally.phases[f"{event} in {phase}"] += 1
            getattr(self, f"_{event}")(process, folder)
        try:
            status = process.wait(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            self.tally.problems.append(f"{event}: it hangs: {self.output()[-6000:]}")
            for pid in members(process.pid):
                send(pid, signal.SIGKILL)
            status = process.wait()
        self.tally.statuses[status] += 1
        text = self.output()
        outside = phase == "the start" or (folder / "results.json").exists()
        allowed = {0} | ENDS[event] | (UNHANDLED if event == "term" and outside else set())
        if status not in allowed or "Traceback" in text:
            self.tally.problems.append(f"{event} in {phase}: status {status}: {text[-6000:]}")
        if event == "term" and phase == "training" and status and newest_step(folder) != steps_of(folder):
            self.tally.problems.append(
                f"{event} in {phase}: step {steps_of(folder)} is in no checkpoint: {text[-6000:]}"
            )
        self._nobody_left_behind(process.pid)
        return status == 0

    def output(self) -> str:
        return (self.work / "output.txt").read_text(errors="replace")

    def _nobody_left_behind(self, session: int) -> None:
        until = time.monotonic() + LEFT_BEHIND
        while left := members(session):
            if time.monotonic() > until:
                self.tally.problems.append(f"{len(left)} processes were left behind")
                for pid in left:
                    send(pid, signal.SIGKILL)
                return
            time.sleep(0.05)

    def _kill(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        all_of_them = members(process.pid)
        for pid in all_of_them if self.draw.random() < 0.3 else [self.draw.choice(all_of_them or [process.pid])]:
            send(pid, signal.SIGKILL)

    def _term(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        send(process.pid, self.draw.choice([signal.SIGTERM, signal.SIGHUP, signal.SIGINT]))

    def _stop(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        pid = self.draw.choice(members(process.pid) or [process.pid])
        send(pid, signal.SIGSTOP)
        time.sleep(2)
        send(pid, signal.SIGCONT)

    def _damage(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        for pid in members(process.pid):
            send(pid, signal.SIGKILL)
        process.wait()
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
        if not files:
            return
        path, content = (chosen := self.draw.choice(files)), chosen.read_bytes()
        where = self.draw.randrange(len(content) + 1)
        match self.draw.choice(["cut", "changed", "removed"]):
            case "cut":
                path.write_bytes(content[:where])
            case "changed":
                path.write_bytes(content[:where] + self.draw.randbytes(3) + content[where + 3 :])
            case "removed":
                path.unlink()

    def _full(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        ballast = folder.parent / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        try:
            process.wait(timeout=60)
        finally:
            ballast.unlink()


def members(session: int) -> list[int]:
    """The processes that are alive in a session, the first one's included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended in between
        os.kill(pid, number)


def phase_of(folder: Path) -> str:
    """What a run is doing, by the files in its folder."""
    history, steps = folder / "history.jsonl", steps_of(folder)
    if list(folder.glob("checkpoints/.step-*")):
        return "a checkpoint"
    if steps == 0:
        return "the start"
    if steps == STEPS:
        scored = history.exists() and f'"step": {STEPS}'.encode() in history.read_bytes()
        return "the report" if scored else "an evaluation"
    return "training"


def steps_of(folder: Path) -> int:
    """How many steps a run has logged."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    return max([int(path.name[5:]) for path in folder.glob("checkpoints/step-*")], default=0)


def same(one: Path, other: Path) -> bool:
    """Whether two runs have the same student, byte by byte."""
    files = [folder / "student" / "model.safetensors" for folder in (one, other)]
    return files[0].read_bytes() == files[1].read_bytes()


def make_books(folder: Path) -> None:
    draw = random.Random(0)
    folder.mkdir()
    for number in range(5):
        paragraphs = [" ".join(draw.choices(WORDS, k=60)) + "." for _ in range(20)]
        (folder / f"{number}.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")


def run(chaos: Chaos, most: int, minutes: float) -> None:
    """Rounds until there were `most` events, or the time is over."""
    reference, folder = chaos.work / "undisturbed", chaos.work / "disk" / "run"
    first, last = chaos.undisturbed(reference)
    print(f"{chaos.engine}: undisturbed {first:.1f} s up to the first step, {last:.1f} s from there", flush=True)
    until = time.monotonic() + 60 * minutes
    while chaos.tally.events < most and time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        attempts = 0
        while not chaos.attack(folder, first, last if attempts < 20 else 1e6):
            attempts += 1
        chaos.tally.finished += 1
        if not same(reference, folder):
            chaos.tally.problems.append(f"another student after {attempts} attacks")
        print(f"{chaos.tally.events} events, {chaos.tally.finished} runs finished", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=["single", "ddp", "fsdp", "horovod"], default="single")
    parser.add_argument("--processes", type=int, default=2, help="ranks of ddp, fsdp and horovod")
    parser.add_argument("--events", default="kill", help=f"of {','.join(EVENTS)}")
    parser.add_argument("--number", type=int, default=100, help="of events")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", help="of the run, such as precision.compile=true")
    parser.add_argument("--json", type=Path, help="write the counts there")
    options = parser.parse_args()
    events = options.events.split(",")
    if unknown := set(events) - set(EVENTS):
        parser.error(f"--events {','.join(sorted(unknown))}: choose of {','.join(EVENTS)}")
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        work = Path(temporary)
        make_books(work / "books")
        (work / "disk").mkdir()
        if "full" in events:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", work / "disk"], check=True)
        chaos = Chaos(options.engine, options.processes, events, work, random.Random(options.seed), options.settings)
        try:
            run(chaos, options.number, options.minutes)
        finally:
            if "full" in events:
                subprocess.run(["umount", "-l", work / "disk"], check=False)
    tally = chaos.tally
    print(f"\n{title()}\n")
    print(table(["event", "times"], [[name, str(count)] for name, count in sorted(tally.phases.items())]))
    print(f"\nstatuses: {dict(sorted(tally.statuses.items()))}")
    print(f"{tally.finished} runs finished after {tally.events} events; problems: {len(tally.problems)}")
    for problem in tally.problems:
        print(f"\n{problem}")
    save(options.json, vars(tally))
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
