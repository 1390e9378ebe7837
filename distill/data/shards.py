"""The prepared sequences of a text: files of about 64 MiB, their index, and sequences by number from them.

`index.json` is written last: without it the sequences are unfinished. It has the number of sequences and the SHA-256 of
each file, and a digest of itself. A file is checked when a process first reads it in a run, by whatever path it came.

K files, N sequences of S positions, V = length of the tokenizer.
"""

import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256 as sha256_of
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from distill.config.settings import DataConfig
from distill.data.disk_cache import folder_of, once
from distill.data.file_maps import State, forget_maps, read_rows, state_of
from distill.data.remote import retried
from distill.data.sequence_store import token_dtype
from distill.data.storage import Folder, fetch_file
from distill.runtime.errors import Damaged, StorageFailed, first_line
from distill.runtime.files import locked, sha256

PartName = Literal["train", "heldout"]
PARTS: tuple[PartName, PartName] = ("train", "heldout")
INDEX = "index.json"
DIGEST = "sha256"  # the entry of index.json that is the digest of all others
AT_ONCE = 4  # files that are fetched, or checked, at the same time
SHA256 = 64  # characters of a digest
MOST_WRONG = 6  # times that wrong bytes come until they are what is stored: a network spoils others each time
ATTEMPTS = 3  # to get a file through the cache, which may evict it in between, or whose disk may spoil it

logger = logging.getLogger(__name__)


class ShardFile(NamedTuple):
    """A file of consecutive sequences, one after the other."""

    name: str
    sequences: int
    sha256: str


class Part(BaseModel):
    """What one part of a text, or of some of its units, has become."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    sequences: int = 0
    tokens: int = 0
    documents: int = 0
    dropped: int = 0  # tokens of ends of documents that were too short for a sequence
    files: list[ShardFile] = []
    frequencies: bytes = b""  # [V] int64: how often each token occurs; empty: not counted yet

    @property
    def counts(self) -> np.ndarray:
        """[V] int64: how often each token occurs."""
        return np.frombuffer(self.frequencies, np.int64)

    def plus(self, other: "Part") -> "Part":
        """Both together, the other behind this one."""
        counts = self.counts + other.counts if self.frequencies and other.frequencies else None
        return Part(
            sequences=self.sequences + other.sequences,
            tokens=self.tokens + other.tokens,
            documents=self.documents + other.documents,
            dropped=self.dropped + other.dropped,
            files=self.files + other.files,
            frequencies=self.frequencies + other.frequencies if counts is None else counts.tobytes(),
        )


class Made(BaseModel):
    """What sequences were made from, and how: who has them needs neither the text nor the settings of then."""

    text: str  # in a few words
    settings: dict[str, Any]  # `Packing.described`
    prompts: bool  # whether tokens are records with a loss mask (`sequence_store`)


class Index(BaseModel):
    """The content of index.json."""

    made: Made
    dtype: Literal["uint16", "uint32"]  # of the ids
    sequence_length: int  # S
    train: Part
    heldout: Part
    left_out: dict[str, int]  # records of no use, by the reason
    duplicates: dict[str, int] | None = None  # counts of duplicate documents, where they were counted
    seconds: float  # that the preparation took, over all hosts

    def part(self, name: PartName) -> Part:
        part: Part = getattr(self, name)
        return part

    @property
    def token_dtype(self) -> np.dtype:
        """That of a token in the files."""
        return token_dtype(self.dtype, self.made.prompts)

    @property
    def sequence_bytes(self) -> int:
        return self.sequence_length * self.token_dtype.itemsize

    @property
    def tokens_per_second(self) -> float:
        """Of one host of the preparation, both parts together."""
        return (self.train.tokens + self.heldout.tokens) / max(self.seconds, 1e-9)

    def digest(self, part: PartName) -> str:
        """The same for the same sequences in the same files, wherever these lie."""
        head = f"{self.dtype} {self.sequence_length}\n"
        return sha256_of((head + "".join(file.sha256 for file in self.part(part).files)).encode()).hexdigest()

    def content(self) -> bytes:
        """What is stored as index.json."""
        content = self.model_dump(mode="json")
        return json.dumps({**content, DIGEST: _digest(content)}).encode()


def _digest(content: Any) -> str:
    return sha256_of(json.dumps(content).encode()).hexdigest()


def read_index(folder: Folder) -> Index:
    """The index of finished sequences.

    Raises:
        Damaged: there is none, or it is not as it was written.
        StorageFailed: object storage keeps failing.
    """
    name = folder.name(INDEX)
    try:
        data = folder.read(INDEX)
    except OSError as error:
        raise Damaged(name, f"it cannot be read: {first_line(error)}") from error
    try:
        content = json.loads(data)
        if content.pop(DIGEST, None) == _digest(content):
            return Index.model_validate(content)
    except (ValueError, TypeError, AttributeError) as error:
        raise Damaged(name, "it is not the JSON that was written") from error
    raise Damaged(name, "it is not as it was written: its SHA-256 differs")


class NodeCache:
    """Files on the disk of this machine, `data.local_bytes` of them at most: `<data.local>/shards`, or in `data.cache`.

    A file lies under its sha256, so that runs and corpora share a cache. One that is evicted while still needed is
    fetched again.
    """

    def __init__(self, data: DataConfig) -> None:
        """Raises SettingError where the folder cannot be written."""
        setting, place = ("data.cache", data.cache) if data.local is None else ("data.local", data.local)
        self.folder, self.max_bytes = folder_of(place, "shards", ".", setting), data.local_bytes

    def get(self, name: str, setting: str, digest: str, num_bytes: int) -> None:
        """Fetches a file, unless it is here, while other processes of the machine wait; it is evicted last.

        Args:
            name: its path or URL, which `setting` names.
            digest: its sha256, under which it lies here.

        Raises:
            Damaged: it is not as it was written where it comes from.
            StorageFailed: it cannot be had.
            Interrupted: a signal stops the process.
        """
        self.folder.mkdir(parents=True, exist_ok=True)  # which somebody may have removed
        with once(self.folder / digest, quiet=True) as missing:
            if missing:
                new = self.folder / f".{digest}.new"
                try:
                    self._fetch(name, setting, digest, num_bytes, new)
                    with locked(self.folder / "room.lock"):
                        self._make_room(num_bytes)
                        os.replace(new, self.folder / digest)
                finally:
                    new.unlink(missing_ok=True)
        path = self.folder / digest
        with suppress(FileNotFoundError, PermissionError):  # it is evicted in this moment, or another user's
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))  # its file system may not keep when it is read

    def discard(self, digest: str) -> None:
        """Removes a file that is not as it was written."""
        logger.warning(f"{self.folder / digest} is damaged; it is fetched again")
        (self.folder / digest).unlink(missing_ok=True)

    def _fetch(self, name: str, setting: str, digest: str, num_bytes: int, new: Path) -> None:
        def attempt() -> None:
            fetch_file(name, setting, new)
            if new.stat().st_size != num_bytes:
                raise EOFError(f"{new.stat().st_size:,} of {num_bytes:,} bytes have come")

        for _ in range(MOST_WRONG):
            try:
                retried(attempt, name)
            except OSError as error:  # of a kind that does not pass
                raise StorageFailed(f"{name} cannot be fetched ({first_line(error)})") from error
            if sha256(new) == digest:
                return
            logger.warning(f"{name}: the bytes that came are not those that were written; trying again")
        raise Damaged(name, "it is not as it was written: its SHA-256 differs")

    def _make_room(self, num_bytes: int) -> None:
        """Removes the files that a run has begun to read longest ago, until there is room for so many bytes."""
        files = []
        for entry in os.scandir(self.folder):
            if len(entry.name) == SHA256:  # all others are locks, or on their way
                with suppress(FileNotFoundError):
                    files.append((entry.stat().st_atime_ns, entry.stat().st_size, entry.path))
        total = num_bytes + sum(old_bytes for _, old_bytes, _ in files)
        for _, old_bytes, path in sorted(files):
            if total <= self.max_bytes:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            forget_maps()
            total -= old_bytes


class Shards:
    """The sequences of a part by number. Any thread may read.

    Files of this machine are read where they are, all others, and with `data.local` all, through its cache.
    """

    def __init__(self, folder: Folder, part: PartName, index: Index, data: DataConfig) -> None:
        """Raises SettingError where the folder of the cache cannot be written."""
        self.folder, self.files = folder, index.part(part).files
        self.cache = NodeCache(data) if folder.path is None or data.local is not None else None
        self.dtype = index.token_dtype
        self.shape = (index.part(part).sequences, index.sequence_length)
        counts = [file.sequences for file in self.files]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # [K + 1], the last is N
        self._row = np.dtype((np.void, index.sequence_bytes))  # numpy copies arrays of tokens token by token
        # Where each file is on this machine, or is to be.
        self._paths = [
            folder.name(file.name) if self.cache is None else f"{self.cache.folder}/{file.sha256}"
            for file in self.files
        ]
        self._states = dict[int, State]()  # of the files that were checked, as they were then
        self._locks = [Lock() for _ in self.files]  # for checking a file
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="shards")

    def __len__(self) -> int:
        """N."""
        return self.shape[0]

    @property
    def num_bytes(self) -> int:
        return len(self) * self._row.itemsize

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        """The sequences of these numbers [n], in their order: [n, S].

        Raises:
            StorageFailed: a file cannot be had, or is damaged.
        """
        numbers = np.asarray(numbers)
        files = np.searchsorted(self.starts, numbers, side="right") - 1
        order = np.argsort(files, kind="stable")
        indices = (numbers - self.starts[files])[order]
        different, first = np.unique(files[order], return_index=True)
        bounds = [*first.tolist(), len(numbers)]
        if len(missing := [file for file in different.tolist() if file not in self._states]) > 1:
            list(self._pool.map(self._ensure, missing))
        found = np.empty(len(numbers), self._row)
        for file, (begin, end) in zip(different.tolist(), pairwise(bounds), strict=True):
            found[order[begin:end]] = self._read(file, indices[begin:end])
        return found.view(self.dtype).reshape(len(numbers), self.shape[1])

    def _read(self, file: int, indices: np.ndarray) -> np.ndarray:
        """Sequences of a file that is as it was written; one that has changed since it was checked is checked again."""
        while True:
            self._ensure(file)
            rows = read_rows(self._paths[file], self._states.get(file), self._row, indices)
            if rows is not None:
                return rows
            self._states.pop(file, None)  # it was evicted, or something has written into it

    def _ensure(self, number: int) -> None:
        """Fetches the file of this number and checks it, unless that was done.

        Raises StorageFailed where it cannot be had, or is not as it was written; Damaged as the cache.
        """
        if number not in self._states:
            with self._locks[number]:
                if number not in self._states:  # by another thread, just now
                    self._states[number] = self._check(number)

    def _check(self, number: int) -> State:
        file, path, problem = self.files[number], self._paths[number], ""
        for _ in range(ATTEMPTS if self.cache else 1):
            if self.cache is not None:
                num_bytes = file.sequences * self._row.itemsize
                self.cache.get(self.folder.name(file.name), self.folder.setting, file.sha256, num_bytes)
            try:
                state = state_of(path)
                if sha256(Path(path)) == file.sha256:
                    return state
            except OSError as error:
                problem = f"{path} cannot be read ({error.strerror})"
                continue
            problem = f"{path} is damaged (its SHA-256 differs)"
            if self.cache is not None:
                self.cache.discard(file.sha256)
        cure = "give data.local=FOLDER on another disk" if self.cache else "restore that file, or delete its folder"
        raise StorageFailed(f"{problem}: {cure}; the same command then resumes")
