"""Runs from a script or a notebook, with the settings and folders of the command, and the results as an object."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.commands.ending import expected
from distill.config.models import BUNDLED
from distill.config.settings import OnUsr1
from distill.report.page import render, table_text
from distill.report.summary import comparison, findings
from distill.runs.record import Record
from distill.runs.results_file import read_run
from distill.runtime.errors import Damaged, SettingError, first_line, raising_at_the_call
from distill.runtime.files import read_yaml
from distill.runtime.jsonl import LogLine, read_lines
from distill.runtime.progress import counted
from distill.runtime.redaction import redact
from distill.runtime.signals import handled

if TYPE_CHECKING:
    from distill.config.compose import ComposedRun
    from distill.report.chart import Chart


@dataclass(frozen=True, repr=False, eq=False)
class RunResults:
    """The results of a finished run, which show themselves: as a table in a shell, and the same as HTML in a notebook.

    Attributes:
        folder: of the run.
        record: all that it has recorded.
    """

    folder: Path
    record: Record

    @property
    def scores(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """By model (teacher, student, baseline), measure and set: `scores["student"]["perplexity"]["books"]`."""
        return {
            name: {measure: dict(model.scores[measure]) for measure in self.record.measures if measure in model.scores}
            for name, model in self.record.models().items()
        }

    @cached_property
    def content(self) -> dict[str, Any]:
        """All of results.json, as a dict."""
        return self.record.to_json()

    @property
    def student(self) -> Path:
        """The folder of the student, for `distill.predict`, `distill.score`, transformers and as a teacher."""
        return self.folder / "student"

    @property
    def teacher(self) -> str | None:
        """The folder or Hub name of the teacher; None for none, for several, or for one of a class of your own."""
        from distill.models.load import bundled_folder

        teacher = self.settings.get("teacher") or {}
        path: str | None = teacher.get("path") if teacher.get("_target_") is None else None
        return bundled_folder(path) if path in BUNDLED else path

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings of the run, as in config.yaml. Raises Damaged where that cannot be read."""
        file = self.folder / "config.yaml"
        try:
            return dict(read_yaml(file))
        except (OSError, ValueError, TypeError) as error:
            raise Damaged(file, first_line(error)) from None

    @cached_property
    def metrics(self) -> list[LogLine]:
        """One dict for each logged step: losses by term as `loss/NAME`, lr, grad_norm, tokens_per_second and others."""
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def history(self) -> list[LogLine]:
        """One dict for each evaluation in the course of the training."""
        return list(self.content["history"])

    @property
    def report(self) -> Path:
        """The page with tables, curves and settings."""
        return self.folder / "report.html"

    def plot(self) -> "Chart":
        """Losses by step, and the first measure by evaluation beside its teacher's value, as a matplotlib figure."""
        from distill.report.chart import chart

        return chart(self.record, self.metrics)

    def __repr__(self) -> str:
        return "\n".join([self._title, table_text(comparison(self.record)), f"Report: {self.report}"])

    def _repr_html_(self) -> str:
        """For notebooks."""
        table, sentences = comparison(self.record), findings(self.record)
        return render("results.html", title=self._title, findings=sentences, table=table, report=self.report)

    @property
    def _title(self) -> str:
        steps = self.record.training.steps
        after = "" if steps is None else f" after {counted(steps, 'step')}"
        return f"{self.record.recipe or 'run'} in {self.folder}{after}"


@raising_at_the_call
def run(overrides: Sequence[str] = ()) -> RunResults:
    """Distil as `python -m distill` does with these arguments, into the same run folder, and return the results.

    Every rank of a launcher such as torchrun calls this. A second call with the same overrides resumes where the first
    stopped, or returns the results of the finished run. An interrupt saves a checkpoint first.

    Args:
        overrides: one string for each argument, such as `["+recipe=distilbert_gutenberg", "corpus.path=BOOKS",
            "hydra.run.dir=runs/first"]`; also `--config-dir=DIR`, a folder with recipes of yours.

    Raises:
        SettingError: bad input, in one line that names the setting, its value and the cure; also for a sweep or a
            chain, which are several runs, and for ranks that no launcher has started.
        Diverged, RankLost, StorageFailed: where the command would end with status 3, 4 or 74.
        Interrupted: a signal ended the run (a subclass of KeyboardInterrupt); the same call resumes.
    """
    if isinstance(overrides, str):
        raise SettingError(f"overrides={overrides} is one string: give a list, such as ['+recipe=smoke', 'seed=1']")
    from distill.config.compose import composed_run

    with errors_for_programs():
        job = composed_run([str(override) for override in overrides])
    return run_here(job)


@raising_at_the_call
def open_run(folder: str | Path) -> RunResults:
    """The results of a finished run, from its folder. Raises SettingError where there is none."""
    return RunResults(Path(folder).expanduser(), read_run(Path(folder), "folder", continued=True))


def run_here(job: "ComposedRun") -> RunResults:
    """Run a job in this process. Raises as `run`; also where this process would have to start ranks, as commands do."""
    from distill.distributed.launch import num_processes, should_launch
    from distill.job import run_job

    backend = job.config.backend
    with errors_for_programs(str(job.folder)):
        if should_launch(backend):
            launcher = "horovodrun -np" if backend.name == "horovod" else "torchrun --nproc-per-node"
            ranks = num_processes(backend)
            cure = f"start this program as `{launcher} {ranks} PROGRAM.py`, where every rank makes this call"
            problem = "a program does not start other processes"
            raise SettingError(problem, setting="backend.processes", value=ranks, cure=cure)
        with handled() as signals, output_for_programs():
            signals.on_usr1(job.config.train.on_usr1 is OnUsr1.stop)
            record = run_job(*job)
        # A run that ends with its profile leaves no results.json.
        return open_run(job.folder) if (job.folder / "results.json").is_file() else RunResults(job.folder, record)


@contextmanager
def errors_for_programs(folder: str = "") -> Iterator[None]:
    """Within it bad input is raised as one line and failing storage as StorageFailed; bugs stay as they are.

    Args:
        folder: where the call writes.
    """
    try:
        yield
    except Exception as error:
        failure = expected(error, folder)
        if isinstance(failure, SettingError) and (failure is not error or redact(str(error)) != str(error)):
            raise SettingError(redact(str(failure))) from None  # notebooks are handed on with what they show
        if failure is None or failure is error:
            raise
        raise failure from error


@contextmanager
def output_for_programs() -> Iterator[None]:
    """Messages once, without the program's own handlers, and in a notebook not in the red block of standard error."""
    package = logging.getLogger("distill")
    before = package.propagate, list(package.handlers)
    package.propagate = False
    is_notebook = type(sys.stderr).__module__.partition(".")[0] == "ipykernel"
    try:
        with redirect_stderr(sys.stdout) if is_notebook else nullcontext():
            yield
    finally:
        package.propagate, package.handlers = before
