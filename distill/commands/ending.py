"""How every command ends: with 0, or in one line and the exit status of what went wrong."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec

from distill.runtime.errors import Diverged, Interrupted, RankLost, SettingError, StageFailed, StorageFailed

P = ParamSpec("P")
Failure = SettingError | Diverged | RankLost | StageFailed | StorageFailed | Interrupted  # each has its exit `status`


def status_of(command: Callable[P, int | None], *args: P.args, **kwargs: P.kwargs) -> int:
    """The exit status of a command with its arguments, after one line about bad input, storage that fails or a signal.

    Raises:
        Exception: a bug, which has a traceback.
    """
    from distill.runtime.signals import handled

    with handled():
        try:
            status = command(*args, **kwargs) or 0
            end_rank(status)
            return status
        except (Exception, Interrupted) as error:
            failure = expected(error)
            if failure is None:
                if is_rank():
                    traceback.print_exc()
                    end_rank(1, error)
                raise
            try:
                report_problem(failure)
                end_rank(failure.status, failure)
            except Exception:  # a signal cut an import short, and what it has left cannot be imported again
                print(f"distill: {failure}", file=sys.stderr, flush=True)
                os._exit(failure.status)
            return failure.status
        except KeyboardInterrupt:  # the second Ctrl-C, while what the first one asked for was under way
            print("distill: interrupted again: no further checkpoint is written", file=sys.stderr, flush=True)
            return 128 + signal.SIGINT


def report_problem(problem: object) -> None:
    """The one line that a command ends with."""
    from distill.runtime.progress import write_to
    from distill.runtime.redaction import redact

    write_to(sys.stderr, f"distill: {redact(str(problem))}\n")


def expected(error: BaseException, folder: str = "") -> Failure | None:
    """The error as one that ends a command in one line, with its exit status; None for a bug, which has a traceback.

    An error that only follows from a signal, which came while a library such as OmegaConf was busy, is that of the
    signal. DISTILL_TRACEBACK=1 gives a traceback to all.

    Args:
        folder: what an error of storage that names no file is about.
    """
    from distill.config.errors import setting_error
    from distill.runtime.host import failure_of

    if os.environ.get("DISTILL_TRACEBACK") == "1":
        return None
    if isinstance(error, Failure):
        return error
    if not isinstance(error, OSError) and (signal := _signal_behind(error)) is not None:
        return signal
    assert isinstance(error, Exception)
    return setting_error(error) or failure_of(error, folder)


def _signal_behind(error: BaseException | None) -> Interrupted | None:
    """The `Interrupted` in whose handling an error was raised, if there is one."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__cause__ or error.__context__
    return error


def is_rank() -> bool:
    """Whether this process is one of several ranks."""
    from distill.runtime.rank import rank_from_env

    try:
        info = rank_from_env()
    except SettingError:  # it is none of this run, which has ended by this error
        return False
    return info is not None and info.size > 1


def end_rank(status: int, error: BaseException | None = None) -> None:
    """End a rank at once, without waiting for others; does nothing outside of a run of several ranks."""
    if is_rank():
        from distill.distributed.launch import leave

        leave(status, error)
