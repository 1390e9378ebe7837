"""Runs one whole batch of evaluation before training: a lack of memory shows at the start and not at the end."""

from collections.abc import Callable
from pathlib import Path

import torch

from distill.backends import Backend
from distill.errors import SettingError

# Parts of the messages of torch and of the system where an allocation has failed.
SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "Unable to allocate")


def rehearse(run: Callable[[], None], least_bytes: int, rows: int, backend: Backend) -> None:
    """Call `run` once on every rank.

    Args:
        run: computes what the largest batch of evaluation does.
        least_bytes: that it takes at least. A processor's memory is promised before it is there, and a process that
            then takes it is killed, so what is sure to be too much is not tried.
        rows: of the batch, for the message.

    Raises:
        SettingError: on all ranks, where the memory of one does not suffice.
    """
    problem, available = "", _available(backend.device)
    if available is not None and least_bytes > available:
        problem = f"takes {least_bytes / 1e9:.3g} GB at least, and {available / 1e9:.3g} GB are free"
    else:
        try:
            run()
        except (MemoryError, RuntimeError) as error:  # torch's own error for a full GPU is a RuntimeError
            if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in SIGNS):
                raise
            problem = "takes more memory than there is"
    if found := next(filter(None, backend.gather(problem)), ""):
        raise SettingError(f"evaluate.batch_size={rows}: a batch of evaluation {found}; lower it")


def _available(device: torch.device) -> int | None:
    """Bytes of memory that programs may still take; None for a GPU, which says itself when it is full."""
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
