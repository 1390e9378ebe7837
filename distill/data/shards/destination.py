"""The folder that prepared sequences go to, on a disk or at a URL: every file in it appears whole or not at all.

Any number of hosts may write to it at the same time. Two that write the same file write the same bytes.
"""

import errno
import io
import json
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from distill.data.remote import file_system, is_url, retried
from distill.runtime.errors import Damaged

WORK = "parts"  # the folder in a destination for files that are removed once all is done
UNFINISHED = ".new"  # ends the names of files of a disk that are being written
UPLOADS = 4  # parts of one file that are on their way at the same time, and so in memory


def array_bytes(array: np.ndarray) -> bytes:
    """The content of a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def array_in(content: bytes, name: str) -> np.ndarray:
    """The array in the content of a .npy file of this name. Raises Damaged where there is none."""
    try:
        array: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # of any kind, from a header that is none
        raise Damaged(name, "it is not the array that was written") from error
    return array


class Destination(ABC):
    """A folder with files by their names, which may begin with the name of one folder in it."""

    place: str  # path or URL

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a file. Raises FileNotFoundError where there is none."""

    def read_json(self, name: str) -> Any:
        """The object in a JSON file. Raises FileNotFoundError as `read`, and Damaged where there is none in it."""
        try:
            content = json.loads(self.read(name))
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise Damaged(f"{self.place}/{name}", "it is not the JSON that was written")
        return content

    def read_array(self, name: str) -> np.ndarray:
        """The array in a .npy file. Raises FileNotFoundError as `read`, and Damaged where there is none in it."""
        return array_in(self.read(name), f"{self.place}/{name}")

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Makes a file, or replaces it."""

    @abstractmethod
    def create(self, name: str, content: bytes) -> bool:
        """Makes a file unless there is one; whether it did.

        Of several hosts at once one does, but on storage without such a promise several may.
        """

    @abstractmethod
    def names(self, folder: str) -> set[str]:
        """The files in a folder of this one; none where there is no such folder."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file or a folder; nothing happens where there is none."""

    @abstractmethod
    def written(self, name: str, scratch: Path) -> Any:
        """A context that gives a path of this machine to write; the file appears when the context ends without error.

        Args:
            scratch: a folder of this machine for a file on its way to a URL.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is such a file."""


class LocalFolder(Destination):
    """On a file system, which several hosts may share."""

    def __init__(self, place: str) -> None:
        self.place, self.folder = place, Path(place).expanduser()

    def exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        with self.written(name) as new:
            new.write_bytes(content)

    def create(self, name: str, content: bytes) -> bool:
        path = self.folder / name
        new = self._new(path)
        new.write_bytes(content)
        try:
            os.link(new, path)  # unlike a renaming it fails where there is such a file
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            if path.exists():
                return False
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
        return True

    def names(self, folder: str) -> set[str]:
        try:
            return {entry.name for entry in os.scandir(self.folder / folder)}
        except FileNotFoundError:
            return set()

    def remove(self, name: str) -> None:
        # Another host may be making or removing the same folder, so nothing is sure from one call to the next.
        path = self.folder / name
        try:
            path.unlink(missing_ok=True)
        except OSError:
            if not path.is_dir() and path.exists():
                raise
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def written(self, name: str, scratch: Path | None = None) -> Iterator[Path]:
        path = self.folder / name
        new = self._new(path)
        try:
            yield new
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)

    def _new(self, path: Path) -> Path:
        """A name that no other process uses, in the folder that goes when all is done."""
        folder = self.folder / WORK
        with suppress(FileExistsError):  # it was there, and another host that has finished removes it in this moment
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f".{path.name}.{secrets.token_hex(6)}{UNFINISHED}"


class RemoteFolder(Destination):
    """In object storage, where a file appears when the request that makes it ends."""

    def __init__(self, place: str, setting: str) -> None:
        self.place, self.setting = place.rstrip("/"), setting

    @property
    def _system(self) -> Any:
        """Found anew where it is used, since this object is sent to other processes."""
        return file_system(self.place, self.setting)[0]

    def _path(self, name: str) -> str:
        return str(file_system(f"{self.place}/{name}", self.setting)[1])

    def _retried(self, call: Any, name: str) -> Any:
        return retried(call, f"{self.place}/{name}")

    def exists(self, name: str) -> bool:
        system = self._system
        system.invalidate_cache()
        return bool(self._retried(lambda: system.exists(self._path(name)), name))

    def read(self, name: str) -> bytes:
        return bytes(self._retried(lambda: self._system.cat_file(self._path(name)), name))

    def write(self, name: str, content: bytes) -> None:
        self._retried(lambda: self._system.pipe_file(self._path(name), content), name)

    def create(self, name: str, content: bytes) -> bool:
        try:
            self._retried(lambda: self._system.pipe_file(self._path(name), content, mode="create"), name)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno != errno.ENOSYS:  # a service that can only write unconditionally
                raise
            if self.exists(name):
                return False
            self.write(name, content)
        return True

    def names(self, folder: str) -> set[str]:
        system = self._system
        system.invalidate_cache()  # fsspec keeps listings, and other hosts write
        try:
            paths = self._retried(lambda: system.ls(self._path(folder), detail=False), folder)
        except FileNotFoundError:
            return set()
        return {name for path in paths if (name := path.rstrip("/").rpartition("/")[2])}

    def remove(self, name: str) -> None:
        system = self._system
        system.invalidate_cache()
        with suppress(FileNotFoundError):
            self._retried(lambda: system.rm(self._path(name), recursive=True), name)

    @contextmanager
    def written(self, name: str, scratch: Path) -> Iterator[Path]:
        new = scratch / f"{name.replace('/', '-')}{UNFINISHED}"
        try:
            yield new
            self._retried(lambda: self._upload(new, name), name)
        finally:
            new.unlink(missing_ok=True)

    def _upload(self, file: Path, name: str) -> None:
        system, path = self._system, self._path(name)
        more = {"max_concurrency": UPLOADS} if "s3" in system.protocol else {}
        system.put_file(str(file), path, **more)
        system.invalidate_cache()
        if (there := system.info(path)["size"]) != (size := file.stat().st_size):
            raise OSError(f"{there:,} of {size:,} bytes have arrived")


def destination(place: str, setting: str) -> Destination:
    """The folder at a path or URL; `setting` is what names it, for error lines."""
    return RemoteFolder(place, setting) if is_url(place) else LocalFolder(place)
