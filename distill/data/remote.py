"""Files at URLs (s3://, gs://, hf://, https:// ...), with those methods of `pathlib.Path` that readers of text use.

Bytes come through fsspec. Credentials, regions and endpoints are never settings: each service's own library finds them
in the environment, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL.
"""

import errno
import fnmatch
import io
import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from distill.data.s3_options import s3_options
from distill.runtime.errors import SettingError, StorageFailed, first_line
from distill.runtime.hub import is_hub_reached, why_not_reached
from distill.runtime.signals import Signals, in_force
from distill.runtime.version import pip_install

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}  # by protocol
WEB = ("http", "https")  # which have no folders but pages with links
# Bytes of a file in one request, and in memory. More would be faster by itself, but text is turned
# into tokens at a tenth of the rate, and of a range of a file so much may be read beyond its end.
BUFFER = 2 << 20
ATTEMPTS = 12  # until storage that fails ends the run: a minute and a half of pauses in the mean
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0  # seconds before the second attempt, and before any
NAP = 0.25  # seconds of a pause between two looks whether the process is to stop
THREADS = 16  # that request the sizes of files which no listing gives
# Errors of libraries that need not be installed, which another attempt does not mend.
NO_ACCESS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ParamValidationError")
# What distinguishes one version of a file from another, by the names that services give it, the surest first: what
# follows from its content alone, and then what is of the place where it lies.
DIGESTS = ("ETag", "blob_id", "oid", "md5Hash")
VERSIONS = ("etag", "generation", "LastModified", "last_modified", "mtime")

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class NoRanges(OSError):
    """A server sends files as a whole, whatever part of them is requested."""


PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, NoRanges)


def is_url(path: str) -> bool:
    """Whether this names a file or folder through fsspec, not one of this machine's file system."""
    return "://" in path


def file_system(url: str, setting: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    Args:
        setting: which has the URL as its value, for error lines.

    Raises:
        SettingError: the protocol is not known, or needs a package that is not installed.
    """
    from fsspec import get_filesystem_class
    from fsspec.core import url_to_fs

    protocol = url.partition("://")[0]
    if protocol == "hf" and not is_hub_reached():
        raise SettingError(f"{setting}={url} cannot be reached: {why_not_reached()}, or give a local copy")
    try:
        if options := s3_options(protocol):
            kind = _one_attempt(get_filesystem_class(protocol))
            return kind(**options, **kind._get_kwargs_from_urls(url)), kind._strip_protocol(url)
        system, path = url_to_fs(url)
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        cure = pip_install(extra) if extra else "install it"
        raise SettingError(f"{setting}={url}: {protocol}:// needs a package ({first_line(error)}): {cure}") from error
    except ValueError as error:
        raise SettingError(
            f"{setting}={url}: {first_line(error)}: give a local path, or s3://, gs://, hf:// or https://"
        ) from error
    return system, path


@cache
def _one_attempt(kind: Any) -> Any:
    """The class of a file system whose own attempts, which are no argument of it, are one."""
    return type(kind.__name__, (kind,), {"retries": 1})


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


def retried(
    call: Callable[[], Result], what: str, attempts: int = ATTEMPTS, failed: Callable[[str], None] | None = None
) -> Result:
    """The result of a call to storage, which is made again where it fails in a way that may pass.

    The pauses between two attempts are drawn from 0 to a limit that doubles each time, so that many processes that
    failed together do not come back together.

    Args:
        failed: gets the reason of each failure that is followed by another attempt.

    Raises:
        StorageFailed: every attempt has failed, or the call has raised it.
        OSError: of a kind that does not pass, such as FileNotFoundError and PermissionError.
        Exception: the call itself is wrong.
        Interrupted: an attempt has failed, and a signal is to stop the process.
    """
    signals = in_force()
    for attempt in range(1, attempts + 1):
        try:
            return call()
        except Exception as error:
            if not _may_pass(error):
                raise
            signals.raise_if_stopped()
            reason = f"{type(error).__name__}: {first_line(error)}"
            if attempt == attempts:
                raise StorageFailed(
                    f"{what}: storage has failed {attempts} times, at last with {reason}: restore access; the same "
                    "command then continues"
                ) from error
            logger.debug(f"{what}: {reason}; attempt {attempt + 1}")
            if failed is not None:
                failed(reason)
            pause(random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt)), signals)
    raise AssertionError("no attempt was made")


def _may_pass(error: Exception) -> bool:
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


class FileState(NamedTuple):
    """What is known of a file without reading it."""

    size: int | None  # bytes; None: its server does not report it
    version: str  # changes with its content; empty where the service has no such thing
    is_digest: bool = False  # whether that is the same for the same content, wherever it lies


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or folder at a URL."""

    url: str
    setting: str = field(default="corpus.path", compare=False)  # which names it, for error lines
    listed: FileState | None = field(default=None, compare=False)  # None: to be requested

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self._pure.name

    @property
    def suffix(self) -> str:
        return self._pure.suffix

    @property
    def suffixes(self) -> list[str]:
        return self._pure.suffixes

    @property
    def _pure(self) -> PurePosixPath:
        return PurePosixPath(urlsplit(self.url).path if self.is_web else self.url.partition("://")[2])

    @property
    def is_web(self) -> bool:
        return self.url.partition("://")[0] in WEB

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.url.rstrip("/").rpartition("/")[0], self.setting)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url.rstrip('/')}/{name}", self.setting)

    def is_file(self) -> bool:
        if self.listed is not None or self.is_web:
            return not self.url.endswith("/") and (self.listed is not None or "*" not in self.url)
        system, path = file_system(self.url, self.setting)
        return bool(retried(lambda: system.isfile(path), self.url))

    def is_dir(self) -> bool:
        if self.listed is not None or self.is_web:
            return self.url.endswith("/")
        system, path = file_system(self.url, self.setting)
        return bool(retried(lambda: system.isdir(path), self.url))

    def state(self) -> FileState:
        """Size and version, requested unless a listing had them."""
        if self.listed is not None and self.listed.size is not None:
            return self.listed
        system, path = file_system(self.url, self.setting)
        return self._state(retried(lambda: system.info(path), self.url))

    def _state(self, info: dict[str, Any]) -> FileState:
        """What a service reports. A web server makes its ETag of a time, or of whatever it likes."""
        names = [name for name in (*DIGESTS, *VERSIONS) if info.get(name) is not None]
        version = str(info[names[0]]) if names else ""
        return FileState(info.get("size"), version, not self.is_web and names[:1] != [] and names[0] in DIGESTS)

    def rglob(self, pattern: str = "*") -> "list[RemotePath]":
        """The files below a folder whose names match."""
        system, path = file_system(self.url, self.setting)
        entries = retried(lambda: system.find(path, detail=True), self.url)
        return [path for path in self._listed(system, entries) if fnmatch.fnmatch(path.name, pattern)]

    def expanded(self) -> "list[RemotePath]":
        """The files that match the URL itself, which is a pattern."""
        system, path = file_system(self.url, self.setting)
        return self._listed(system, retried(lambda: system.glob(path, detail=True), self.url))

    def _listed(self, system: Any, entries: dict[str, dict[str, Any]]) -> "list[RemotePath]":
        files = [
            (system.unstrip_protocol(path), info) for path, info in entries.items() if info.get("type") != "directory"
        ]
        if not self.is_web:  # where fsspec has one of several names, as s3 of s3a
            protocol = self.url.partition("://")[0]
            files = [(f"{protocol}://{url.partition('://')[2]}", info) for url, info in files]
        return [RemotePath(url, self.setting, self._state(info)) for url, info in files]

    def open(self, mode: str = "rb", buffered: bool = True) -> Any:
        """A file object that requests ranges of the content as they are read, and again where storage fails.

        Args:
            buffered: 2 MiB are requested at once; else as much as is read, for readers that choose their ranges.

        Raises:
            OSError: there is no such file, or its server does not report its size.
            StorageFailed: in reading, when storage keeps failing.
        """
        assert mode == "rb"
        system, path = file_system(self.url, self.setting)
        if (size := self.state().size) is None:
            raise OSError("its server does not report its size; download it and give the local file")
        ranges = _Ranges(system, path, size, self.url)
        return io.BufferedReader(ranges, BUFFER) if buffered else ranges


def path_of(path: str, setting: str = "corpus.path") -> Path:
    """The path that a text names; a `RemotePath`, which has the methods that readers use, where it is a URL."""
    return cast(Path, RemotePath(path, setting)) if is_url(path) else Path(path).expanduser()


def for_each(call: Callable[[Path], Result], paths: list[Path]) -> list[Result]:
    """The results of a call for each file, several at a time where one has to wait for a network."""
    if not any(isinstance(path, RemotePath) for path in paths):
        return [call(path) for path in paths]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(call, paths))


def with_states(paths: list[Path]) -> list[Path]:
    """The same files; of those at URLs the states are known, also where no listing had them."""
    return for_each(_with_state, paths)


def _with_state(path: Path) -> Path:
    if not isinstance(path, RemotePath) or (path.listed is not None and path.listed.size is not None):
        return path
    return cast(Path, replace(path, listed=path.state()))


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where its server does not report it."""
    return path.state().size or 0 if isinstance(path, RemotePath) else path.stat().st_size


class _Ranges(io.RawIOBase):
    """A file of known size at a URL, of which every read requests just the bytes that it needs."""

    def __init__(self, system: Any, path: str, size: int, url: str) -> None:
        self._system, self._path, self._size, self._url = system, path, size, url
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        if count:
            buffer[:count] = retried(lambda: self._fetch(count), self._url)
            self._at += count
        return count

    def _fetch(self, count: int) -> bytes:
        data: bytes = self._system.cat_file(self._path, start=self._at, end=self._at + count)
        if len(data) > count:
            raise NoRanges("its server sends whole files only; download it and give the local file")
        if len(data) < count:
            raise OSError(f"{len(data):,} of {count:,} bytes came")
        return data
