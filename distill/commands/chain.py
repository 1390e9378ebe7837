"""Several jobs after each other from one recipe: each is a run of its own, and at the end one table compares them.

A stage is what `python -m distill +recipe=RECIPE SETTINGS` would run, in its own process and folder. So it can be
interrupted and resumed like any run, and a stage that is finished is not run again. A stage can be run for several
seeds, and from each snapshot of an earlier stage.
"""

import hashlib
import json
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.config.override_text import as_value
from distill.config.settings import ChainConfig, StageConfig
from distill.report import chain_report
from distill.report.chain_report import FILES, SnapshotRuns
from distill.report.jobs import PAGE, Job, JobsPage
from distill.report.page import is_written_here
from distill.runs.record import Record
from distill.runs.results_file import check_student, read_results
from distill.runtime.errors import SettingError, StageFailed
from distill.runtime.files import make_folder
from distill.runtime.redaction import redact
from distill.runtime.signals import STOPPING, handled, start

REFERENCE = re.compile(r"\{(\w+)\}")  # in a setting: the folder of an earlier stage, or of one of its snapshots
TEMPLATE = re.compile(r"\+*[\w.]*\.template=")  # of conversations, where names in braces stand for something else

STAGE = "chain_stage.json"  # in the folder of a run: the command and the inputs that it was finished with

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One job of a stage: from which snapshot (its step) and with which seed, where there are several."""

    folder: Path
    step: int | None = None
    seed: int | None = None


def run_chain(chain: ChainConfig, path: Path, options: list[str]) -> str:
    """Run what is not finished yet, and write `chain.md` and `chain.json` into the folder `path`; gives the former.

    Args:
        options: of every command, such as --config-dir.

    Raises:
        SettingError: a stage that names a later one or none, snapshots that are not kept, or a table of stages that
            are not there.
        StageFailed: a job ended with another status than 0.
    """
    check_chain(chain)
    _refuse_files_of_others(chain, path)
    make_folder(path, f"hydra.run.dir={path}")
    with JobsPage(path, f"{path.name}: a chain", lambda: jobs_of(path, chain)) as page:
        for name in chain.stages:
            for run in runs_of(path, chain, name):
                page.start(run.folder)
                _finish(path, chain, name, run, options)
        results = {
            model: [[_record(run.folder) for run in runs_of(path, chain, name)] for name in stages]
            for model, stages in chain.table.items()
        }
        text = chain_report.write(path, results, _snapshot_runs(path, chain), chain.anchors)
        page.end_with(chain_report.blocks(results, chain.anchors))
    return text


def _refuse_files_of_others(chain: ChainConfig, path: Path) -> None:
    """Raises SettingError where the files of a chain that begins would replace those of another program."""
    begun = is_written_here(path / PAGE) or any((path / name).is_dir() for name in chain.stages)
    begun &= not any((path / name).exists() for name in ("results.json", "metrics.jsonl", "checkpoints"))  # of a run
    other = next((path / name for name in (PAGE, *FILES) if (path / name).exists()), None)
    if other is not None and not begun:
        raise SettingError(
            f"hydra.run.dir={path} holds no chain, but {other.name}, which the chain would write over: choose another "
            "folder, or move it away"
        )


def jobs_of(path: Path, chain: ChainConfig) -> list[Job]:
    """The jobs of all stages for their page, as far as their folders are decided."""
    jobs: list[Job] = []
    for name, stage in chain.stages.items():
        if (source := stage.snapshots_of) is not None and not (path / source / "results.json").is_file():
            jobs.append(Job(name, note=f"one from each snapshot of {source}"))
            continue
        jobs += [Job(str(run.folder.relative_to(path)), run.folder) for run in runs_of(path, chain, name)]
    return jobs


def _finish(path: Path, chain: ChainConfig, name: str, run: Run, options: list[str]) -> None:
    """Run one job of a stage, unless it is finished."""
    stage = chain.stages[name]

    def filled(setting: str) -> str:
        """A setting with the folders of the stages that it names; one that is a value alone, as a command needs it."""
        if not _references(setting):
            return setting
        key, _, value = setting.partition("=")
        if (whole := REFERENCE.fullmatch(value)) is not None:
            return f"{key}={as_value(str(_folder_of(path, chain, stage, run, whole[1])))}"
        text = REFERENCE.sub(lambda match: str(_folder_of(path, chain, stage, run, match[1])), value)
        is_path_alone = not any(sign in REFERENCE.sub("", value) for sign in "'\"[{,=")
        return f"{key}={as_value(text) if is_path_alone else text}"

    seeded = [] if run.seed is None else [f"seed={run.seed}"]
    folder = f"hydra.run.dir={as_value(str(run.folder))}"
    arguments = [*options, f"+recipe={stage.recipe}", *map(filled, stage.settings), *seeded, folder]
    command = {"arguments": [redact(argument) for argument in arguments], "inputs": _inputs(path, chain, stage, run)}
    if _is_finished(run.folder, command):
        return
    parts = {"snapshot of step": run.step, "seed": run.seed}
    label = ", ".join([name, *(f"{part} {value}" for part, value in parts.items() if value is not None)])
    logger.info(f"stage {label}: python -m distill {' '.join(command['arguments'])}")
    if status := _run([sys.executable, "-m", "distill", *arguments]):
        raise StageFailed(label, status)
    if not (run.folder / "results.json").is_file():
        raise SettingError(
            f"chain.stages.{name}.recipe={stage.recipe} has left no results in {run.folder}: a stage is one run to its "
            "end, and no sweep, chain or profile"
        )
    (run.folder / STAGE).write_text(json.dumps(command))


def check_chain(chain: ChainConfig) -> None:
    """Raises SettingError for stages that do not come before, do not exist, or have no snapshots."""
    earlier: list[str] = []
    for name, stage in chain.stages.items():
        if not re.fullmatch(r"\w+", name):
            raise SettingError(f"chain.stages.{name}: the name of a stage has to be letters, digits and underscores")
        if stage.snapshots_of is not None:
            _check_snapshots(chain, name, stage.snapshots_of, earlier)
        for setting in stage.settings:
            for other in _references(setting):
                prefix = f"chain.stages.{name}.settings: {setting} names the stage {other}, which"
                if other not in earlier:
                    raise SettingError(
                        f"{prefix} is not among the earlier stages ({', '.join(earlier) or 'none'}): correct the "
                        "name or the order"
                    )
                snapshots_of = chain.stages[other].snapshots_of
                if snapshots_of not in (None, stage.snapshots_of):
                    raise SettingError(
                        f"{prefix} has a run from each snapshot of {snapshots_of}: set snapshots_of={snapshots_of} "
                        "here too"
                    )
        earlier.append(name)
    for model, stages in chain.table.items():
        if not stages:
            raise SettingError(f"chain.table.{model}=[] names no stage: name one of {', '.join(earlier)}")
        for name in stages:
            if name not in earlier:
                raise SettingError(f"chain.table.{model}: there is no stage {name}: name one of {', '.join(earlier)}")
            if (snapshots_of := chain.stages[name].snapshots_of) is not None:
                raise SettingError(
                    f"chain.table.{model}: {name} scores a model from each snapshot of {snapshots_of}, which have a "
                    "table of their own: leave it out"
                )


def _references(setting: str) -> list[str]:
    """The stages that a setting names."""
    return [] if TEMPLATE.match(setting) else REFERENCE.findall(setting)


def _check_snapshots(chain: ChainConfig, name: str, producer: str, earlier: list[str]) -> None:
    """Refuse `snapshots_of=of` for the stage `name`, where only the stages `earlier` come before."""
    setting = f"chain.stages.{name}.snapshots_of={producer}"
    if producer not in earlier:
        raise SettingError(
            f"{setting} is not among the earlier stages ({', '.join(earlier) or 'none'}): correct the name or the order"
        )
    source = chain.stages[producer]
    if source.seeds or source.snapshots_of is not None:
        raise SettingError(f"{setting} is run several times, by its seeds or snapshots_of: name a stage that runs once")
    if not any(re.match(r"\+*train[.=].*snapshot", override) for override in source.settings):
        raise SettingError(
            f"{setting} keeps none: add train.snapshot_every=STEPS or train.snapshots=[STEP,...] to "
            f"chain.stages.{producer}.settings"
        )
    if not any(producer in _references(used) for used in chain.stages[name].settings):
        raise SettingError(
            f"{setting}, but no setting of {name} has {{{producer}}}, which stands for the snapshot: add one, such as "
            f"student.path={{{producer}}}"
        )


def runs_of(path: Path, chain: ChainConfig, name: str) -> list[Run]:
    """The jobs of a stage; where it is run from snapshots, the stage that keeps them has to be finished.

    Raises:
        SettingError: that stage has kept no snapshots.
    """
    stage = chain.stages[name]
    steps: list[int | None] = [None]
    if stage.snapshots_of is not None:
        steps = [*_record(path / stage.snapshots_of).snapshots]
        if not steps:
            raise SettingError(
                f"chain.stages.{name}.snapshots_of={stage.snapshots_of} finished without snapshots in "
                f"{path / stage.snapshots_of}: remove that folder to run it again, or choose another hydra.run.dir"
            )
    seeds: list[int | None] = [*stage.seeds] or [None]
    return [
        Run(
            path.joinpath(name, *[f"step-{step}"] * (step is not None), *[f"seed-{seed}"] * (seed is not None)),
            step,
            seed,
        )
        for step in steps
        for seed in seeds
    ]


def _folder_of(path: Path, chain: ChainConfig, stage: StageConfig, run: Run, name: str) -> Path:
    """The folder that {name} stands for in the settings of a run: its snapshot, or an earlier stage's folder.

    That is the run of the earlier stage from the same snapshot and with the same seed, or its only or first one.
    """
    if name == stage.snapshots_of:
        return path / name / "snapshots" / f"step-{run.step}"
    runs = [other for other in runs_of(path, chain, name) if other.step in (None, run.step)]
    return next((other for other in runs if other.seed == run.seed), runs[0]).folder


def _inputs(path: Path, chain: ChainConfig, stage: StageConfig, run: Run) -> dict[str, str]:
    """sha256 of what the settings of a stage refer to, by its folder: a run's results, or a snapshot's weights."""
    names = {name for setting in stage.settings for name in _references(setting)}
    files = {}
    for name in names:
        folder = _folder_of(path, chain, stage, run, name)
        weights = sorted(folder.glob("*.safetensors"))
        files[str(folder)] = weights if name == stage.snapshots_of else [folder / "results.json"]
    return {folder: _digest(files[folder]) for folder in sorted(files)}


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            hashlib.file_digest(content, lambda: digest)
    return digest.hexdigest()


def _is_finished(folder: Path, command: dict[str, Any]) -> bool:
    """Whether this very command has been run to its end on these inputs.

    Where something has changed, the run itself decides whether it is still finished.
    """
    record_path = folder / STAGE
    if not record_path.is_file() or not (folder / "results.json").is_file():
        return False
    try:
        check_student(folder, _record(folder))
        return bool(json.loads(record_path.read_bytes()) == command)
    except (ValueError, RecursionError):  # damage: the run itself reports it and resumes
        return False


def _snapshot_runs(path: Path, chain: ChainConfig) -> dict[str, SnapshotRuns]:
    """What was run from the snapshots of each stage that has some in use."""
    by_stage: dict[str, SnapshotRuns] = {}
    for name, stage in chain.stages.items():
        if (source := stage.snapshots_of) is not None:
            by_step = by_stage.setdefault(source, SnapshotRuns(_record(path / source))).stages.setdefault(name, {})
            for run in runs_of(path, chain, name):
                assert run.step is not None
                by_step.setdefault(run.step, []).append(_record(run.folder))
    return by_stage


def _run(command: list[str]) -> int:
    """The exit status of a command, to which the signals of this process are forwarded."""
    with handled() as signals, signals.deferred():
        stage = start(command)
        signals.pass_to(stage)
        status = stage.wait()
        # A stage that failed has acted on them; if it succeeded all the same, the chain stops before the next stage.
        signals.received[:] = [number for number in signals.received if number in STOPPING and not status]
    return status


def _record(folder: Path) -> Record:
    return read_results(folder / "results.json")
