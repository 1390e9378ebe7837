"""What a process may have to live with: limits, disks, rights, a network that is away. Each is set up inside it.

Mounts and namespaces are the process's own and end with it; they need root.
"""

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

IS_ROOT = os.geteuid() == 0
LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
CAPABILITY_VERSION_3 = 0x20080522


def all_of(*changes: Callable[[], object]) -> None:
    """One after the other."""
    for change in changes:
        change()


def limit(which: int, value: int) -> None:
    """As `ulimit` does: the soft and the hard limit."""
    resource.setrlimit(which, (value, value))


def more_memory(size: int) -> None:
    """At most so many bytes of addresses beyond those that the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(resource.RLIMIT_AS, pages * resource.getpagesize() + size)


def _checked(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _mount(source: str, path: str, kind: str, flags: int, options: str = "") -> None:
    words = [word.encode() for word in (source, path, kind)]
    _checked(LIBC.mount(*words, ctypes.c_ulong(flags), options.encode()))


def _own_mounts() -> None:
    _checked(LIBC.unshare(CLONE_NEWNS))
    _mount("none", "/", "", MS_REC | MS_PRIVATE)


def disk(path: str, size: int, full: bool = False) -> None:
    """A disk of so many bytes is mounted at the path; `full`: something fills it."""
    _own_mounts()
    _mount("tmpfs", path, "tmpfs", 0, f"size={size}")
    if full:
        fill(Path(path))


def fill(folder: Path) -> None:
    """Until there is no room in it."""
    with (folder / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def read_only(path: str) -> None:
    """The path is mounted so."""
    _own_mounts()
    _mount(path, path, "", MS_BIND)
    _mount("none", path, "", MS_REMOUNT | MS_BIND | MS_RDONLY)


def no_network() -> None:
    """Not even the loopback interface is up."""
    _checked(LIBC.unshare(CLONE_NEWNET))


def plain_user() -> None:
    """Permissions hold for root too, which has no capabilities any more."""
    if IS_ROOT:
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        _checked(LIBC.capset(header, (ctypes.c_uint32 * 6)()))


def without_reader(number: int) -> None:
    """The stream is a pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, number)


def into(path: str, number: int) -> None:
    """The stream is this file."""
    os.dup2(os.open(path, os.O_RDWR), number)


def ignore(number: int) -> None:
    """As `nohup` does with SIGHUP."""
    signal.signal(number, signal.SIG_IGN)


def block(number: int) -> None:
    """The signal waits for ever."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])


def wrong_clock(names: tuple[str, ...], jumps: tuple[float, ...], every: float) -> None:
    """The clocks of these names in `time` jump by so many seconds, one after the other, every so many real seconds."""
    real = time.perf_counter
    begun = real()

    def jumping(clock: Callable[[], Any], unit: float) -> Callable[[], Any]:
        def read() -> Any:
            passed = min(int((real() - begun) / every), len(jumps))
            return clock() + type(clock())(sum(jumps[:passed]) * unit)

        return read

    for name in names:
        unit = 1e9 if name.endswith("_ns") else 1.0
        setattr(time, name, jumping(getattr(time, name), unit))


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
