"""The folder of one run: who may write in it, whether it is finished, and where to resume."""

import json
import logging
import os
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distill.distributed import Ranks
from distill.distributed.rank_identity import refuse_differing_ranks
from distill.runs.checkpoint import Checkpoints
from distill.runs.checkpoint_files import STEP, read_record
from distill.runs.facts import Best
from distill.runs.identity import refuse_other_settings
from distill.runs.record import Record
from distill.runs.results_file import check_student, is_continued, read_results, student_digests, write_results
from distill.runs.run_files import FILES, FOLDERS, HISTORY, LAYERS, file_of_another
from distill.runs.state import State
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import atomic, make_folder, quarantine, remove, try_lock
from distill.runtime.jsonl import JsonLines, read_lines
from distill.runtime.rank import BY_TORCHRUN

FORMER_RANK = 60.0  # seconds for the rank 0 of an earlier start by torchrun, on a host that was cut off, to end
CHOICES = ("auto", "strict", "never")  # of `resume`, besides the folder of a checkpoint

logger = logging.getLogger(__name__)


class RunFolder:
    """config.yaml, the logs, checkpoints/, snapshots/, student/, results.json, report.*, plots.

    What is damaged in it is named and renamed to `damaged-NAME`, and what came before it stands in: the checkpoint
    before, or the good lines of a log. With `resume=strict` it ends the run instead. Rank 0 decides for all.
    """

    def __init__(self, path: Path, resume: str, identity: dict[str, Any], keep: int, ranks: Ranks) -> None:
        """`identity`: what the trained student depends on."""
        self.path, self.resume, self.identity, self.ranks = path, resume, identity, ranks
        self.writes = ranks.rank == 0
        self.metrics_path, self.results_path = path / "metrics.jsonl", path / "results.json"
        self.history_path = path / HISTORY  # a line for each evaluation: the mean losses since the one before, scores
        self.snapshots_path = path / "snapshots"
        self.checkpoints = Checkpoints(path / "checkpoints", keep, identity, ranks)
        self._is_new = not path.exists()

    def __enter__(self) -> "RunFolder":
        """Keep others out while this run writes.

        Raises:
            SettingError: the ranks are about to train different things, another process is at work here, or the
                folder holds a run although `resume` is never.
        """
        refuse_differing_ranks(self.identity, self.ranks)
        self.ranks.decide(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        """Let others in again; of a folder in which nothing was written but the lock, nothing stays."""
        if not self.writes:
            return
        if self._is_new and [file.name for file in self.path.iterdir()] == [".lock"]:
            remove(self.path)
        self._lock_file.close()

    def load_finished_record(self, total_steps: int, length: dict[str, Any]) -> Record | None:
        """The record, when results.json is there of this run and as long; None when there is more to do.

        There is also where the student is no longer as the run left it, and a checkpoint can make it again.

        Args:
            total_steps: after which this run ends.
            length: its limits in epochs, steps and minutes.

        Raises:
            SettingError: the folder holds the finished run of other settings, or one that has lost its student and its
                checkpoints.
        """

        def stored() -> Any:
            record = self._load_finished_record(total_steps, length)
            return None if record is None else record.to_json()

        content = self.ranks.decide(stored)  # other ranks get it as JSON
        return None if content is None else Record.from_json(content)

    def leave_finished(self, record: Record, resolved: str) -> Record:
        """Log that there is nothing to do, and give the record; a continuation that had begun ends."""
        if self.writes and is_continued(self.path, record):
            with atomic(self.path / "config.yaml") as new:
                new.write_text(resolved, encoding="utf-8")  # which has its length again
        logger.info(f"This run is finished and nothing was changed: {self.path / 'report.html'}")
        return record

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
        if newest is not None and read_record(newest)["began_from"] == str(named.resolve()):
            return newest
        try:
            self.checkpoints.check(named)
        except Damaged as damage:
            raise SettingError(
                f"resume={damage}: name another checkpoint, such as runs/NAME/checkpoints/step-N, or take resume=auto"
            ) from None
        if newest is not None and named.resolve().parent != self.checkpoints.folder.resolve():
            raise SettingError(
                f"resume={self.resume} would discard what is in hydra.run.dir={self.path}, whose {newest.name} did "
                "not begin from that checkpoint: take resume=auto to continue it, or choose another hydra.run.dir"
            )
        return named

    def _newest(self, otherwise: str, besides: Path | None = None) -> Path | None:
        """The newest whole checkpoint `besides` one. Sets damaged ones aside; `otherwise`: what is done without any."""

        def saved() -> list[str]:
            own = self.checkpoints.saved()
            return [str(path) for path in own if besides is None or path.resolve() != besides.resolve()]

        while found := self.ranks.decide(saved):
            try:
                self.checkpoints.check(newest := Path(found[-1]))
                return newest
            except Damaged as damage:
                then = f"taking {Path(found[-2]).name}" if found[1:] else otherwise
                self._give_up(damage, then)
        return None

    def _give_up(self, damage: Damaged, then: str) -> None:
        """Let rank 0 set aside what all ranks have found damaged. Raises SettingError with `resume=strict`."""
        self.ranks.decide(lambda: self._quarantine(damage, then))

    def recorded_precision(self) -> dict[str, Any]:
        """The number formats that the checkpoint to resume from was trained in; empty where there is none."""
        recorded: dict[str, Any] = self._record_of_start.get("precision", {})
        return recorded

    @cached_property
    def _record_of_start(self) -> dict[str, Any]:
        return read_record(self.start) if self.start else {}

    def beginning(self) -> str | None:
        """The checkpoint that this run has begun from, where `resume` names, or has named, one."""
        named = Path(self.resume).expanduser()
        if self.resume not in CHOICES and self.start == named:
            return str(named.resolve())
        return self._record_of_start.get("began_from")

    def recorded_layers(self) -> dict[str, Any]:
        """The `layers` that `begin` was given when the run to resume began; empty where they are not recorded."""
        start = self.start  # on all ranks; its run may have another folder
        recorded: dict[str, Any] = self.ranks.decide(lambda: self._layers(start.parent.parent) if start else {})
        return recorded

    def _layers(self, folder: Path) -> dict[str, Any]:
        try:
            layers = json.loads((folder / LAYERS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError:
            layers = None
        if isinstance(layers, dict) and isinstance(layers.get("layers"), list):
            return layers
        self._quarantine(Damaged(folder / LAYERS, "it does not list the student's layers"), "ignoring it")
        return {}

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """Load the checkpoint to resume from; step 0 where there is none. All ranks call it; no file changes.

        Raises:
            SettingError: on all ranks: the checkpoint is missing, damaged or of other settings, or a log is damaged,
                with `resume=strict`.
        """
        state = State() if self.start is None else self._load(self.start, model, optimizer)
        state.begin_start()
        if self.ranks.decide(lambda: state.step in self._evaluated_steps()) and self.start is not None:
            state.begin_interval()
        return state

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
        if start is None:
            self._keep_what_a_lost_start_left()
        with atomic(self.path / "config.yaml") as new:
            new.write_text(resolved, encoding="utf-8")
        if layers is not None:
            with atomic(self.path / LAYERS) as new:
                new.write_text(json.dumps(layers, indent=1), encoding="utf-8")
        self.metrics, self.history = map(self._open_log, self._logs)
        for log in (self.metrics, self.history):
            log.drop_after(-1 if start is None else state.step)  # a start that left no checkpoint may be another
        self.checkpoints.drop_after(state.step)
        if self.resume not in CHOICES and start != Path(self.resume).expanduser():
            logger.info(
                f"resume={self.resume}: this run started from that checkpoint before and continues after step "
                f"{state.step}; to start from the checkpoint again, set hydra.run.dir=DIR"
            )
        for later in self.snapshots_path.glob("step-*"):  # perhaps of another precision, or of code before an edit
            if (match := STEP.fullmatch(later.name)) and int(match[1]) > state.step:
                remove(later)
        if start is None:  # of a beginning that left no checkpoint, perhaps with other settings
            remove(self.snapshots_path)

    @property
    def _logs(self) -> list[Path]:
        return [self.metrics_path, self.history_path]

    def _evaluated_steps(self) -> list[Any]:
        """The steps of the good lines of history.jsonl. Raises SettingError for any bad log with `resume=strict`."""
        if self.resume == "strict":
            for path in self._logs:
                try:
                    read_lines(path)
                except Damaged as damage:
                    self._quarantine(damage, "keeping its good lines")
        return [line["step"] for line in read_lines(self.history_path, only_good=True)]

    def load_best(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Best | None:
        """Load the student of the best evaluation, from the best whole checkpoint of one; all ranks call it.

        Args:
            step: that the training has ended after, whose student is in `model` already.

        Returns:
            That evaluation; None where the run publishes the last student.

        Raises:
            Damaged: the checkpoint is, with `resume=strict`.
        """
        while True:
            chosen = self.ranks.decide(lambda: (best := self.checkpoints.best()) and best.model_dump())
            best = None if chosen is None else Best.model_validate(chosen)
            if best is None or best.step is None or best.step == step:
                return best
            path = self.checkpoints.path_of(best.step)
            try:
                self.checkpoints.check(path)
            except Damaged as damage:
                self._give_up(damage, "taking the best of the other evaluations")
            else:
                self._load(path, model, optimizer)
                return best

    def _load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """Load a checkpoint that was checked; all ranks call it, and get the error of any."""
        state: State = self.ranks.agree(lambda: self.checkpoints.load(path, model, optimizer))
        return state

    def write_results(self, record: Record) -> None:
        """Last of all and at once: a folder with results.json is a finished run."""
        write_results(self.results_path, record.changed(student_files=student_digests(self.path)))

    def _enter(self) -> None:
        if (other := file_of_another(self.path)) is not None:
            raise SettingError(
                f"hydra.run.dir={self.path} holds no run, but {other.name}, which a run would replace: choose another "
                "folder, or move it away"
            )
        holds_a_run = self.results_path.exists() or self.checkpoints.newest() or self.metrics_path.exists()
        if self.resume == "never" and holds_a_run:
            raise SettingError(
                f"resume=never, but hydra.run.dir={self.path} holds a run: choose another, or resume=auto to resume it"
            )
        make_folder(self.path, f"hydra.run.dir={self.path}")
        self._check_kinds([".lock"])
        self._lock()
        self._check_kinds([*FILES, *FOLDERS])

    def _check_kinds(self, names: list[str]) -> None:
        """Set aside folders where files belong, and files where folders do, in the folder of the run and in plots/."""
        plots = [path for path in (self.path / "plots").glob("*.png") if not path.name.startswith("damaged-")]
        for path in [*(self.path / name for name in names), *plots]:
            if path.exists() and path.is_dir() != (path.name in FOLDERS):
                self._quarantine(
                    Damaged(path, "it is a file" if path.name in FOLDERS else "it is a folder"), "making it anew"
                )

    def _quarantine(self, damage: Damaged, then: str) -> None:
        """Rename what is damaged and log it. Raises the damage itself with `resume=strict`."""
        if self.resume == "strict":
            raise SettingError(f"resume=strict: {damage}: set resume=auto to quarantine it and continue by {then}")
        remark = f"; it is kept as {quarantine(damage.path).name}" if os.path.lexists(damage.path) else ""
        logger.warning(f"{damage}{remark}; {then}")

    def _load_finished_record(self, total_steps: int, length: dict[str, Any]) -> Record | None:
        try:
            record = self._results()
        except Damaged as damage:
            self._quarantine(damage, "making it again from the newest checkpoint")
            return None
        if record is None:
            return None
        loads = (self.path / "student" / "config.json").is_file()  # without it, it is no model that a path names
        steps = record.training.steps
        assert steps is not None
        resumes = record.training.length != length and steps < total_steps
        refuse_other_settings(
            record.identity, self.identity, f"hydra.run.dir={self.path}", self.path if loads else None, resumes
        )
        if resumes:
            if not self._may_resume():
                raise SettingError(
                    f"hydra.run.dir={self.path} holds a finished run of {steps:,} steps, and there is no checkpoint to "
                    f"continue it from: go back to its length, or begin another run from its student, with "
                    f"student=pretrained student.path={self.path} hydra.run.dir=DIR"
                )
            return None
        try:
            if not (self.path / "student").is_dir():
                raise Damaged(self.path / "student", "there is no such folder")
            check_student(self.path, record)
            return record
        except Damaged as damage:
            if not self._may_resume():
                raise SettingError(
                    f"hydra.run.dir={self.path} holds a finished run, but {damage}, and there is no checkpoint to make "
                    "it from: remove results.json to train it again, or choose another folder"
                ) from None
            self._quarantine(damage, "making the student again from the newest checkpoint")
            return None

    def _may_resume(self) -> bool:
        """Whether there is a checkpoint, which may be damaged."""
        return self.resume not in CHOICES or self.checkpoints.newest() is not None

    def _results(self) -> Record | None:
        try:
            record = read_results(self.results_path)
        except FileNotFoundError:
            return None
        if not record.identity or record.training.steps is None:
            raise Damaged(self.results_path, "it has no identity, or no number of steps")
        return record

    def _open_log(self, path: Path) -> JsonLines:
        """A log with its good lines alone; the log as it was is renamed where it has others."""
        try:
            read_lines(path)
        except Damaged as damage:
            good = read_lines(path, only_good=True)
            self._quarantine(damage, f"keeping its {len(good)} good lines")
            log = JsonLines(path)
            for line in good:
                log.append(line)
            return log
        return JsonLines(path)

    def _keep_what_a_lost_start_left(self) -> None:
        """Set logs and snapshots aside where checkpoints were, because the run that begins writes others."""
        if any(self.checkpoints.folder.glob("damaged-step-*")):
            for path in (self.metrics_path, self.history_path, self.snapshots_path):
                if path.exists():
                    quarantine(path)

    def _lock(self) -> None:
        lock = self.path / ".lock"
        if lock.is_symlink() and not lock.exists():
            self._quarantine(Damaged(lock, "it is a link to nothing"), "making it anew")
        self._lock_file = lock.open("w")
        # torchrun may have started this rank again, while former ones are still ending on other hosts.
        until = time.monotonic() + (FORMER_RANK if BY_TORCHRUN in os.environ else 0)
        while not try_lock(self._lock_file):
            if time.monotonic() >= until:
                raise SettingError(
                    f"hydra.run.dir={self.path}: another process is at work in this folder; wait for it or choose "
                    "another"
                )
            time.sleep(0.2)
