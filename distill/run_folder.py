"""The folder of one run: who may write in it, whether it is finished, and where to resume."""

import fcntl
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distill.checkpoint import Checkpoints, State, read_record
from distill.errors import SettingError
from distill.files import atomic, remove
from distill.identity import refuse_other_settings
from distill.jsonl import JsonLines, read_lines, without_nan
from distill.objective.tally import Tally


class RunFolder:
    """config.yaml, metrics.jsonl, history.jsonl, checkpoints/, milestones/, student/, results.json, report.*, plots."""

    def __init__(self, path: Path, resume: str, identity: dict[str, Any], keep: int, writes: bool) -> None:
        """`identity`: what the trained student depends on; `writes`: this is rank 0."""
        self.path, self.resume, self.identity, self.writes = path, resume, identity, writes
        self.checkpoints = Checkpoints(path / "checkpoints", keep, identity)

    def __enter__(self) -> "RunFolder":
        """Keep others out while this run writes.

        Raises:
            SettingError: another process is at work here, or the folder holds a run although `resume` is never.
        """
        holds_a_run = self._results() or self.checkpoints.newest() or self.metrics_path.exists()
        if self.resume == "never" and holds_a_run:
            raise SettingError(
                f"resume=never, but hydra.run.dir={self.path} holds a run: choose another, or resume=auto to go on"
            )
        if self.writes:
            self._lock()
        return self

    def __exit__(self, *error: object) -> None:
        """Let others in again."""
        if self.writes:
            self._lock_file.close()

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def milestones_path(self) -> Path:
        return self.path / "milestones"

    @property
    def history_path(self) -> Path:
        """One line for each evaluation: the mean losses since the one before, and the scores."""
        return self.path / "history.jsonl"

    def finished(self, total_steps: int, length: dict[str, Any]) -> dict[str, Any] | None:
        """results.json, when the run that it describes is this one and as long; None when there is more to do.

        Args:
            total_steps: after which this run ends.
            length: its limits in epochs, steps and minutes.

        Raises:
            SettingError: the folder holds the finished run of other settings.
        """
        results = self._results()
        if results is None:
            return None
        refuse_other_settings(results.get("identity", {}), self.identity, f"hydra.run.dir={self.path}")
        training = results.get("training", {})
        return results if training.get("length") == length or training.get("steps", 0) >= total_steps else None

    def start(self) -> Path | None:
        """The checkpoint to resume from, if there is one."""
        return self.checkpoints.newest() if self.resume in ("auto", "never") else Path(self.resume).expanduser()

    def recorded_precision(self) -> dict[str, str]:
        """The number formats that the checkpoint to resume from was trained in; empty where there is none."""
        start = self.start()
        return read_record(start).get("precision", {}) if start else {}

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, resolved: str) -> State:
        """Load the checkpoint to resume from, if there is one, and open the logs after its step.

        Raises:
            SettingError: the checkpoint is missing, damaged or of other settings.
        """
        start = self.start()
        state = self.checkpoints.load(start, model, optimizer) if start else State()
        state.skipped_in_a_row = 0  # a run that diverged gets as many tries again
        if self.writes:
            (self.path / "config.yaml").write_text(resolved, encoding="utf-8")
            self.metrics, self.history = JsonLines(self.metrics_path), JsonLines(self.history_path)
            self.metrics.drop_after(state.step)
            self.history.drop_after(state.step)
            self.checkpoints.drop_after(state.step)
            if any(line["step"] == state.step for line in self.history_lines()):
                state.tally = Tally()  # these losses are reported already
            if self.resume not in ("auto", "never"):  # from a chosen checkpoint, perhaps with another precision
                for later in self.milestones_path.glob("step-*"):
                    if int(later.name.removeprefix("step-")) > state.step:
                        remove(later)
            if start is None:  # of a beginning that left no checkpoint, perhaps with other settings
                remove(self.milestones_path)
        return state

    def history_lines(self) -> list[dict[str, Any]]:
        return read_lines(self.history_path)

    def write_results(self, results: dict[str, Any]) -> None:
        """Last of all and at once: a folder with results.json is a finished run."""
        with atomic(self.path / "results.json") as new:
            new.write_text(json.dumps(without_nan(results), indent=1, allow_nan=False), encoding="utf-8")

    def _results(self) -> dict[str, Any] | None:
        try:
            results = json.loads((self.path / "results.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise SettingError(
                f"{self.path / 'results.json'} is damaged ({error}): delete it to finish the run anew"
            ) from None
        assert isinstance(results, dict)
        return results

    def _lock(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock_file = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingError(
                f"hydra.run.dir={self.path}: another process is at work in this folder; wait for it or choose another"
            ) from None
