"""How every command ends: with 0, or in one line and the exit status of what went wrong."""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from distill.runtime.errors import Diverged, Interrupted, RankLost, SettingError, StageFailed, StorageFailed

if TYPE_CHECKING:
    from distill.runtime.signals import Signals

BROKEN_PIPE = 141  # 128 + SIGPIPE: whoever reads the output has ended
Failure = SettingError | Diverged | RankLost | StageFailed | StorageFailed  # each has its exit `status`


def status_of(command: Callable[[], object]) -> int:
    """Run a command; its exit status, after one line about bad input, storage that fails or a signal.

    Raises:
        Exception: a bug, which has a traceback.
    """

    def run(signals: "Signals") -> int:
        try:
            command()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would fail again when it flushes what is left
            return BROKEN_PIPE
        except Exception as error:
            if (failure := expected(error)) is None:
                raise
            report_problem(failure)
            return failure.status
        return 0

    return until_interrupted(run)


def until_interrupted(command: "Callable[[Signals], int]") -> int:
    """The exit status of a command, or of the signal that has ended it, which is then reported in one line."""
    from distill.runtime.signals import handled

    with handled() as signals:
        try:
            return command(signals)
        except Interrupted as error:
            if os.environ.get("DISTILL_TRACEBACK") == "1":
                raise
            try:
                report_problem(error)
                end_rank(error.status, error)
            except Exception:  # the signal cut an import short, and what it has left cannot be imported again
                print(f"distill: {error}", file=sys.stderr, flush=True)
                os._exit(error.status)
            return error.status


def report_problem(problem: object) -> None:
    """The one line that a command ends with."""
    from distill.runtime.progress import write_to
    from distill.runtime.redaction import redact

    write_to(sys.stderr, f"distill: {redact(str(problem))}\n")


def expected(error: Exception, folder: str = "") -> Failure | None:
    """The error as one that ends a command in one line, with its exit status; None for a bug, which has a traceback.

    DISTILL_TRACEBACK=1 gives a traceback to all.

    Raises:
        Interrupted: the error only follows from a signal that came while a library was busy, such as OmegaConf, whose
            cleaning up fails then.
    """
    from distill.config.errors import setting_error
    from distill.runtime.host import storage_failure

    if os.environ.get("DISTILL_TRACEBACK") == "1":
        return None
    if isinstance(error, Failure):
        return error
    if not isinstance(error, OSError):
        _raise_interruption(error)
    if (failure := setting_error(error) or storage_failure(error, folder)) is not None:
        return failure
    from distill.runtime.host import limit_failure, memory_failure

    return limit_failure(error) or memory_failure(error)


def _raise_interruption(error: BaseException) -> None:
    """Raise the `Interrupted` in whose handling an error was raised, if there is one."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        if isinstance(inner, Interrupted):
            raise inner
        seen.add(id(inner))
        inner = inner.__cause__ or inner.__context__


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
