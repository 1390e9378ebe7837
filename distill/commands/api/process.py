"""Calls from Python leave the state of their process as it was, and raise errors of one line."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any, NoReturn

from distill.commands.ending import expected
from distill.runtime.errors import SettingError
from distill.runtime.redaction import redact


def raise_expected(error: Exception, folder: str = "") -> NoReturn:
    """Raise an error for the caller: bad input as one line, failing storage as StorageFailed, bugs as they are.

    Args:
        folder: where the call writes.
    """
    failure = expected(error, folder)
    if failure is None or failure is error:
        raise error
    if isinstance(failure, SettingError):
        raise SettingError(redact(str(failure))) from None  # notebooks are handed on with what they show
    raise failure from error


@contextmanager
def process_as_before() -> Iterator[None]:
    """Put back what a run changes of the whole process: loggers, torch's generators, threads and device, and bars.

    In a notebook, whose standard error is a red block, messages and progress go to its standard output meanwhile.
    """
    import logging

    import torch
    from transformers.utils import logging as transformers_logging

    package, bars = logging.getLogger("distill"), transformers_logging.is_progress_bar_enabled()
    before = package.level, package.propagate, list(package.handlers)
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    # Where nothing has used a GPU yet, looking at one would start it.
    gpus = (torch.cuda.get_rng_state_all(), torch.cuda.current_device()) if torch.cuda.is_initialized() else None
    with ExitStack() as stack:
        if in_notebook(sys.stderr):
            stack.enter_context(redirect_stderr(sys.stdout))
        package.propagate = False  # handlers of the program's own would show every message a second time
        try:
            yield
        finally:
            package.setLevel(before[0])
            package.propagate, package.handlers = before[1:]
            torch.set_rng_state(generator)
            torch.set_num_threads(threads)
            if gpus is not None:
                torch.cuda.set_rng_state_all(gpus[0])
                torch.cuda.set_device(gpus[1])
            elif torch.cuda.is_initialized():  # by the run: as they would be at the program's own first use
                torch.cuda.manual_seed_all(torch.initial_seed())
                torch.cuda.set_device(0)
            if bars:
                transformers_logging.enable_progress_bar()


def in_notebook(stream: Any) -> bool:
    """Whether what is written to a stream appears in a notebook."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"
