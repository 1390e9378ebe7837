"""The command `python -m distill`: compose the configuration, run it, and turn errors into one line and a status."""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.runtime.threads import keep_compiled_kernels, limit_spinning

if TYPE_CHECKING:
    from distill.config.settings import Config
    from distill.multirun import Sweep
    from distill.runtime.signals import Signals


def main() -> int:
    """Exit status: 0 done, 2 bad input, 3 diverged, 4 another rank lost, 74 storage, 128 + a signal; else a bug."""
    if sys.argv[1:] == ["--schema"]:
        from distill.config.schema import print_schema

        return print_schema()
    return until_interrupted(run_hydra)


def until_interrupted(command: "Callable[[Signals], int]") -> int:
    """The exit status of a command, or of the signal that has ended it, which is then said in one line."""
    from distill.runtime.errors import Interrupted
    from distill.runtime.signals import handled

    with handled() as signals:
        try:
            return command(signals)
        except Interrupted as error:
            if os.environ.get("DISTILL_TRACEBACK") == "1":
                raise
            try:
                say(error)
                end_rank(error.status, error)
            except Exception:  # the signal cut an import short, and what it has left cannot be imported again
                print(f"distill: {error}", file=sys.stderr, flush=True)
                os._exit(error.status)
            return error.status


def say(problem: object) -> None:
    """The one line that a run ends with."""
    from distill.runtime.progress import say as write
    from distill.runtime.redaction import redact

    write(sys.stderr, f"distill: {redact(str(problem))}\n")


def run_hydra(signals: "Signals") -> int:
    """Compose and run the command's jobs; gives the exit status of the first that failed."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from distill.config.command_line import check_search, checked, name_folders_of_sweeps
    from distill.config.compose import register
    from distill.config.settings import CONF
    from distill.runtime.progress import say as write

    limit_spinning()
    keep_compiled_kernels()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to this function, which gives them one line
    statuses, sweeps = [0], list["Sweep"]()

    def composed(cfg: Any) -> float | None:
        job = HydraConfig.get()
        sweep = sweep_of(job, cfg, sweeps)
        path, overrides = Path(job.runtime.output_dir), list(job.overrides.task)
        try:
            if sweep is not None:
                sweep.begin(path, overrides)
            value = run_composed(cfg, job, statuses, signals)
        except Exception as error:
            failure = expected(error, job.runtime.output_dir)
            if sweep is not None:
                sweep.end(path, overrides, failure or error)
            # Kept back from Hydra, which would print lines of its own; the other jobs of a sweep go on.
            if failure is None:
                if is_rank():
                    traceback.print_exc()
                    end_rank(1, error)
                raise
            say(failure if sweep is None else sweep.line(failure))
            statuses.append(failure.status)
            end_rank(failure.status, error)
            return None
        if sweep is not None:
            sweep.end(path, overrides)
        return value

    register()
    try:
        sys.argv[1:] = checked(sys.argv[1:])
        check_search(sys.argv[1:])
        name_folders_of_sweeps(sys.argv[1:])
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(composed)()
    except Exception as error:  # also of Hydra itself, which makes the run folder before anything else happens
        if (failure := expected(error)) is None:
            raise
        say(failure)
        statuses.append(int(failure.status))
    finally:
        for sweep in sweeps:
            write(sys.stdout, sweep.finish())
    return next(filter(None, statuses), 0)


def sweep_of(job: Any, cfg: Any, sweeps: "list[Sweep]") -> "Sweep | None":
    """The sweep that a job belongs to, which is begun with the first of them; None for a run of its own.

    Args:
        job: Hydra's own configuration.
        sweeps: gets it.
    """
    from hydra.types import RunMode

    if job.mode is not RunMode.MULTIRUN or is_rank():
        return None
    if not sweeps:
        from distill.config.command_line import fixed_overrides
        from distill.multirun import Sweep

        sweeps.append(Sweep(Path(job.sweep.dir), fixed_overrides(sys.argv[1:], job), cfg.get("optimize")))
    return sweeps[0]


def expected(error: Exception, folder: str = "") -> Any:
    """The error as one that ends a run in one line, with its exit `status`; None for a bug, which has a traceback.

    DISTILL_TRACEBACK=1 gives a traceback to all.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from distill.config.unknown import explain
    from distill.multirun import search_failure
    from distill.runtime.errors import Diverged, RankLost, SettingError, StageFailed, StorageFailed
    from distill.runtime.host import memory_failure
    from distill.runtime.storage import storage_failure

    if os.environ.get("DISTILL_TRACEBACK") == "1":
        return None
    if isinstance(error, SettingError | Diverged | RankLost | StageFailed | StorageFailed):
        return error
    if isinstance(error, HydraException | OmegaConfBaseException):
        return SettingError(explain(error))
    if (failure := search_failure(error)) is not None:
        return failure
    return storage_failure(error, folder) or memory_failure(error)


def run_composed(cfg: Any, job: Any, statuses: list[int], signals: "Signals") -> float | None:
    """Run what Hydra has composed: one job, in this process or by starting its ranks, or a chain of jobs.

    Gives the number of its results that `optimize` names; None where it names none, or other processes have it.

    Args:
        job: Hydra's own configuration.
        statuses: gets the status of ranks that were started.
        signals: learns what SIGUSR1 means in this run.
    """
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from distill.config.compose import build, chain_config
    from distill.config.settings import OnUsr1
    from distill.runtime.redaction import masked, redact_override

    path, overrides = Path(job.runtime.output_dir), list(job.overrides.task)
    if (chain := chain_config(cfg, overrides)) is not None:
        from distill.chain import run_chain
        from distill.runtime.errors import SettingError
        from distill.runtime.progress import configure_logging

        if is_rank():
            raise SettingError(
                "a chain starts its stages itself: run it as one process, with backend=ddp backend.processes=N in the "
                "settings of its stages"
            )
        configure_logging(0)
        print(run_chain(chain, path, config_dir(sys.argv)))
        return None
    config = build(cfg, overrides)
    signals.on_usr1(config.train.on_usr1 is OnUsr1.stop)
    if config.backend.name != "single" and start_ranks(config, path, job.mode is RunMode.MULTIRUN, statuses):
        return None
    from distill.job import run
    from distill.report.comparison.goal import Goal

    sweeper = OmegaConf.to_container(job.sweeper)
    goal = Goal.of(config.optimize, sweeper.get("direction") if isinstance(sweeper, dict) else None)
    results = run(
        config.changed(optimize=goal),  # with its direction, which the run checks before it trains
        path,
        recipe=job.runtime.choices.get("recipe") or "default",
        command=" ".join(["python -m distill", *map(redact_override, overrides)]),
        resolved=OmegaConf.to_yaml(OmegaConf.create(masked(OmegaConf.to_container(cfg, resolve=True)))),
    )
    value = None if goal is None else goal.value(results)
    if goal is not None:
        shown = "no number" if value is None else f"{value:.6g}"
        logging.getLogger("distill").info(f"optimize: {goal.name} = {shown}")
    end_rank(0)
    return value


def config_dir(arguments: list[str]) -> list[str]:
    """The option that names a folder of the user's recipes, for the commands of a chain's stages."""
    for number, each in enumerate(arguments):
        if each in ("--config-dir", "-cd"):
            return arguments[number : number + 2]
        if each.startswith("--config-dir="):
            return [each]
    return []


def is_rank() -> bool:
    """Whether this process is one of several ranks."""
    from distill.distributed.rank import rank_from_env

    info = rank_from_env()
    return info is not None and info.size > 1


def start_ranks(config: "Config", path: Path, sweeping: bool, statuses: list[int]) -> bool:
    """Run this command as every rank, unless this process is one already; true when that was done."""
    from distill.distributed import launch
    from distill.runs.check import check
    from distill.runtime.errors import SettingError

    check(config)
    starting = launch.should_launch(config.backend)
    if sweeping and (starting or is_rank()):
        raise SettingError("--multirun runs its jobs in one process: take backend=single, or start the runs one by one")
    if not starting:
        launch.keep_log(path)
        return False
    statuses.append(launch.launch(config.backend))
    return True


def end_rank(status: int, error: BaseException | None = None) -> None:
    """End a rank at once, without waiting for others; does nothing outside of a run of several ranks."""
    if is_rank():
        from distill.distributed.launch import leave

        leave(status, error)


if __name__ == "__main__":
    sys.exit(main())
