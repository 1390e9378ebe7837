"""Shards of given rows, and storage that fails, for tests and benchmarks of reading."""

import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distill.config.settings import DataConfig
from distill.data.shards import Index, Made, Part, ShardFile, Shards, read_index
from distill.data.storage import Folder

FAULTS = ("refused", "cut", "503", "truncated", "wrong")


def write_shards(folder: Path, rows: np.ndarray, shard_rows: int) -> Folder:
    """The rows [N, S] as the part `train` of prepared sequences, so many in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, first in enumerate(range(0, len(rows), shard_rows)):
        content = rows[first : first + shard_rows].tobytes()
        files.append(ShardFile(f"train-{number:05d}.bin", len(content) // rows[0].nbytes, sha256(content).hexdigest()))
        (folder / files[-1].name).write_bytes(content)
    index = Index(
        made=Made(text="rows", settings={}, prompts=False),
        dtype=rows.dtype.name,
        sequence_length=rows.shape[1],
        train=Part(sequences=len(rows), files=files),
        heldout=Part(),
        left_out={},
        seconds=1.0,
    )
    (folder / "index.json").write_bytes(index.content())
    return Folder(str(folder), "data.tokens")


def open_rows(place: Path | str, data: DataConfig) -> Shards:
    """The part `train` at a folder or URL."""
    folder = Folder(str(place), "data.tokens")
    return Shards(folder, "train", read_index(folder), data)


class Answer(NamedTuple):
    """Of an HTTP server to one request."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


Source = Callable[[str, str, dict[str, str], bytes], Answer]  # method, path, headers and body of a request


def files_of(read: Callable[[str, int, int | None], bytes], size: Callable[[str], int]) -> Source:
    """A server of files with ranges: `read` gives their bytes from one offset to another one."""

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        name = path.lstrip("/")
        try:
            whole = size(name)
        except FileNotFoundError:
            return Answer(404, [], b"")
        range_ = headers.get("range")
        if range_ is None:
            content = read(name, 0, None) if method == "GET" else b""
            return Answer(200, [("Accept-Ranges", "bytes"), ("Content-Length", str(whole))], content)
        first, last = range_.removeprefix("bytes=").split("-")
        begin, end = int(first), min(int(last) + 1, whole)
        there = f"bytes {begin}-{end - 1}/{whole}"
        return Answer(206, [("Content-Range", there)], read(name, begin, end))

    return answer


def folder_of_files(folder: Path) -> Source:
    def read(name: str, begin: int, end: int | None) -> bytes:
        return (folder / name).read_bytes()[begin:end]

    return files_of(read, lambda name: (folder / name).stat().st_size)


def forwarded(host: str, port: int) -> Source:
    """What another server answers."""

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        connection = HTTPConnection(host, port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, response.getheaders(), response.read())
        finally:
            connection.close()

    return answer


class Faulty:
    """A server before another source of answers, which spoils a share of those to GET and slows all of them down.

    Attributes:
        share: of the answers that are spoilt, one kind of fault as often as another.
        rate: bytes a second of all answers together; None: as fast as it goes.
        faults: how often each kind was done.
        kinds: of faults that are done; bytes are wrong or missing in parts of files only, unless `whole`.
        last: answers to GET after which each one is refused.
    """

    def __init__(
        self,
        source: Source,
        share: float = 0.0,
        rate: float | None = None,
        seed: int = 0,
        kinds: tuple[str, ...] = FAULTS,
        whole: bool = False,
    ) -> None:
        self.source, self.share, self.rate, self.kinds, self.whole = source, share, rate, kinds, whole
        self.faults: Counter[str] = Counter()
        self.requests, self.last = 0, 1 << 60
        self._draw, self._lock, self._free = random.Random(seed), threading.Lock(), time.monotonic()

    @contextmanager
    def serving(self) -> Iterator[str]:
        """The URL of the server while it runs."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()

    def draw(self, part: bool) -> str | None:
        """The fault of the next answer, if there is to be one."""
        kinds = [kind for kind in self.kinds if part or self.whole or kind in FAULTS[:3]]
        with self._lock:
            self.requests += 1
            if self.requests <= self.last and (self._draw.random() >= self.share or not kinds):
                return None
            fault = self._draw.choice(kinds) if self.requests <= self.last else "refused"
            self.faults[fault] += 1
            return fault

    def wait_for_line(self, num_bytes: int) -> None:
        """As long as so many bytes take on a line that all answers share."""
        if self.rate is None:
            return
        with self._lock:
            self._free = max(self._free, time.monotonic()) + num_bytes / self.rate
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


def _handler(server: Faulty) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            fault = server.draw("range" in headers) if self.command == "GET" else None
            if fault == "refused":
                return self.hang_up()
            if fault == "503":
                return self.send(Answer(503, [], b"<Error><Code>SlowDown</Code></Error>"))
            found = server.source(self.command, self.path, headers, body)
            server.wait_for_line(len(found.body))
            if fault == "truncated":
                found = found._replace(body=found.body[: len(found.body) // 2])
            if fault == "wrong" and found.body:
                middle = len(found.body) // 2
                spoilt = bytes([found.body[middle] ^ 255])
                found = found._replace(body=found.body[:middle] + spoilt + found.body[middle + 1 :])
            self.send(found, cut=fault == "cut")

        def send(self, found: Answer, cut: bool = False) -> None:
            self.send_response(found.status)
            kept = {name.lower(): value for name, value in found.headers}
            length = kept.pop("content-length", "0") if self.command == "HEAD" else str(len(found.body))
            for name, value in (kept | {"content-length": length}).items():
                if name not in ("transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(found.body[: len(found.body) // 2] if cut else found.body)
            if cut:
                self.hang_up()

        def hang_up(self) -> None:
            """Reset the connection instead of closing it."""
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

        def finish(self) -> None:
            with suppress(OSError, ValueError):
                super().finish()

    return Handler
