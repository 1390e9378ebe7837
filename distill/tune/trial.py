"""One trial: the first steps of the run with some settings changed, in a process and a folder of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.optim.schedule import ENDLESS
from distill.runs import profiling
from distill.runs.profile.figures import Figures
from distill.runs.profile.finding import Finding
from distill.runs.profile.record import RunProfile
from distill.runtime.children import dying_with, pass_signals
from distill.runtime.errors import Interrupted
from distill.runtime.jsonl import read_lines
from distill.runtime.signals import STOPPING, handled

# What a trial is besides its run: profiled, ended after its steps, and scored on a few rows at most.
SETTINGS = (
    "profile.enabled=true",
    "profile.trace_steps=0",
    "profile.interval=0.25",
    "resume=never",
    "tracker.kind=none",
    "evaluate.rows=8",
    f"evaluate.every_steps={ENDLESS}",
    "evaluate.every_epoch=null",
)


@dataclass
class Outcome:
    """What a trial has measured.

    Attributes:
        seconds: of a step, the mean, checkpoints included, without the first ones; None where the trial failed.
        error: the last line of a trial that failed.
        losses: by step.
    """

    seconds: float | None = None
    error: str = ""
    losses: dict[int, float] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    profile: RunProfile | None = None
    findings: list[Finding] = field(default_factory=list)
    conclusion: str = ""


def run_trial(arguments: list[str], overrides: list[str], steps: int, folder: Path) -> Outcome:
    """The first `steps` steps of `python -m distill ARGUMENTS` with these overrides, in `folder`.

    Raises:
        Interrupted: a signal came that stops.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    more = [*overrides, *SETTINGS, f"profile.stop_after={steps}", f"hydra.run.dir={folder}"]
    log = folder.parent / f"{folder.name}.log"
    with log.open("wb") as output:
        status = _wait([sys.executable, "-m", "distill", *arguments, *more], output)
    if status:
        lines = log.read_text(errors="replace").strip().splitlines()
        return Outcome(error=(lines or [f"status {status}"])[-1].removeprefix("distill: "))
    return _read(folder)


def _wait(command: list[str], output: Any) -> int:
    with handled() as signals, pass_signals(signals) as processes:
        process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=dying_with(os.getpid()))
        processes.append(process)
        status = process.wait()
        stopped = [number for number in signals.received if number in STOPPING]
        signals.received.clear()
    if stopped:
        raise Interrupted("stopped between trials: no override is recommended", stopped[0])
    return status


def _read(folder: Path) -> Outcome:
    profile, content = profiling.read(folder)
    summary = content["summary"]
    fields = Finding.__dataclass_fields__
    return Outcome(
        seconds=float(Figures(profile).with_checkpoints.mean()),
        losses={int(line["step"]): float(line["loss/total"]) for line in read_lines(folder / "metrics.jsonl")},
        identity=content["identity"],
        profile=profile,
        findings=[Finding(**{name: each[name] for name in fields}) for each in summary["findings"]],
        conclusion=summary["conclusion"],
    )
