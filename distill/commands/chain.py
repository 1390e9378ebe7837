"""Several jobs after each other from one recipe: each is a run of its own, and at the end one table compares them.

A stage is what `python -m distill +recipe=RECIPE SETTINGS` would run, in its own process and folder. So it can be
interrupted and resumed like any run, and a stage that is finished is not run again. A stage can be run for several
seeds.
"""

import json
import logging
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from distill.commands.ending import is_rank
from distill.config.command_line import run_dir
from distill.config.settings import ChainConfig, StageConfig
from distill.report import chain_report
from distill.report.chain_report import ChainPage
from distill.report.live import PAGE
from distill.report.page import is_written_here
from distill.runs.results_file import check_student, read_results
from distill.runtime.errors import SettingError, StageFailed
from distill.runtime.files import make_folder
from distill.runtime.progress import configure_logging
from distill.runtime.redaction import redact
from distill.runtime.signals import STOPPING, handled, start

REFERENCE = re.compile(r"\{(\w+)\}")  # in a setting: the folder of an earlier stage
STAGE = "chain_stage.json"  # in the folder of a run: the arguments that it was finished with

Runs = dict[int | None, Path]  # the folders of the runs of a stage, by their seeds; None: that of the recipe

logger = logging.getLogger(__name__)


def run_chain(chain: ChainConfig, path: Path, options: list[str]) -> str:
    """Run what is not finished yet, and write `chain.md` and `chain.json` into the folder `path`; gives the former.

    Args:
        options: of every command, such as --config-dir.

    Raises:
        SettingError: a stage that names a later one or none, or a table of stages that are not there.
        StageFailed: a job ended with another status than 0.
    """
    if is_rank():
        problem = "a chain starts its stages itself: run it as one process, with backend=ddp backend.processes=N in the"
        raise SettingError(f"{problem} settings of its stages")
    configure_logging(0)
    check_chain(chain)
    _refuse_files_of_others(chain, path)
    make_folder(path, f"hydra.run.dir={path}")
    runs = {name: runs_of(path / name, stage) for name, stage in chain.stages.items()}
    with ChainPage(path, [each for of_stage in runs.values() for each in of_stage.values()]) as page:
        for name, of_stage in runs.items():
            for seed, folder in of_stage.items():
                page.start(folder)
                _finish(name, chain.stages[name], seed, runs, options)
        results = {
            model: [[read_results(folder / "results.json") for folder in runs[name].values()] for name in stages]
            for model, stages in chain.table.items()
        }
        text, blocks = chain_report.write(path, results, chain.anchors)
        page.end_with(blocks)
    return text


def check_chain(chain: ChainConfig) -> None:
    """Raises SettingError for stages that do not come before, or do not exist."""
    earlier: list[str] = []
    for name, stage in chain.stages.items():
        if not re.fullmatch(r"\w+", name):
            raise SettingError(f"chain.stages.{name}: the name of a stage has to be letters, digits and underscores")
        for setting in stage.settings:
            if unknown := [other for other in REFERENCE.findall(setting) if other not in earlier]:
                problem = f"{{{unknown[0]}}} is not among the earlier stages ({', '.join(earlier) or 'none'})"
                place, cure = f"chain.stages.{name}.settings", "correct the name or the order"
                raise SettingError(problem, setting=place, value=setting, cure=cure)
        earlier.append(name)
    for model, stages in chain.table.items():
        unknown = [name for name in stages if name not in earlier]
        if unknown or not stages:
            problem = f"there is no stage {unknown[0]}" if unknown else "names no stage"
            cure = f"name one of {', '.join(earlier)}"
            raise SettingError(problem, setting=f"chain.table.{model}", value=f"[{', '.join(stages)}]", cure=cure)


def _refuse_files_of_others(chain: ChainConfig, path: Path) -> None:
    """Raises SettingError where the files of a chain that begins would replace those of another program."""
    begun = is_written_here(path / PAGE) or any((path / name).is_dir() for name in chain.stages)
    is_run = any((path / name).exists() for name in ("results.json", "metrics.jsonl", "checkpoints"))
    other = [name for name in (PAGE, *chain_report.FILES) if (path / name).exists()]
    if other and (is_run or not begun):
        problem = f"hydra.run.dir={path} holds no chain, but {other[0]}, which the chain would write over"
        raise SettingError(f"{problem}: choose another folder, or move it away")


def runs_of(folder: Path, stage: StageConfig) -> Runs:
    """The runs of a stage."""
    return {seed: folder / f"seed-{seed}" for seed in stage.seeds} or {None: folder}


def _finish(name: str, stage: StageConfig, seed: int | None, runs: dict[str, Runs], options: list[str]) -> None:
    """Do one run of a stage, unless it is finished.

    Args:
        runs: of all stages; a name in a setting is the run with the same seed, or the only or first one.
    """
    names = REFERENCE.findall(" ".join(stage.settings))
    inputs = {other: runs[other].get(seed) or next(iter(runs[other].values())) for other in names}
    settings = [REFERENCE.sub(lambda match: str(inputs[match[1]]), setting) for setting in stage.settings]
    folder, seeded = runs[name][seed], [] if seed is None else [f"seed={seed}"]
    arguments = [*options, f"+recipe={stage.recipe}", *settings, *seeded, run_dir(folder)]
    shown = [redact(argument) for argument in arguments]
    if _is_finished(folder, shown, inputs.values()):
        return
    label = name if seed is None else f"{name}, seed {seed}"
    logger.info(f"stage {label}: python -m distill {' '.join(shown)}")
    if status := _run([sys.executable, "-m", "distill", *arguments]):
        raise StageFailed(label, status)
    if not (folder / "results.json").is_file():
        problem = f"chain.stages.{name}.recipe={stage.recipe} has left no results in {folder}"
        raise SettingError(f"{problem}: a stage is one run to its end, and no sweep, chain or profile")
    (folder / STAGE).write_text(json.dumps(shown))


def _is_finished(folder: Path, arguments: list[str], inputs: Iterable[Path]) -> bool:
    """Whether a run was finished with these arguments, after the runs whose folders they name.

    Where not, the command is given, and the run itself decides whether anything is to be done.
    """
    stage = folder / STAGE
    try:
        check_student(folder, read_results(folder / "results.json"))
        newest = max(((each / "results.json").stat().st_mtime_ns for each in inputs), default=0)
        return bool(json.loads(stage.read_bytes()) == arguments and stage.stat().st_mtime_ns >= newest)
    except (OSError, ValueError):  # damage: the run itself reports it and resumes
        return False


def _run(command: list[str]) -> int:
    """The exit status of a command, to which the signals of this process are forwarded."""
    with handled() as signals, signals.deferred():
        stage = start(command)
        signals.pass_to(stage)
        status = stage.wait()
        # A stage that failed has acted on them; if it succeeded all the same, the chain stops before the next stage.
        signals.received[:] = [number for number in signals.received if number in STOPPING and not status]
    return status
