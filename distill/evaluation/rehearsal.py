"""Runs whole batches of evaluation before training: a lack of memory shows at the start and not at the end."""

from collections.abc import Callable

from distill.distributed import Backend
from distill.models.memory import available, is_out_of_memory
from distill.runtime.errors import SettingError


def rehearse(run: Callable[[], None], least_bytes: int, setting: str, value: int, backend: Backend) -> None:
    """Call `run` once on every rank.

    Args:
        run: computes a batch of evaluation.
        least_bytes: that it takes at least. A processor's memory is promised before it is there, and a process that
            then takes it is killed, so what is sure to be too much is not tried.
        setting, value: what decides how large the batch is, for the message.

    Raises:
        SettingError: on all ranks, where the memory of one does not suffice.
    """
    problem, free = "", available(backend)
    if free is not None and least_bytes > free:
        problem = f"takes {least_bytes / 1e9:.3g} GB at least, and {free / 1e9:.3g} GB are free"
    else:
        try:
            run()
        except (MemoryError, OSError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            problem = "takes more memory than there is"
    if found := next(filter(None, backend.gather(problem)), ""):
        raise SettingError(f"{setting}={value}: a batch of evaluation {found}; lower it")
