"""Sweeps and searches: Hydra runs them, each run in a folder named by what is swept, and a page compares them."""

import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from distill.config import CONF
from distill.config.command_line import BASE, CommandLine
from distill.config.override_text import as_value, parse_override
from distill.runtime.errors import Interrupted, SettingError, first_line
from distill.runtime.host import storage_failure
from distill.runtime.progress import write_to
from distill.runtime.redaction import redact

if TYPE_CHECKING:
    from distill.config.compose import Composition

BASIC = "basic"  # Hydra's own sweeper, which runs every value that is given
EVERY = 60  # seconds between two pages while runs are active
LONGEST = 120  # bytes of a folder's name; file systems take 255, and some that encrypt 143

logger = logging.getLogger(__name__)


class RunFailed(Exception):
    """A run of a sweep has ended by an error, which it has reported; its argument is the exit status for it."""


def folder_name(swept: str) -> str:
    """The folder of a run, the same each time: what is swept, with signs that no path has as in URLs, or its hash.

    Args:
        swept: the overrides that differ between the runs, sorted, with commas between them.
    """
    name = re.sub(r"[/\\%$\x00-\x1f\x7f]", lambda sign: f"%{ord(sign[0]):02X}", swept) or "only"
    encoded = os.fsencode(name)
    return name if len(encoded) <= LONGEST else hashlib.sha256(encoded).hexdigest()[:16]


def _swept(*, _root_: Any) -> str:
    """As they were given: a value that refers to the environment may be a secret."""
    return folder_name(str(OmegaConf.to_container(_root_.hydra.job, resolve=False)["override_dirname"]))  # type: ignore[index, call-overload]


# Here, so that it is there in the processes of launchers too, which import this module for the callback.
OmegaConf.register_new_resolver("sweep_folder", _swept, replace=True)


def by_hydra(line: CommandLine, task: Callable[[Any], float | None]) -> None:
    """Let Hydra read a command line: it prints what is asked for, or calls `task` with the settings of each run.

    Raises:
        Exception: of Hydra, in its own classes, and what `task` raises.
    """
    import hydra

    from distill.config.compose import register

    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through, which get one line
    given = sys.argv[1:]
    sys.argv[1:] = line.arguments  # which is what Hydra reads
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=BASE)(task)()
    finally:
        sys.argv[1:] = given


def run_sweep(line: CommandLine, composition: "Composition", task: Callable[[Any], float | None]) -> int:
    """Run a sweep or a search; returns the exit status of the first run that failed; the others still run.

    Args:
        task: makes a run and returns the number that a search optimizes; launchers send it to other processes.
    """
    check_sweep(composition)
    params = [f"{name}={value}" for name, value in (composition.hydra.sweeper.get("params") or {}).items()]
    # Of a name that comes twice the last one holds.
    swept = {each.key_or_group: each.is_sweep_override() for each in [*map(parse_override, params), *line.parsed()]}
    fixed = ",".join(as_value(name) for name, is_swept in swept.items() if not is_swept)
    folder = composition.sweep_folder
    own = [
        f"hydra.sweep.dir={as_value(str(folder))}",
        f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]",  # of the names of folders
    ]
    status, goal = 0, composition.settings.get("optimize")
    try:
        by_hydra(replace(line, overrides=[*line.overrides, *own]), task)
    except RunFailed as failed:
        status = int(failed.args[0])
    except Interrupted:
        write_to(sys.stdout, write_page(folder, goal))
        raise
    write_to(sys.stdout, write_page(folder, goal))  # Hydra calls `on_multirun_end` only where no run has failed
    return status


def check_sweep(composition: "Composition") -> None:
    """Raises SettingError for the folder of one run, or a search without a number to choose by."""
    from distill.config.compose import overrides_of

    if any(text.startswith("hydra.run.dir=") for text in overrides_of(composition.hydra, "hydra")):
        cure = "a sweep has hydra.sweep.dir=DIR, with a folder in it for each run"
        raise SettingError("names the folder of one run", setting="hydra.run.dir", cure=cure)
    sweeper = composition.hydra.runtime.choices.get("hydra/sweeper")
    if sweeper != BASIC and composition.settings.get("optimize") is None:
        problem = f"the sweeper {sweeper} chooses by a number of each run"
        cure = "set optimize=perplexity, or another number of the results"
        raise SettingError(problem, setting="optimize", value="null", cure=cure)


class SweepPage(Callback):
    """Compares the runs so far when one has ended, at most once a minute, in whatever process that was."""

    def on_job_end(self, config: DictConfig, job_return: Any, **_: Any) -> None:
        from distill.report.comparison.compare import HTML

        # Hydra prints them of a run that failed.
        job_return.overrides[:] = [redact(text) for text in job_return.overrides]
        page = Path(config.hydra.sweep.dir, HTML)
        if not page.exists() or time.time() - page.stat().st_mtime >= EVERY:
            write_page(page.parent, config.get("optimize"), EVERY)


def write_page(folder: Path, goal: str | None, renew: int | None = None) -> str:
    """Write the comparison of a sweep's runs; a failure ends no sweep, as `distill compare` can write it later.

    Args:
        goal: the number that orders them.
        renew: seconds until the page is loaded again, while runs are active.

    Returns:
        The table to print, and where the page is.
    """
    from distill.report.comparison.compare import HTML, ComparedRuns
    from distill.report.comparison.runs import find_runs

    title = f"Sweep {folder.name}" + (", so far" if renew else "")
    try:
        compared = ComparedRuns(find_runs([str(folder)]), goal, "optimize")
        compared.write_pages(folder, title, renew)
    except Exception as error:
        if renew is None:
            logger.warning(f"No comparison: {storage_failure(error) or first_line(error)}")
        return ""
    return f"{compared}\nComparison: {folder / HTML}\n"
