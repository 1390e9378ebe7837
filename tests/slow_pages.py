"""Memory whose pages come late, one by one, as those of a mapped file on slow storage do (Linux's userfaultfd)."""

import ctypes
import fcntl
import heapq
import mmap
import os
import select
import struct
import threading
import time

import numpy as np

PAGE = mmap.PAGESIZE
USERFAULTFD = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine)  # number of the system call
FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | 1  # 1: faults of this process's own code, for which no rights are needed
API, REGISTER, COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03  # ioctls of <linux/userfaultfd.h>
VERSION, MISSING = 0xAA, 1


class SlowPages:
    """A copy of rows [N, S], each in a page of its own, that comes `latency` seconds after it was first touched.

    Raises:
        OSError: the system does not offer this.
    """

    def __init__(self, rows: np.ndarray, latency: float) -> None:
        self.latency, self.reads = latency, 0
        self._fd = ctypes.CDLL(None, use_errno=True).syscall(USERFAULTFD or -1, FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        fcntl.ioctl(self._fd, API, bytearray(struct.pack("QQQ", VERSION, 0, 0)))
        self._pages = np.zeros((len(rows), PAGE // rows.itemsize), rows.dtype)
        self._pages[:, : rows.shape[1]] = rows
        memory = mmap.mmap(-1, self._pages.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.rows = np.frombuffer(memory, rows.dtype).reshape(self._pages.shape)[:, : rows.shape[1]]
        self._start = self.rows.ctypes.data
        fcntl.ioctl(self._fd, REGISTER, bytearray(struct.pack("QQQQ", self._start, self._pages.nbytes, MISSING, 0)))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        """Bring each page that is touched when its time has come."""
        due: list[tuple[float, int]] = []
        while True:
            left = max(0.0, due[0][0] - time.monotonic()) if due else None
            if select.select([self._fd], [], [], left)[0]:
                (address,) = struct.unpack_from("Q", os.read(self._fd, 32), 16)
                heapq.heappush(due, (time.monotonic() + self.latency, (address - self._start) // PAGE))
            while due and due[0][0] <= time.monotonic():
                page = heapq.heappop(due)[1]
                source = self._pages.ctypes.data + page * PAGE
                fcntl.ioctl(
                    self._fd, COPY, bytearray(struct.pack("QQQQq", self._start + page * PAGE, source, PAGE, 0, 0))
                )
                self.reads += 1
