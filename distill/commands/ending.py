"""How the commands beside `python -m distill` end: with 0, or in one line and the exit status of what went wrong."""

from collections.abc import Callable

from distill.__main__ import expected, say, until_interrupted


def status_of(command: Callable[[], object]) -> int:
    """Run a command; its exit status, after one line about bad input, storage that fails or a signal.

    Raises:
        Exception: a bug, which has a traceback.
    """

    def run(signals: object) -> int:
        try:
            command()
        except Exception as error:
            if (failure := expected(error)) is None:
                raise
            say(failure)
            return int(failure.status)
        return 0

    return until_interrupted(run)
