"""Runs from a script or a notebook, with the settings, folders and results of the command."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distill.commands.api.process import in_notebook, process_as_before, raise_expected
from distill.runtime.errors import Diverged, Interrupted, RankLost, SettingError, StorageFailed, raising_at_the_call

if TYPE_CHECKING:
    from distill.commands.api.run_results import RunResults
    from distill.config.composition import ComposedRun
    from distill.config.in_memory import InMemory

# The errors that end a run, by the exit status of the command. A chain's stage has a status of its own.
ENDINGS = {kind.status: kind for kind in (SettingError, Diverged, RankLost, StorageFailed)}


@raising_at_the_call
def run(overrides: Sequence[str] = ()) -> "RunResults":
    """Distil as `python -m distill` does with these arguments, into the same run folder, and return the results.

    A run of one rank trains in this process. For several ranks (`backend=ddp backend.processes=2`) this starts the
    command and prints its output. A second call with the same overrides resumes where the first stopped, or returns the
    results of the finished run. Relative paths are relative to the working directory. The global state of torch and
    Hydra is restored afterwards. An interrupt saves a checkpoint first.

    Args:
        overrides: one string for each argument, such as `["+recipe=distilbert_gutenberg", "corpus.path=BOOKS",
            "hydra.run.dir=runs/first"]`; also `--config-dir=DIR`, a folder with recipes of yours.

    Returns:
        The results, which a notebook shows as a table.

    Raises:
        SettingError: bad input, in one line that names the setting, its value and the cure; also for a sweep or a
            chain, which are several runs.
        Diverged, RankLost, StorageFailed: where the command would end with status 3, 4 or 74.
        Interrupted: a signal ended the run (a subclass of KeyboardInterrupt); the same call resumes.
    """
    if isinstance(overrides, str):
        raise SettingError(f"overrides={overrides} is one string: give a list, such as ['+recipe=smoke', 'seed=1']")
    return run_arguments([str(override) for override in overrides], {})


def run_arguments(arguments: list[str], objects: Mapping[str, "InMemory"]) -> "RunResults":
    """The run of a command line in which objects of this program stand in the places of settings.

    Raises:
        SettingError: as `run`; also where it would have to start other processes, which do not have the objects.
    """
    from distill.config.command_line import CommandLine, run_dir
    from distill.config.composition import composed_run

    folder = ""
    try:
        job = composed_run(arguments, objects)
        folder = str(job.folder)
        if _has_several_ranks(job):
            if objects:
                raise _no_launch(job, objects)
            line = CommandLine.of(arguments)
            _run_command([*line.overrides, run_dir(job.folder), *line.config_dir])  # its name may hold the time
            return open_run(job.folder)
        return _run_here(job)
    except Exception as error:
        raise_expected(error, folder)


@raising_at_the_call
def open_run(folder: str | Path) -> "RunResults":
    """The results of a finished run, from its folder. Raises SettingError where there is none."""
    from distill.commands.api.run_results import RunResults
    from distill.runs.results_file import read_run

    return RunResults(Path(folder).expanduser(), read_run(Path(folder), "folder", continued=True))


def _has_several_ranks(job: "ComposedRun") -> bool:
    """Whether this process has to start the ranks, because no launcher has started it as one of them."""
    from distill.distributed import launch
    from distill.runs.check import check

    if job.config.backend.name == "single":
        return False
    check(job.config, job.folder)
    return launch.should_launch(job.config.backend)


def _no_launch(job: "ComposedRun", objects: Mapping[str, "InMemory"]) -> SettingError:
    names = ", ".join(name.removesuffix("._target_") for name in objects)
    backend = job.config.backend
    launcher = "horovodrun -np" if backend.name == "horovod" else "torchrun --nproc-per-node"
    return SettingError(
        f"backend.processes={backend.processes} would start processes that lack what is in memory here ({names}): "
        f"start this program as `{launcher} {backend.processes} PROGRAM.py`, where every rank calls distill.distill()"
    )


def _run_here(job: "ComposedRun") -> "RunResults":
    from distill.commands.api.run_results import RunResults
    from distill.config.settings import OnUsr1
    from distill.job import run_job
    from distill.runtime.signals import handled

    with ExitStack() as stack:
        signals = stack.enter_context(handled())
        signals.on_usr1(job.config.train.on_usr1 is OnUsr1.stop)
        stack.enter_context(process_as_before())
        record = run_job(*job)
    # A run that ends with its profile leaves no results.json.
    if (job.folder / "results.json").is_file():
        return open_run(job.folder)
    return RunResults(job.folder, record)


def _run_command(arguments: list[str]) -> None:
    """Run the command as a process without a terminal, and print its output here, line by line."""
    from distill.runtime.signals import start

    command = [sys.executable, "-m", "distill", *arguments]
    process = start(
        command,
        os.environ | {"PYTHONPATH": _import_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    last, stream = "", sys.stdout if in_notebook(sys.stderr) else sys.stderr
    assert process.stdout is not None
    status: int | None = None
    try:
        while status is None:
            try:
                for line in process.stdout:
                    stream.write(line)
                    stream.flush()
                    last = line.removeprefix("distill: ").strip() if line.startswith("distill: ") else last
                status = process.wait()
            except KeyboardInterrupt:  # the command gets it too, saves, and reports in its last line how it has ended
                process.send_signal(signal.SIGINT)
    finally:
        if status is None:  # its output cannot be shown any more
            process.terminate()
    if status:
        _raise(status if status > 0 else 128 - status, last)


def _raise(status: int, message: str) -> NoReturn:
    """Raise the error that ended a command with this exit status and last line."""
    message = message or f"the command ended with status {status}; its output has the reason"
    if status in ENDINGS:
        raise ENDINGS[status](message)
    if 128 < status <= 128 + signal.NSIG:
        raise Interrupted(message, status - 128)
    raise RuntimeError(message)


def _import_path() -> str:
    """The import path of this process, for a child that imports the same modules."""
    package = str(Path(__file__).resolve().parent.parent.parent.parent)
    return os.pathsep.join(dict.fromkeys([package, *(os.path.abspath(entry) for entry in sys.path)]))
