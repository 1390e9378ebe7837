"""Several jobs after each other from one recipe: each is a run of its own, and at the end one table compares them.

A stage is what `python -m distill +recipe=RECIPE SETTINGS` would run, in its own process and folder. So it can be
interrupted and goes on like any run, and a stage that is finished is not run again.
"""

import hashlib
import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from distill.config import ChainConfig, StageConfig
from distill.errors import SettingError, StageFailed
from distill.report import chain_report

REFERENCE = re.compile(r"\{(\w+)\}")  # in a setting: the folder of an earlier stage

STAGE = "chain_stage.json"  # in the folder of a run: the command and the inputs that it was finished with

logger = logging.getLogger(__name__)


def run_chain(chain: ChainConfig, path: Path, options: list[str]) -> str:
    """Run what is not finished yet, and write `chain.md` and `chain.json` into the folder `path`; gives the table.

    Args:
        options: of every command, such as --config-dir.

    Raises:
        SettingError: a stage that names a later one or none, or a table of stages that are not there.
        StageFailed: a job ended with another status than 0.
    """
    check_chain(chain)
    for name, stage in chain.stages.items():
        for seed, folder in folders(path, name, stage).items():
            settings = [REFERENCE.sub(lambda found, s=seed: _folder_of(path, chain, found[1], s), each)  # type: ignore[misc]
                        for each in stage.settings]  # fmt: skip
            seeded = [] if seed is None else [f"seed={seed}"]
            arguments = [*options, f"+recipe={stage.recipe}", *settings, *seeded, f"hydra.run.dir={folder}"]
            known = {"arguments": arguments, "inputs": _inputs(path, chain, stage, seed)}
            if not _is_finished(folder, known):
                label = name if seed is None else f"{name}, seed {seed}"
                logger.info(f"stage {label}: python -m distill {' '.join(arguments)}")
                if status := _run([sys.executable, "-m", "distill", *arguments]):
                    raise StageFailed(label, status)
                (folder / STAGE).write_text(json.dumps(known))
    results = {
        model: [[_results(folder) for folder in folders(path, name, chain.stages[name]).values()] for name in stages]
        for model, stages in chain.table.items()
    }
    return chain_report.write(path, results, chain.anchors)


def check_chain(chain: ChainConfig) -> None:
    """Raises SettingError for references to stages that do not come before, or do not exist."""
    known: list[str] = []
    for name, stage in chain.stages.items():
        for setting in stage.settings:
            if wrong := [other for other in REFERENCE.findall(setting) if other not in known]:
                raise SettingError(
                    f"chain.stages.{name}.settings: {setting} names the stage {wrong[0]}, which does not come before: "
                    f"name one of {', '.join(known) or 'none'}"
                )
        known.append(name)
    for model, stages in chain.table.items():
        if wrong := [name for name in stages if name not in known]:
            raise SettingError(f"chain.table.{model}: there is no stage {wrong[0]}: name one of {', '.join(known)}")


def folders(path: Path, name: str, stage: StageConfig) -> dict[int | None, Path]:
    """The folder of each run of a stage, by its seed."""
    if not stage.seeds:
        return {None: path / name}
    return {seed: path / name / f"seed-{seed}" for seed in stage.seeds}


def _folder_of(path: Path, chain: ChainConfig, name: str, seed: int | None) -> str:
    """The run of an earlier stage with the same seed, or its only or first one."""
    found = folders(path, name, chain.stages[name])
    return str(found.get(seed, next(iter(found.values()))))


def _inputs(path: Path, chain: ChainConfig, stage: StageConfig, seed: int | None) -> dict[str, str]:
    """sha256 of the results of every run that the settings of a stage refer to, by its folder."""
    names = {name for setting in stage.settings for name in REFERENCE.findall(setting)}
    used = sorted(_folder_of(path, chain, name, seed) for name in names)
    return {folder: hashlib.sha256((Path(folder) / "results.json").read_bytes()).hexdigest() for folder in used}


def _is_finished(folder: Path, known: dict[str, Any]) -> bool:
    """Whether this very command has been run to its end on these inputs.

    What has changed is left to the run itself, which knows whether that makes a difference to it.
    """
    done = folder / STAGE
    return done.is_file() and (folder / "results.json").is_file() and json.loads(done.read_text()) == known


def _run(command: list[str]) -> int:
    """The status of a command that gets the signals which would end this process, and ends in its own time."""
    process = subprocess.Popen(command)
    before = {
        number: signal.signal(number, lambda received, _: process.send_signal(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _results(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return content
