"""The commands beside a run end in one line with the status of what went wrong; a bug keeps its traceback."""

import os
import signal

import pytest
from omegaconf.errors import ConfigKeyError

from distill.commands.ending import status_of
from distill.runtime.errors import SettingError, StorageFailed


def failing(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SettingError("corpus.path=x: none"), 2),
        (StorageFailed("s3://a is gone"), 74),
        (OSError(28, "No space left on device", "/data/x"), 74),
        (OSError(24, "Too many open files", "/data/x"), 2),
        (RuntimeError("can't start new thread"), 2),
        (RuntimeError("could not create a primitive"), 2),
    ],
)
def test_what_is_expected_is_one_line(error: Exception, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(lambda: failing(error)) == status
    said = capsys.readouterr().err
    assert said.startswith("distill: ") and said.count("\n") == 1


def test_a_signal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 143
    assert "stopped by SIGTERM" in capsys.readouterr().err


def test_an_error_that_follows_from_a_signal_is_the_signal(capsys: pytest.CaptureFixture[str]) -> None:
    """As in OmegaConf, whose objects are not whole yet when it cleans up, and which wraps the error."""

    def command() -> None:
        try:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                failing(AttributeError("half-made"))
        except AttributeError as error:
            raise ConfigKeyError("'NoneType' object has no attribute") from error

    assert status_of(command) == 143
    assert "stopped by SIGTERM" in capsys.readouterr().err


def test_a_bug_has_a_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        status_of(lambda: failing(ZeroDivisionError()))
    assert status_of(lambda: None) == 0
