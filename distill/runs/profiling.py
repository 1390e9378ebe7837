"""The profile of a run: begun from its settings, gathered from all ranks, written and said by rank 0."""

import json
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distill.config.settings import Config
from distill.data.batches import Batches
from distill.distributed import Backend
from distill.runs.profile.record import RankProfile, RunProfile, RunSettings
from distill.runs.profile.recorder import FOLDER, Recorder, Unprofiled
from distill.runs.profile.summary import summary
from distill.runtime.files import atomic

RANKS = (
    "profile.json"  # in the folder of the profile: the records of all ranks, which `distill.runs.profile.rules` read
)

logger = logging.getLogger(__name__)


def recorder(
    config: Config, path: Path, batches: Batches, backend: Backend
) -> AbstractContextManager[Recorder | Unprofiled]:
    """What records this rank while it trains, as a context; nothing without `profile=on`."""
    if not config.profile.enabled:
        return nullcontext(Unprofiled())
    return Recorder(config.profile, path, batches.micro_batches, backend)


def gathered(
    profile: Recorder | Unprofiled, config: Config, batches: Batches, backend: Backend, identity: dict[str, Any]
) -> dict[str, Any] | None:
    """The profile for results.json, after its context has ended; all ranks call it. None without a profile.

    Rank 0 writes what all ranks recorded into the run folder, with the run's identity, and says where the time goes.
    """
    if isinstance(profile, Unprofiled):
        return None
    record = profile.record()
    found = [RankProfile.of(each) for each in backend.gather(asdict(record))]
    whole = RunProfile(found, settings_of(config, batches, backend, record.num_steps))
    block = summary(whole)
    if backend.rank == 0:
        with atomic(profile.folder / RANKS) as new:
            new.write_text(json.dumps(whole.as_dict() | {"summary": block, "identity": identity}))
        logger.info(block["conclusion"])
    return block


def settings_of(config: Config, batches: Batches, backend: Backend, steps: int) -> RunSettings:
    """The settings in force that the rules read."""
    return RunSettings(
        batch_size=batches.batch_size,
        micro_batches=batches.micro_batches,
        accumulate=config.train.accumulate,
        save_every=config.train.save_every,
        workers=config.train.workers,
        rows_per_step=config.train.rows_per_step,
        sync=config.backend.sync,
        compression=config.backend.compression,
        rings=backend.rings,
        bytes_exchanged=backend.bytes_sent // max(steps, 1),
    )


def read(run_folder: Path) -> tuple[RunProfile, dict[str, Any]]:
    """The records of all ranks of a run that has ended, and their `summary` and `identity`."""
    content = json.loads((run_folder / FOLDER / RANKS).read_text())
    return RunProfile.of(content), content
