"""Files at URLs (s3://, gs://, hf://, https:// ...) through fsspec.

Credentials, regions and endpoints are never settings: each service's own library finds them in the environment, such
as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL.
"""

import errno
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from distill.runtime.errors import SettingError, StorageFailed, first_line
from distill.runtime.hub import is_hub_reached, why_not_reached
from distill.runtime.signals import Signals, in_force
from distill.runtime.version import pip_install

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}  # by protocol
ATTEMPTS = 12  # until storage that fails ends the run: a minute and a half of pauses in the mean
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0  # seconds before the second attempt, and before any
NAP = 0.25  # seconds of a pause between two looks whether the process is to stop
# Errors of libraries that need not be installed, which another attempt does not mend.
NO_ACCESS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ParamValidationError")
PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


def is_url(place: str) -> bool:
    """Whether this names a file or folder through fsspec, not one of this machine's file system."""
    return "://" in place


def is_web(url: str) -> bool:
    """Whether it is at a web server, which has no folders but pages with links."""
    return url.startswith(("http://", "https://"))


def file_system(place: str, setting: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path in it.

    Args:
        setting: which has the URL as its value, for error lines.

    Raises:
        SettingError: the protocol is not known, or needs a package that is not installed.
    """
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    if not is_url(place):
        return LocalFileSystem(), os.path.expanduser(place)
    protocol = place.partition("://")[0]
    if protocol == "hf" and not is_hub_reached():
        raise SettingError(f"{setting}={place} cannot be reached: {why_not_reached()}, or give a local copy")
    if protocol in ("s3", "s3a"):  # around whose five attempts s3fs makes five of its own
        os.environ.setdefault("AWS_MAX_ATTEMPTS", "1")
    try:
        system, path = url_to_fs(place)
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        cure = pip_install(extra) if extra else "install it"
        raise SettingError(f"{setting}={place}: {protocol}:// needs a package ({first_line(error)}): {cure}") from error
    except ValueError as error:
        raise SettingError(
            f"{setting}={place}: {first_line(error)}: give a local path, or s3://, gs://, hf:// or https://"
        ) from error
    return system, path


@contextmanager
def reachable(setting: str, url: str) -> Iterator[None]:
    """Turns whatever a service answers to the first request for a URL into one line that names the setting.

    Errors of a path of this machine are left as they are.

    Raises:
        SettingError: it does not answer, or refuses.
    """
    try:
        yield
    except (SettingError, StorageFailed):
        raise
    except Exception as error:  # each library has errors of its own for a wrong name, no permission and no network
        if not is_url(url):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise SettingError(
            f"{setting}={url} cannot be reached ({reason}); check the name, the network, and the credentials in the "
            "environment"
        ) from error


def retried(call: Callable[[], Result], what: str) -> Result:
    """The result of a call to storage, which is made again where it fails in a way that may pass.

    The pauses between two attempts are drawn from 0 to a limit that doubles each time, so that many processes that
    failed together do not come back together.

    Raises:
        StorageFailed: every attempt has failed, or the call has raised it.
        OSError: of a kind that does not pass, such as FileNotFoundError and PermissionError.
        Exception: the call itself is wrong.
        Interrupted: an attempt has failed, and a signal is to stop the process.
    """
    signals = in_force()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except Exception as error:
            if not may_pass(error):
                raise
            signals.raise_if_stopped()
            reason = f"{type(error).__name__}: {first_line(error)}"
            if attempt == ATTEMPTS:
                raise StorageFailed(
                    f"{what}: storage has failed {ATTEMPTS} times, at last with {reason}: restore access; the same "
                    "command then continues"
                ) from error
            logger.debug(f"{what}: {reason}; attempt {attempt + 1}")
            pause(random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt)), signals)
    raise AssertionError("no attempt was made")


def may_pass(error: Exception) -> bool:
    """Whether another attempt may succeed: an error of the system or of a library, that is none of a permanent kind.

    Python's own errors, such as a TypeError, are mistakes in a program.
    """
    if isinstance(error, PERMANENT) or type(error).__name__ in NO_ACCESS:
        return False
    if isinstance(error, OSError):
        return error.errno != errno.ENOSYS  # the service has no such operation
    return isinstance(error, EOFError) or type(error).__module__.partition(".")[0] not in ("builtins", "distill")


def pause(seconds: float, signals: Signals) -> None:
    """Wait for so long. Raises Interrupted soon after a signal to stop the process, in any thread."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, NAP))
        signals.raise_if_stopped()
