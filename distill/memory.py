"""Memory that does not suffice: recognised whatever library asks for it, foreseen where that is possible."""

import errno
from pathlib import Path
from typing import Any

import torch

from distill.errors import SettingError, first_line
from distill.models.protocol import depth_of

# Parts of the messages of torch and of the system where an allocation has failed.
SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "Unable to allocate")
# Numbers that each block keeps for the backward pass, in multiples of the width of a position: a block of BERT keeps 34
# (https://arxiv.org/abs/2205.05198, section 4.1), and no kernel here saves half of them.
LEAST_KEPT = 8


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed.

    Torch's own error for that is a RuntimeError, numpy's a MemoryError, that of a call to the system an OSError.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    )


def memory_failure(error: BaseException) -> SettingError | None:
    """The error as one that the settings can mend, if memory is what it lacks; else None."""
    if not is_out_of_memory(error):
        return None
    return SettingError(
        f"there is not enough memory ({first_line(error)[:200]}): lower train.batch_size and raise train.accumulate in "
        "proportion, lower evaluate.batch_size where models are scored, or take a smaller model; the same command then "
        "goes on"
    )


def available(device: torch.device) -> int | None:
    """Bytes of memory that programs may still take; None for a GPU, which says itself when it is full."""
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def require_memory_for_step(student: Any, rows: int, length: int, device: torch.device) -> None:
    """Raises SettingError for a micro-batch that is sure to be too much.

    A processor's memory is promised before it is there, and a process that then takes it is killed without a word. What
    is less than sure shows in the first micro-batch.

    Args:
        student: a model; nothing is known of one without a width in its configuration.
        rows, length: of the micro-batch.
    """
    width, free = getattr(getattr(student, "config", None), "hidden_size", None), available(device)
    if free is None or not isinstance(width, int):
        return
    least = 4 * LEAST_KEPT * width * (depth_of(student) or 1) * rows * length
    if least > free:
        raise SettingError(
            f"train.batch_size={rows}: a micro-batch of {length} positions a row takes {least / 1e9:.3g} GB at least, "
            f"and {free / 1e9:.3g} GB are free; lower it, and raise train.accumulate in proportion"
        )
