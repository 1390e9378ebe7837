"""The commands beside a run end in one line with the status of what went wrong; a bug keeps its traceback."""

import os
import signal

import pytest
from omegaconf.errors import ConfigKeyError

from distill.commands.ending import status_of
from distill.runtime.errors import SettingError, StorageFailed


def failing(error: BaseException) -> None:
    raise error


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stopped_in_a_library() -> None:
    """As in OmegaConf, whose objects are not whole yet when it cleans up, and which wraps the error."""
    try:
        try:
            stopped()
        finally:
            failing(AttributeError("half-made"))
    except AttributeError as error:
        raise ConfigKeyError("'NoneType' object has no attribute") from error


@pytest.mark.parametrize(
    ("command", "given", "status", "words"),
    [
        (failing, [SettingError("corpus.path=x: none")], 2, "corpus.path=x: none"),
        (failing, [StorageFailed("s3://a is gone")], 74, "s3://a is gone"),
        (failing, [OSError(28, "No space left on device", "/data/x")], 74, "/data/x: No space left"),
        (failing, [OSError(24, "Too many open files", "/data/x")], 2, "ulimit -n"),
        (failing, [RuntimeError("can't start new thread")], 2, "ulimit -u"),
        (failing, [RuntimeError("could not create a primitive")], 2, "not enough memory"),
        (stopped, [], 143, "stopped by SIGTERM"),
        (stopped_in_a_library, [], 143, "stopped by SIGTERM"),
    ],
)
def test_what_is_expected_is_one_line(
    command: object, given: list[object], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(command, *given) == status  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert said.startswith("distill: ") and said.count("\n") == 1 and words in said


def test_a_bug_has_a_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        status_of(failing, ZeroDivisionError())
    assert status_of(lambda: None) == 0
