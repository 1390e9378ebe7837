"""Folders of prepared sequences, on a disk or at a URL: every file in one appears whole or not at all."""

import os
import secrets
import shutil
from asyncio import run_coroutine_threadsafe
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.data.remote import NAP, file_system, is_url, retried
from distill.runtime.errors import StorageFailed
from distill.runtime.signals import in_force

WORK = "parts"  # the folder in another one for files that are removed once all is done


@dataclass(frozen=True)
class Folder:
    """Files by their names. Any number of hosts may write to it: those that write the same file write the same bytes.

    Attributes:
        place: path or URL.
        setting: what names it, for error lines.
    """

    place: str
    setting: str

    @property
    def path(self) -> Path | None:
        """Where it is on this machine; None: at a URL."""
        return None if is_url(self.place) else Path(self.place).expanduser()

    def name(self, name: str) -> str:
        """The path or URL of a file."""
        return f"{self.place.rstrip('/')}/{name}" if self.path is None else str(self.path / name)

    def exists(self, name: str) -> bool:
        if self.path is not None:
            return (self.path / name).exists()
        system, path = self._remote(name)
        return bool(retried(lambda: system.exists(path), self.name(name)))

    def read(self, name: str) -> bytes:
        """The content of a file. Raises FileNotFoundError where there is none."""
        if self.path is not None:
            return (self.path / name).read_bytes()
        system, path = self._remote(name)
        return bytes(retried(lambda: system.cat_file(path), self.name(name)))

    def write(self, name: str, content: bytes) -> None:
        """Makes a file, or replaces it. Raises FileNotFoundError where a host that has done all removes `WORK`."""
        if self.path is not None:
            with suppress(FileExistsError):  # mkdir raises it, too, where the folder goes before it looks
                (self.path / WORK).mkdir(parents=True, exist_ok=True)
            new = self.path / WORK / f".{Path(name).name}.{secrets.token_hex(6)}.new"
            new.write_bytes(content)
            self.put(new, name)
            return
        system, path = self._remote(name)
        retried(lambda: system.pipe_file(path, content), self.name(name))

    def put(self, file: Path, name: str) -> None:
        """Makes a file of one of this machine; in a folder of this machine it is moved, within one file system."""
        if self.path is not None:
            os.replace(file, self.path / name)
        else:
            retried(lambda: self._upload(file, name), self.name(name))

    def _upload(self, file: Path, name: str) -> None:
        system, path = self._remote(name)
        system.put_file(str(file), path)
        system.invalidate_cache()
        if (there := system.info(path)["size"]) != (size := file.stat().st_size):
            raise OSError(f"{there:,} of {size:,} bytes have arrived")

    def names(self, folder: str = "") -> set[str]:
        """The files and folders in a folder of this one; none where there is no such folder."""
        with suppress(FileNotFoundError):
            if self.path is not None:
                return {entry.name for entry in os.scandir(self.path / folder)}
            system, path = self._remote(folder)
            paths = retried(lambda: system.ls(path, detail=False), self.name(folder))
            return {name for path in paths if (name := path.rstrip("/").rpartition("/")[2])}
        return set()

    def remove_folder(self, name: str) -> None:
        """Removes a folder with all that is in it, which another host may be doing as well."""
        if self.path is not None:
            shutil.rmtree(self.path / name, ignore_errors=True)
            return
        system, path = self._remote(name)
        with suppress(OSError, StorageFailed):  # as where a bucket lets nobody delete
            retried(lambda: system.rm(path, recursive=True), self.name(name))

    def _remote(self, name: str) -> tuple[Any, str]:
        """The file system of a file at a URL, without its record of listings, since other hosts write, and the path."""
        system, path = file_system(self.name(name), self.setting)
        system.invalidate_cache()
        return system, path


def fetch_file(name: str, setting: str, target: Path) -> None:
    """Copies a file from a path or URL, in one attempt. Raises Interrupted where a signal stops the process."""
    if not is_url(name):
        shutil.copyfile(name, target)
        return
    system, path = file_system(name, setting)
    if not system.async_impl:
        system.get_file(path, str(target))
        return
    signals = in_force()
    coming = run_coroutine_threadsafe(system._get_file(path, str(target)), system.loop)
    try:
        while not wait([coming], NAP).done:
            signals.raise_if_stopped()
        coming.result()
    finally:
        coming.cancel()
