"""The folder of one run: who may write in it, whether it is finished, and where to resume."""

import json
import logging
import os
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distill.distributed import Ranks
from distill.distributed.rank_identity import refuse_differing_ranks
from distill.runs.checkpoint import HISTORY, Checkpoints, read_record, step_of
from distill.runs.facts import Best, HistoryPoint
from distill.runs.identity import Identity, refuse_other_settings
from distill.runs.record import Record
from distill.runs.results_file import check_student, is_continued, read_results, student_digests, write_results
from distill.runs.state import State
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import make_folder, quarantine, remove, try_lock, write_text
from distill.runtime.jsonl import JsonLines, LogLine, read_lines
from distill.runtime.rank import BY_TORCHRUN

FORMER_RANK = 60.0  # seconds for the rank 0 of an earlier start by torchrun, on a host that was cut off, to end
CHOICES = ("auto", "strict", "never")  # of `resume`, besides the folder of a checkpoint
LOGS = {"metrics.jsonl": None, HISTORY: HistoryPoint.model_validate}  # what checks their lines
LAYERS = "layers.json"  # those that student.layers=auto has chosen, and how
OUTPUTS = ("student", "snapshots", "plots", "profile", "tensorboard", "config.yaml", LAYERS, "report.html", "report.md")

logger = logging.getLogger(__name__)


class RunFolder:
    """config.yaml, the logs, checkpoints/, snapshots/, student/, results.json, report.*, plots.

    What is damaged in it is named, and what came before it stands in: the checkpoint before, or the good lines of a
    log. Once the run begins to train, it is renamed to `damaged-NAME`; until then nothing in the folder changes but
    its lock. With `resume=strict` damage ends the run instead. Rank 0 decides for all.
    """

    def __init__(self, path: Path, resume: str, keep: int, ranks: Ranks) -> None:
        self.path, self.resume, self.keep, self.ranks = path, resume, keep, ranks
        self.writes = ranks.rank == 0
        self.metrics_path, self.results_path = path / "metrics.jsonl", path / "results.json"
        self.history_path = path / HISTORY  # a line for each evaluation: the mean losses since the one before, scores
        self.snapshots_path = path / "snapshots"
        self.identify({})
        self._is_new, self._has_begun = not path.exists(), False
        self._damaged: list[Path] = []  # what is renamed once the run begins
        self._lines: dict[str, list[LogLine]] = {}  # the good lines of each log

    def __enter__(self) -> "RunFolder":
        """Keep others out while this run writes.

        Raises:
            SettingError: another process is at work here, or the folder holds a run although `resume` is never, or
                files of somebody else's.
        """
        self.ranks.decide(self._enter)
        return self

    def _enter(self) -> None:
        begun = [self.path / name for name in ("results.json", "checkpoints", *LOGS) if (self.path / name).exists()]
        others = [] if begun or (self.path / ".lock").exists() else [self.path / name for name in OUTPUTS]
        if other := next(filter(os.path.lexists, others), None):
            raise SettingError(
                f"hydra.run.dir={self.path} holds no run, but {other.name}, which a run would replace: choose another "
                "folder, or move it away"
            )
        if self.resume == "never" and begun:
            raise SettingError(
                f"resume=never, but hydra.run.dir={self.path} holds a run: choose another, or resume=auto to resume it"
            )
        make_folder(self.path, f"hydra.run.dir={self.path}")
        self._lock_file = (self.path / ".lock").open("w")
        # torchrun may have started this rank again, while former ones are still ending on other hosts.
        until = time.monotonic() + (FORMER_RANK if BY_TORCHRUN in os.environ else 0)
        while not try_lock(self._lock_file):
            if time.monotonic() >= until:
                raise SettingError(
                    f"hydra.run.dir={self.path}: another process is at work in this folder; wait for it or choose "
                    "another"
                )
            time.sleep(0.2)

    def __exit__(self, *error: object) -> None:
        """Let others in again; of a folder in which nothing was written but the lock, nothing stays."""
        if not self.writes:
            return
        if self._is_new and [file.name for file in self.path.iterdir()] == [".lock"]:
            remove(self.path)
        self._lock_file.close()

    def identify(self, identity: Identity) -> None:
        """Take in what the trained student depends on, which checkpoints and results must have alike."""
        self.identity = identity
        self.checkpoints = Checkpoints(self.path / "checkpoints", self.keep, identity, self.ranks)

    @cached_property
    def recorded(self) -> dict[str, Any]:
        """What the run in the folder began with: `formats`, with threads, and `layers` that it has chosen.

        Empty where there is none to resume, nor a finished one, of which no checkpoint is looked at as a whole.

        Raises:
            SettingError: as `start`.
        """

        def of_finished() -> dict[str, Any] | None:
            if self.resume not in CHOICES or (results := self._results) is None:
                return None
            begun, formats = results.student.start, results.precision
            with suppress(SettingError, OSError, ValueError, KeyError):  # it may be damaged, and there may be none
                formats = read_record(self.checkpoints.newest() or self.path)["precision"]
            made = {"neurons": begun.neurons, "refit": begun.refit}
            of_layers = {name: part.model_dump() for name, part in made.items() if part is not None}
            layers = (begun.search or begun).model_dump() | of_layers if begun.layers else None
            return {"formats": formats, "layers": layers}

        def of_checkpoint() -> dict[str, Any]:
            record = {} if start is None else read_record(start)
            return {"formats": record["precision"], "layers": record["layers"]} if record else {}

        if (found := self.ranks.decide(of_finished)) is None:
            start = self.start
            found = self.ranks.decide(of_checkpoint)
        return dict(found)

    @cached_property
    def start(self) -> Path | None:
        """The whole checkpoint to resume from, if there is one; all ranks read it together.

        That is the newest, or the one that `resume` names, unless the run has gone on from that one.

        Raises:
            SettingError: the newest is damaged, with `resume=strict`, or the one that `resume` names is, or would
                discard others.
        """
        if self.resume in CHOICES:
            return self._newest("starting from the first step")
        named = Path(self.resume).expanduser()
        newest = self._newest(f"taking resume={self.resume}", besides=named)
        # Rank 0 decides, as another host may have other names for a folder.
        decide, start = self.ranks.decide, os.path.realpath(named)
        if newest is not None and decide(lambda: read_record(newest)["began_from"] == start):
            return newest
        try:
            self.checkpoints.check(named)
        except Damaged as damage:
            cure = "name another checkpoint, such as runs/NAME/checkpoints/step-N, or take resume=auto"
            raise SettingError(f"resume={damage}: {cure}") from None
        if newest is not None and decide(lambda: named.resolve().parent != self.checkpoints.folder.resolve()):
            raise SettingError(
                f"resume={self.resume} would discard what is in hydra.run.dir={self.path}, whose {newest.name} did "
                "not begin from that checkpoint: take resume=auto to continue it, or choose another hydra.run.dir"
            )
        return named

    def _newest(self, otherwise: str, besides: Path | None = None) -> Path | None:
        """The newest whole checkpoint `besides` one. Sets damaged ones aside; `otherwise`: what is done without any."""

        def saved() -> list[str]:
            own = [path for path in self.checkpoints.saved() if path not in self._damaged]
            return [str(path) for path in own if besides is None or os.path.realpath(path) != os.path.realpath(besides)]

        while found := self.ranks.decide(saved):
            newest = Path(found[-1])
            then = f"taking {Path(found[-2]).name}" if found[1:] else otherwise
            if self._is_whole(newest, then):
                return newest
        return None

    def _is_whole(self, checkpoint: Path, then: str) -> bool:
        """Whether a checkpoint is as it was written; one that is not is set aside. All ranks call it."""
        try:
            self.checkpoints.check(checkpoint)
        except Damaged as damage:
            found = damage  # the name goes with the block
            self.ranks.decide(lambda: self._set_aside(found, then))
            return False
        return True

    def beginning(self) -> str | None:
        """The checkpoint that this run has begun from, where `resume` names, or has named, one."""
        if self.start is None:
            return None
        if self.resume not in CHOICES and self.start == (named := Path(self.resume).expanduser()):
            return str(named.resolve())
        began: str | None = read_record(self.start)["began_from"]
        return began

    def finished(self, identity: Identity, total_steps: int, length: dict[str, Any]) -> Record | None:
        """The record, when results.json is there of this run and as long; None when there is more to do.

        There is also where the student is no longer as the run left it, and a checkpoint can make it again.

        Args:
            identity: of this run, as `identify` takes it.
            total_steps: after which this run ends.
            length: its limits in epochs, steps and minutes.

        Raises:
            SettingError: the ranks would train different things, or the folder holds the finished run of other
                settings, or one that has lost its student and its checkpoints.
        """
        refuse_differing_ranks(identity, self.ranks)
        self.identify(identity)

        def stored() -> Any:
            is_finished = self._results is not None and self._is_finished(self._results, total_steps, length)
            return self._results.to_json() if self._results is not None and is_finished else None

        content = self.ranks.decide(stored)  # other ranks get it as JSON
        return None if content is None else Record.from_json(content)

    def _is_finished(self, record: Record, total_steps: int, length: dict[str, Any]) -> bool:
        steps, here = record.training.steps or 0, f"hydra.run.dir={self.path}"
        is_longer = record.training.length != length and steps < total_steps
        refuse_other_settings(record.identity, self.identity, here, is_longer)
        what = f"a finished run of {steps:,} steps"
        cure = "go back to its length, or begin another run from its student, with "
        cure += f"student=pretrained student.path={self.path} hydra.run.dir=DIR"
        damage = None
        if not is_longer:
            try:
                check_student(self.path, record)
                return True
            except Damaged as found:
                damage, what = found, f"{what}, but {found}"
                cure = "remove results.json to train it again, or choose another folder"
        if self.resume in CHOICES and self.checkpoints.newest() is None:
            raise SettingError(f"{here} holds {what}, and there is no checkpoint to continue it from: {cure}")
        if damage is not None:
            self._set_aside(damage, "making the student again from the newest checkpoint")
        return False

    @cached_property
    def _results(self) -> Record | None:
        """The record in results.json; None where there is none that is whole."""
        try:
            return read_results(self.results_path)
        except FileNotFoundError:
            return None
        except Damaged as damage:
            self._set_aside(damage, "making it again from the newest checkpoint")
            return None

    def leave_finished(self, record: Record, resolved: str) -> Record:
        """Log that there is nothing to do, and give the record; a continuation that had begun ends."""
        if self.writes and is_continued(self.path, record):
            write_text(self.path / "config.yaml", resolved)  # which has its length again
        logger.info(f"This run is finished and nothing was changed: {self.path / 'report.html'}")
        return record

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """Load the checkpoint to resume from; step 0 where there is none. All ranks call it; no file changes.

        Raises:
            SettingError: on all ranks: the checkpoint is missing, damaged or of other settings, or a log is damaged,
                with `resume=strict`.
        """
        state = State() if self.start is None else self._load(self.start, model, optimizer)
        state.begin_start()
        if state.step in self.ranks.decide(self._read_logs) and self.start is not None:
            state.begin_interval()
        return state

    def _read_logs(self) -> list[Any]:
        """Take in the good lines of the logs; gives the steps that were evaluated."""
        for name, check in LOGS.items():
            try:
                self._lines[name] = read_lines(self.path / name, check=check)
            except Damaged as damage:
                self._lines[name] = read_lines(self.path / name, only_good=True, check=check)
                self._set_aside(damage, f"keeping its {len(self._lines[name])} good lines")
        return [line["step"] for line in self._lines[HISTORY]]

    def begin(self, state: State, resolved: str, layers: dict[str, Any] | None = None) -> None:
        """Make the folder that of this run, which trains from `state` on: what came after that step is dropped.

        Whatever may refuse the run comes before.

        Args:
            resolved: the settings, for config.yaml.
            layers: that the student starts from, where the run has chosen them, and how they were found.
        """
        start = self.start
        if not self.writes:
            return
        self._has_begun = True
        for damaged in filter(os.path.lexists, self._damaged):
            quarantine(damaged)
        if start is None and any(self.checkpoints.folder.glob("damaged-step-*")):  # the run begins anew
            for path in filter(Path.exists, (self.metrics_path, self.history_path, self.snapshots_path)):
                quarantine(path)
        write_text(self.path / "config.yaml", resolved)
        if layers is not None:
            write_text(self.path / LAYERS, json.dumps(layers, indent=1))
        last = -1 if start is None else state.step  # a start that left no checkpoint may be another
        for name in LOGS:
            kept = [json.dumps(line) for line in self._lines.pop(name) if line["step"] <= last]
            write_text(self.path / name, "".join(f"{line}\n" for line in kept))
        self.metrics, self.history = (JsonLines(self.path / name) for name in LOGS)
        for later in self.checkpoints.saved(after=state.step):
            remove(later)
        for snapshot in self.snapshots_path.glob("step-*"):  # perhaps of another precision, or of code before an edit
            if (step := step_of(snapshot)) is not None and step > last:
                remove(snapshot)
        if self.resume not in CHOICES and start != Path(self.resume).expanduser():
            logger.info(
                f"resume={self.resume}: this run started from that checkpoint before and continues after step "
                f"{state.step}; to start from the checkpoint again, set hydra.run.dir=DIR"
            )

    def load_best(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Best | None:
        """Load the student of the best evaluation, from the best whole checkpoint of one; all ranks call it.

        Args:
            step: that the training has ended after, whose student is in `model` already.

        Returns that evaluation; None where the run publishes the last student.

        Raises:
            SettingError: the checkpoint is damaged, with `resume=strict`.
        """
        while True:
            chosen = self.ranks.decide(lambda: (best := self.checkpoints.best()) and best.model_dump())
            best = None if chosen is None else Best.model_validate(chosen)
            if best is None or best.step is None or best.step == step:
                return best
            path = self.checkpoints.path_of(best.step)
            if self._is_whole(path, "taking the best of the other evaluations"):
                self._load(path, model, optimizer)
                logger.info(f"the student after step {best.step:,} is published, the best by train.keep_best")
                return best

    def _load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """Load a checkpoint that was checked; all ranks call it, and get the error of any."""
        state: State = self.ranks.agree(lambda: self.checkpoints.load(path, model, optimizer))
        return state

    def _set_aside(self, damage: Damaged, then: str) -> None:
        """Log what is damaged, and rename it, or leave that to `begin`. Raises it with `resume=strict`."""
        if self.resume == "strict":
            raise SettingError(f"resume=strict: {damage}: set resume=auto to quarantine it and continue by {then}")
        logger.warning(f"{damage}; it will be kept as damaged-{damage.path.name}; {then}")
        if self._has_begun:
            quarantine(damage.path)
        else:
            self._damaged.append(damage.path)

    def write_results(self, record: Record) -> None:
        """Last of all and at once: a folder with results.json is a finished run."""
        write_results(self.results_path, record.changed(student_files=student_digests(self.path)))
