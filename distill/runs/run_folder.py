"""The folder of one run: who may write in it, whether it is finished, and where to resume."""

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distill.distributed import Ranks
from distill.distributed.rank_identity import refuse_differing_ranks
from distill.runs.checkpoint import Checkpoints
from distill.runs.checkpoint_files import RECORD, STEP, read_record
from distill.runs.facts import Best, HistoryPoint
from distill.runs.identity import Identity, refuse_other_settings
from distill.runs.record import Record
from distill.runs.results_file import check_student, is_continued, read_results, student_digests, write_results
from distill.runs.run_files import HISTORY, LAYERS, file_of_another
from distill.runs.state import State
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import MANIFEST, atomic, make_folder, quarantine, remove, try_lock
from distill.runtime.jsonl import JsonLines, LogLine, read_lines
from distill.runtime.rank import BY_TORCHRUN

FORMER_RANK = 60.0  # seconds for the rank 0 of an earlier start by torchrun, on a host that was cut off, to end
CHOICES = ("auto", "strict", "never")  # of `resume`, besides the folder of a checkpoint

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
        self._is_new = not path.exists()
        self._damaged: list[Path] = []  # what is renamed once the run begins

    def __enter__(self) -> "RunFolder":
        """Keep others out while this run writes.

        Raises:
            SettingError: another process is at work here, or the folder holds a run although `resume` is never, or
                files of somebody else's.
        """
        self.ranks.decide(self._enter)
        return self

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

        Empty where there is none to resume, nor a finished one.

        Raises:
            SettingError: as `start`.
        """

        def of_finished() -> dict[str, Any] | None:
            """Without a look at all of a checkpoint, which nobody may need again."""
            if self.resume not in CHOICES or self._results is None:
                return None
            formats, newest = self._results.precision, self.checkpoints.newest()
            with suppress(SettingError, OSError, ValueError, KeyError):
                formats = formats if newest is None else read_record(newest)["precision"]
            return {"formats": formats, "layers": self._layers(self.path)}

        if (found := self.ranks.decide(of_finished)) is not None:
            return dict(found)
        start = self.start

        def read() -> dict[str, Any]:
            if start is None:
                return {}
            formats = read_record(start)["precision"]
            return {"formats": formats, "layers": self._layers(start.parent.parent)}  # perhaps of another folder

        recorded: dict[str, Any] = self.ranks.decide(read)
        return recorded

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
            record = self._finished(total_steps, length)
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
        if not self.ranks.decide(lambda: any((named / name).exists() for name in (RECORD, MANIFEST))):
            raise SettingError(
                f"resume={self.resume} holds no checkpoint: name one, such as runs/NAME/checkpoints/step-N"
            )
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
            own = [path for path in self.checkpoints.saved() if path not in self._damaged]
            return [str(path) for path in own if besides is None or path.resolve() != besides.resolve()]

        while found := self.ranks.decide(saved):
            try:
                self.checkpoints.check(newest := Path(found[-1]))
                return newest
            except Damaged as damage:
                self._give_up(damage, f"taking {Path(found[-2]).name}" if found[1:] else otherwise)
        return None

    def _give_up(self, damage: Damaged, then: str, begun: bool = False) -> None:
        """Let rank 0 set aside what all ranks have found damaged. Raises SettingError with `resume=strict`."""
        self.ranks.decide(lambda: self._set_aside(damage, then, begun))

    def beginning(self) -> str | None:
        """The checkpoint that this run has begun from, where `resume` names, or has named, one."""
        if self.start is None:
            return None
        if self.resume not in CHOICES and self.start == (named := Path(self.resume).expanduser()):
            return str(named.resolve())
        began: str | None = read_record(self.start)["began_from"]
        return began

    def _layers(self, run: Path) -> dict[str, Any]:
        """The `layers` that `begin` was given when the run in this folder began; empty where they are not recorded."""
        with suppress(FileNotFoundError, ValueError):
            layers = json.loads((run / LAYERS).read_text(encoding="utf-8"))
            if isinstance(layers, dict) and isinstance(layers.get("layers"), list):
                return layers
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
        for damaged in filter(os.path.lexists, self._damaged):
            quarantine(damaged)
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
    def _logs(self) -> dict[Path, Callable[[LogLine], object] | None]:
        """The logs, each with what checks its lines."""
        return {self.metrics_path: None, self.history_path: HistoryPoint.of}

    def _evaluated_steps(self) -> list[Any]:
        """The steps of the good lines of history.jsonl. Raises SettingError for any bad log with `resume=strict`."""
        if self.resume == "strict":
            for path, check in self._logs.items():
                try:
                    read_lines(path, check=check)
                except Damaged as damage:
                    self._set_aside(damage, "keeping its good lines")
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
                self._give_up(damage, "taking the best of the other evaluations", begun=True)
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
        self._lock()

    def _set_aside(self, damage: Damaged, then: str, begun: bool = False) -> None:
        """Log what is damaged, and rename it, or leave that to `begin`. Raises the damage itself with `resume=strict`.

        Args:
            begun: whether the folder is the run's already.
        """
        if self.resume == "strict":
            raise SettingError(f"resume=strict: {damage}: set resume=auto to quarantine it and continue by {then}")
        logger.warning(f"{damage}; it will be kept as damaged-{damage.path.name}; {then}")
        if begun:
            quarantine(damage.path)
        else:
            self._damaged.append(damage.path)

    def _finished(self, total_steps: int, length: dict[str, Any]) -> Record | None:
        if (record := self._results) is None:
            return None
        steps, damage, here = record.training.steps or 0, None, f"hydra.run.dir={self.path}"
        is_longer = record.training.length != length and steps < total_steps
        refuse_other_settings(record.identity, self.identity, here, is_longer)
        cure = "go back to its length, or begin another run from its student, with "
        cure += f"student=pretrained student.path={self.path} hydra.run.dir=DIR"
        if not is_longer:
            try:
                check_student(self.path, record)
                return record
            except Damaged as found:
                damage, cure = found, "remove results.json to train it again, or choose another folder"
        if self.resume in CHOICES and self.checkpoints.newest() is None:
            what = f"a finished run of {steps:,} steps" + (f", but {damage}" if damage else "")
            raise SettingError(f"{here} holds {what}, and there is no checkpoint to continue it from: {cure}")
        if damage is not None:
            self._set_aside(damage, "making the student again from the newest checkpoint")
        return None

    @cached_property
    def _results(self) -> Record | None:
        """The record in results.json; None where there is none that is whole."""
        try:
            record = read_results(self.results_path)
            if not record.identity or record.training.steps is None:
                raise Damaged(self.results_path, "it has no identity, or no number of steps")
            return record
        except FileNotFoundError:
            return None
        except Damaged as damage:
            self._set_aside(damage, "making it again from the newest checkpoint")
            return None

    def _open_log(self, path: Path) -> JsonLines:
        """A log with its good lines alone; the log as it was is renamed where it has others."""
        check = self._logs[path]
        try:
            read_lines(path, check=check)
        except Damaged as damage:
            good = read_lines(path, only_good=True, check=check)
            self._set_aside(damage, f"keeping its {len(good)} good lines", begun=True)
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
