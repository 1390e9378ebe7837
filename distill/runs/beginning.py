"""From which checkpoint a run began, where `resume` named it: the same command goes on, and does not begin again."""

import json
import logging
from pathlib import Path

from distill.runtime.files import atomic, remove

BEGINNING = "began-from.json"

logger = logging.getLogger(__name__)


def note_start(folder: Path, named: Path | None, start: Path | None, step: int) -> None:
    """Keep from which checkpoint the run in `folder` begins, or log that it has gone on from there.

    Args:
        named: the checkpoint that `resume` names.
        start: the one that the run goes on from, of this step; the folder has no checkpoint of a later step.
    """
    if named is None:
        if step <= _kept(folder)[1]:  # nothing that is there began from that checkpoint
            remove(folder / BEGINNING)
    elif start == named:
        with atomic(folder / BEGINNING) as new:
            new.write_text(json.dumps({"checkpoint": str(named.resolve()), "step": step}), encoding="utf-8")
    else:
        logger.info(
            f"resume={named}: this run has begun from there before, and goes on from step {step}; hydra.run.dir=DIR "
            "begins from there again"
        )


def step_of_beginning(folder: Path, checkpoint: Path) -> int | None:
    """The step of this checkpoint, where the run in `folder` has begun from it, with all of its later checkpoints."""
    kept, step = _kept(folder)
    return step if kept == str(checkpoint.resolve()) else None


def _kept(folder: Path) -> tuple[str, int]:
    try:
        content = json.loads((folder / BEGINNING).read_bytes())
        return str(content["checkpoint"]), int(content["step"])
    except (OSError, ValueError, TypeError, LookupError):
        return "", 0
