"""Runs the Slurm job file on a pretended cluster: time limits and lost nodes must need nobody, and change no bit.

    sudo python benchmarks/reliability/slurm_job.py
    sudo python benchmarks/reliability/slurm_job.py --events time,node --steps 400 --backend horovod

The file is that of `python -m distill.distributed.cluster slurm`, with its #SBATCH lines changed as its head says: two
nodes without GPUs, one rank each. It runs once without disturbance. Then it is submitted again, and in each of its
starts one thing happens once the training has come further:

* `time`: the time limit comes near, so Slurm warns by USR1;
* `rank`: SIGKILL to the rank on the second node;
* `node`: the second node dies with everything on it, and comes back when the job runs again on another one;
* `head`: so does the first one, which runs the job's script.

Nobody submits anything again. It ends with status 0 if the job has finished with bitwise the same student, after one
more start for each event. Slurm lets two minutes go by before it starts a job again that was put back, so all of it
takes 20 minutes, on a busy machine 30.
"""

import argparse
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from benchmarks.common import save, table, title
from benchmarks.reliability.chaos import make_books, newest_step, same, steps_of
from benchmarks.reliability.slurm_cluster import SlurmCluster, inside, wait_for, why_not
from distill.distributed.cluster.__main__ import FOLDER

ROOT = Path(__file__).resolve().parent.parent.parent
EVENTS = ("time", "rank", "node", "head")
NODES = 3  # of which the job has two
LONG = "02:00:00"  # of time
WARNING = 30  # seconds before the end of the time, at which Slurm warns; it may be 60 seconds earlier
FURTHER = 15  # steps that a start gets before something happens to it
LIMIT = 900.0  # seconds that anything may take here
RUNNING, FINISHED = "RUNNING", "COMPLETED"
ENDED = {FINISHED, "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


@dataclass
class Event:
    """What happened to one start of the job, and what came of it."""

    name: str
    step: int = 0  # at which it happened
    status: str = ""  # of the start that it ended
    repeated: int = 0  # steps that the next start did once more
    seconds: float = 0.0  # until the training went on
    queued: float = 0.0  # of those, in the queue


@dataclass
class Trial:
    """The job on a cluster, in the pretended checkout `home`."""

    cluster: SlurmCluster
    home: Path
    settings: list[str]
    backend: str
    events: list[Event] = field(default_factory=list)

    def prepare(self) -> None:
        """What the head of the job file asks of a checkout: its virtual environment, books, a place for runs."""
        self.home.mkdir()
        (self.home / ".venv").symlink_to(sys.prefix)
        make_books(self.home / "books")

    def submit(self, folder: Path, limit: str) -> int:
        script = self.home / "slurm.sh"
        script.write_text(job_file(limit))
        given = {"BACKEND": self.backend, "RECIPE": "distilbert_gutenberg", "USER": "root", "TMPDIR": str(self.home)}
        given |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return self.cluster.submit(script, *self.settings, f"hydra.run.dir={folder}", **given)

    def undisturbed(self, folder: Path) -> float:
        """One job without events; gives its seconds."""
        began = time.monotonic()
        job = self.submit(folder, LONG)
        wait_for(lambda: self.state(job) in ENDED, LIMIT, f"job {job}")
        if self.state(job) != FINISHED:
            self.give_up(job, "without any event")
        return time.monotonic() - began

    def disturbed(self, folder: Path, events: list[str], minutes: int) -> str:
        """One job with one event in each of its first starts; gives the state in which it ends."""
        job = self.submit(folder, f"{minutes}:00" if "time" in events else LONG)
        begun = 0
        for name in events:
            wait_for(lambda begun=begun: self.goes_on(job, folder, begun + FURTHER), LIMIT, f"steps before {name}")
            if self.state(job) in ENDED:
                self.give_up(job, f"before the event {name}; give it more --steps if it is {FINISHED}")
            begun = self.strike(job, folder, name)
            print(f"{self.events[-1]}", file=sys.stderr, flush=True)
        wait_for(lambda: self.state(job) in ENDED, LIMIT, f"job {job}")
        return self.state(job)

    def strike(self, job: int, folder: Path, name: str) -> int:
        """Let one thing happen and wait until the training goes on; gives the step to which it has come then."""
        starts = self.starts(job)
        nodes = self.cluster.nodes_of(job)
        lost = {"node": nodes[-1], "head": nodes[0]}.get(name)
        if lost is not None:
            self.cluster.kill_node(lost)
        elif name == "rank":
            self.cluster.kill_processes(nodes[-1], "-m distill")
        else:
            wait_for(lambda: self.state(job) != RUNNING or self.starts(job) > starts, LIMIT, "the warning")
        began, event = time.monotonic(), Event(name)
        wait_for(lambda: self.state(job) in ENDED or self.runs_again(job, starts), LIMIT, "the next start")
        if self.state(job) in ENDED:
            self.give_up(job, f"after the event {name}")
        event.queued = time.monotonic() - began
        event.step, saved = steps_of(folder), newest_step(folder)
        event.repeated = event.step - saved
        if lost is not None:
            self.cluster.start_node(lost)
        wait_for(lambda: self.goes_on(job, folder, saved + 1, event.step), LIMIT, "the next step")
        event.seconds, event.status = time.monotonic() - began, self.status(job)
        self.events.append(event)
        return saved

    def goes_on(self, job: int, folder: Path, least: int, but: int = -1) -> bool:
        """Whether a job that runs has come to a step, or has ended; `but`: steps that an earlier start logged."""
        steps = steps_of(folder)
        return self.state(job) in ENDED or (self.state(job) == RUNNING and steps >= least and steps != but)

    def runs_again(self, job: int, starts: int) -> bool:
        return self.starts(job) > starts and self.state(job) == RUNNING

    def give_up(self, job: int, when: str) -> NoReturn:
        """Raises SystemExit with the end of what the job wrote, which is gone afterwards."""
        raise SystemExit(f"{self.output(job)[-4000:]}\nthe job ended as {self.state(job)} {when}")

    def state(self, job: int) -> str:
        return self.cluster.job(job).get("JobState", "")

    def starts(self, job: int) -> int:
        return 1 + int(self.cluster.job(job).get("Restarts", 0))

    def status(self, job: int) -> str:
        """The status that the script named last when it put the job back; Slurm's own doing where it did not."""
        said = re.findall(r"status (\d+) in start (\d+) of job", self.output(job))
        return next((status for status, start in said if int(start) == self.starts(job) - 1), "put back by Slurm")

    def output(self, job: int) -> str:
        path = self.home / f"distill-{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def job_file(limit: str) -> str:
    """The job file with its #SBATCH lines changed as its head says."""
    text = (FOLDER / "slurm.sh").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#SBATCH --gpus-per-node")]
    changed = {"--ntasks-per-node": "1", "--cpus-per-task": "1", "--time": limit, "--signal": f"USR1@{WARNING}"}
    for option, value in changed.items():
        (at,) = [number for number, line in enumerate(lines) if line.startswith(f"#SBATCH {option}=")]
        lines[at] = f"#SBATCH {option}={value}"
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", default=",".join(EVENTS), help="one for each start, in this order")
    parser.add_argument("--backend", choices=["ddp", "horovod"], default="ddp")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--minutes", type=int, default=2, help="time limit of the job, where `time` is an event")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    events = options.events.split(",")
    if unknown := set(events) - set(EVENTS):
        parser.error(f"--events {','.join(sorted(unknown))}: choose of {','.join(EVENTS)}")
    if options.inside is None:
        if (reason := why_not()) is not None:
            print(f"no pretended cluster here: {reason}", file=sys.stderr)
            return 2
        return inside([sys.executable, *sys.argv, "--inside"])
    work = Path(options.inside)
    settings = [
        "data.workers=1", "corpus.sequence_length=32", "corpus.max_sequences=1600", "evaluate.sets=[heldout]",
        "evaluate.max_sequences=8", "evaluate.pseudo_perplexity.fraction=0", "precision=fp32", "train.batch_size=4",
        "train.accumulate=1", "train.epochs=null", f"train.steps={options.steps}", "train.log_every=1",
        "train.save_every=10",
    ]  # fmt: skip
    with SlurmCluster(work / "cluster", NODES) as cluster:
        trial = Trial(cluster, work / "home", settings, options.backend)
        trial.prepare()
        seconds = trial.undisturbed(work / "undisturbed")
        print(f"undisturbed: {seconds:.0f} s", file=sys.stderr, flush=True)
        state = trial.disturbed(work / "disturbed", events, options.minutes)
    is_same = state == FINISHED and same(work / "undisturbed", work / "disturbed")
    return report(trial, state, is_same, seconds, options.json)


def report(trial: Trial, state: str, is_same: bool, seconds: float, path: Path | None) -> int:
    rows = [
        [each.name, str(each.step), each.status, str(each.repeated), f"{each.seconds:.0f}", f"{each.queued:.0f}"]
        for each in trial.events
    ]
    print(f"\n{title()}; {trial.backend} on two pretended nodes, undisturbed {seconds:.0f} s\n")
    head = [
        "event",
        "at step",
        "status of the job's step",
        "steps done again",
        "s to the next step",
        "of these in the queue",
    ]
    print(table(head, rows))
    print(f"\nThe job ended as {state}, its student is {'bitwise the same' if is_same else 'NOT the same'}.")
    save(path, {"undisturbed": seconds, "state": state, "same": is_same, "events": [vars(e) for e in trial.events]})
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
