"""Disks that are full: what a process may have to live with, set up inside it."""

import os
from pathlib import Path
from typing import Any

IS_ROOT = os.geteuid() == 0


def fill(folder: Path) -> None:
    """Until there is no room in it."""
    with (folder / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def full_after(size: int, errno: int, under: str) -> None:
    """What is written through `os.write`, files of Python and `torch.save` fails from the n-th byte on.

    Only files in the folder `under` count, by their descriptors.
    """
    import builtins
    import io

    left = [size]

    def count(length: int) -> None:
        left[0] -= length
        if left[0] < 0:
            raise OSError(errno, os.strerror(errno))

    class Raw(io.FileIO):
        def write(self, content: Any) -> int:
            count(memoryview(content).nbytes)
            return super().write(content)

    real_open, real_write = builtins.open, os.write

    def opened(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
        inside = isinstance(file, str | os.PathLike) and os.path.abspath(os.fspath(file)).startswith(under)
        if not inside or not {*"wax+"} & {*mode} or more[3:] or {"opener", "closefd"} & {*named}:
            return real_open(file, mode, buffering, *more, **named)
        raw = Raw(os.fspath(file), mode.replace("t", "").replace("b", ""))
        if buffering == 0:
            return raw
        buffer: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        text = dict(zip(("encoding", "errors", "newline"), more, strict=False)) | named
        return buffer if "b" in mode else io.TextIOWrapper(buffer, **text)

    def written(number: int, content: Any) -> int:
        if os.readlink(f"/proc/self/fd/{number}").startswith(under):
            count(memoryview(content).nbytes)
        return real_write(number, content)

    builtins.open = io.open = opened
    os.write = written
