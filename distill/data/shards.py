"""The prepared sequences of a text: files of about 64 MiB, their index, and sequences by number from them.

`index.json` is written last: without it the sequences are unfinished. It has the number of sequences and the SHA-256 of
each file, and a digest of itself. A file is checked when a process first reads it in a run, by whatever path it came.

K files, N sequences of S positions, V = length of the tokenizer.
"""

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import file_digest
from hashlib import sha256 as sha256_of
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError

from distill.config.settings import DataConfig
from distill.data.disk_cache import num_processes
from distill.data.file_maps import State, read_rows, state_of
from distill.data.node_cache import NodeCache
from distill.data.remote import ATTEMPTS
from distill.data.sequence_store import token_dtype
from distill.data.storage import Folder, array_in
from distill.runtime.errors import Damaged, StorageFailed, first_line
from distill.runtime.files import quarantine, sha256

PartName = Literal["train", "heldout"]
PARTS: tuple[PartName, PartName] = ("train", "heldout")
INDEX = "index.json"
DIGEST = "sha256"  # the entry of index.json that is the digest of all others
AHEAD = 4  # files that are fetched, or checked, ahead of need at the same time
ATTEMPTS_AHEAD = 2  # to fetch such a file; the thread that needs it tries more often
MOST_WRONG = 3  # times that a file of the cache is fetched again because it is not what was fetched
AGAIN = "the same command makes it again and resumes"
CURE = "the same command checks it, makes it again where that is possible, and resumes"


class ShardFile(NamedTuple):
    """A file of consecutive sequences, one after the other."""

    name: str
    sequences: int
    sha256: str


class Counts(BaseModel):
    """What a part of the text has become."""

    sequences: int = 0
    tokens: int = 0
    documents: int = 0
    dropped: int = 0  # tokens of ends of documents that were too short for a sequence

    def plus(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + getattr(other, name) for name, value in self})


class Part(Counts):
    """One part of the text, in all its files."""

    files: list[ShardFile]
    frequencies: str  # SHA-256 of `<part>.counts.npy`, which has how often each token occurs, [V] int64


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
    data = _read(folder, INDEX)
    try:
        content = json.loads(data)
        digest = content.pop(DIGEST, None)
        index = Index.model_validate(content)
    except (ValueError, TypeError, AttributeError, RecursionError, ValidationError) as error:
        raise Damaged(name, "it is not the JSON that was written") from error
    if digest != _digest(content):
        raise Damaged(name, "it is not as it was written: its SHA-256 differs")
    return index


def read_frequencies(folder: Folder, part: PartName, index: Index) -> np.ndarray:
    """How often each token occurs in a part, [V] int64. Raises Damaged, StorageFailed as `read_index`."""
    name = frequencies_name(part)
    data = _read(folder, name)
    if sha256_of(data).hexdigest() != index.part(part).frequencies:
        raise Damaged(folder.name(name), "it is not as it was written: its SHA-256 differs")
    return array_in(data, folder.name(name))


def frequencies_name(part: PartName) -> str:
    return f"{part}.counts.npy"


def _read(folder: Folder, name: str) -> bytes:
    try:
        return folder.read(name)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "it is missing" if missing else f"it cannot be read: {first_line(error)}"
        raise Damaged(folder.name(name), reason) from error


def check_files(path: Path, index: Index, data: DataConfig, in_full: bool) -> None:
    """Raises Damaged for the first file of a folder that is missing, cut, or not as it was written.

    Args:
        in_full: read all files, with a thread for each core that may be used; else their sizes have to do.
    """
    files = [file for part in PARTS for file in index.part(part).files]
    for file in files:
        expected = file.sequences * index.sequence_bytes
        found = (path / file.name).stat().st_size if (path / file.name).is_file() else None
        if found != expected:
            problem = "it is missing" if found is None else f"it has {found:,} bytes instead of {expected:,}"
            raise Damaged(path / file.name, problem)
    if not in_full:
        return
    pool = ThreadPoolExecutor(num_processes(data), thread_name_prefix="check")  # hashing lets other threads run
    try:
        for file, digest in zip(files, pool.map(lambda file: sha256(path / file.name), files), strict=True):
            if digest != file.sha256:
                raise Damaged(path / file.name, "it is not as it was written: its SHA-256 differs")
    finally:
        pool.shutdown(cancel_futures=True)


def open_sequences(folder: Folder, part: PartName, index: Index, data: DataConfig, remade: bool = False) -> "Shards":
    """The sequences of a part: files of this machine are read where they are, all others through its cache.

    Args:
        remade: whether a damaged file of this machine is made again by the next run, for which it is set aside.

    Raises:
        SettingError: the folder of the cache cannot be written.
    """
    cache = None
    if folder.path is None or data.local is not None:
        setting = "data.cache" if data.local is None else "data.local"
        cache = NodeCache(data.local or data.cache, data.local_bytes, setting)
    return Shards(folder, part, index, cache, remade)


class Shards:
    """The sequences of a part by number. Any thread may read."""

    def __init__(
        self, folder: Folder, part: PartName, index: Index, cache: NodeCache | None = None, remade: bool = False
    ) -> None:
        self.folder, self.cache, self.remade = folder, cache, remade
        self.files = index.part(part).files
        self.dtype = index.token_dtype
        self.shape = (index.part(part).sequences, index.sequence_length)
        counts = [file.sequences for file in self.files]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # [K + 1], the last is N
        self._row = np.dtype((self.dtype, index.sequence_length))
        # Where each file is on this machine, or is to be.
        self._paths = [
            folder.name(file.name) if cache is None else f"{cache.folder}/{file.sha256}" for file in self.files
        ]
        self._checked: dict[int, State] = {}  # by file: what it was like when it was checked
        self._locks = [Lock() for _ in self.files]  # for checking a file
        self._pool: ThreadPoolExecutor | None = None
        self._coming: dict[int, Future[Any]] = {}  # by file: those that are fetched ahead, in their order
        self._lock = Lock()  # of what is fetched ahead

    def __len__(self) -> int:
        """N."""
        return self.shape[0]

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        """The sequences of these numbers [n], in their order: [n, S].

        Raises:
            StorageFailed: a file cannot be had, or is damaged.
        """
        numbers = np.asarray(numbers)
        files = np.searchsorted(self.starts, numbers, side="right") - 1
        order = np.argsort(files, kind="stable")
        different, first = np.unique(files[order], return_index=True)
        found = np.empty((len(numbers), self.shape[1]), self.dtype)
        for number, places in zip(different.tolist(), np.split(order, first[1:]), strict=False):
            found[places] = self._read(number, numbers[places] - self.starts[number])
        return found

    def _read(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Sequences of a file, once the file is known to be as it was written."""
        path = self._paths[number]
        while True:
            self._ensure(number)
            try:
                found = read_rows(path, self._checked.get(number), self._row, indices)
            except OSError as error:
                raise StorageFailed(f"{path} cannot be read ({error.strerror}): {CURE}") from error
            if found is not None:
                if self.cache is not None:
                    self.cache.note_use(self.files[number].sha256)
                return found
            self._checked.pop(number, None)  # evicted, written to, or replaced: it is checked again

    def _ensure(self, number: int, attempts: int = ATTEMPTS) -> None:
        """Fetch the file of this number and check it, unless that was done."""
        if number not in self._checked:
            with self._locks[number]:
                if number not in self._checked:  # by another thread, just now
                    self._check(number, attempts)

    def _check(self, number: int, attempts: int) -> None:
        """Raises StorageFailed where the file cannot be had, or is not as it was written."""
        file, path, wrong = self.files[number], Path(self._paths[number]), 0
        while True:
            if self.cache is not None:
                name, num_bytes = self.folder.name(file.name), file.sequences * self._row.itemsize
                self.cache.get(name, self.folder.setting, file.sha256, num_bytes, attempts)
            try:
                with path.open("rb", buffering=0) as content:
                    state, digest = state_of(content.fileno()), file_digest(content, "sha256").hexdigest()
            except FileNotFoundError:
                if self.cache is not None:  # evicted in between
                    continue
                problem = "is missing, or was damaged and set aside" if self.remade else "is missing: restore it"
                raise StorageFailed(f"{path} {problem}: {AGAIN}") from None
            except OSError as error:
                raise StorageFailed(f"{path} cannot be read ({error.strerror}): {CURE}") from error
            if digest == file.sha256:
                self._checked[number] = state
                return
            if self.cache is None:
                raise self._damaged(path)
            self.cache.discard(file.sha256)
            wrong += 1
            if wrong == MOST_WRONG:
                problem = f"{path} reads back otherwise than it was written, {wrong} times"
                raise StorageFailed(f"{problem}: give data.local=FOLDER on another disk; {AGAIN}")

    def _damaged(self, path: Path) -> StorageFailed:
        problem = f"{path} is damaged (its SHA-256 differs)"
        if not self.remade:
            return StorageFailed(f"{problem}: restore it, or delete its folder; {AGAIN}")
        with suppress(OSError):
            quarantine(path)
        return StorageFailed(f"{problem}, and set aside: {AGAIN}")

    def expect(self, numbers: np.ndarray) -> None:
        """Fetch and check the files of these sequences in the background, in this order, and no others."""
        files = dict.fromkeys((np.searchsorted(self.starts, numbers, side="right") - 1).tolist())
        with self._lock:
            for number in files.keys() & self._checked.keys() if self.cache is not None else ():
                if not os.path.exists(self._paths[number]):  # evicted since
                    self._checked.pop(number, None)
            for number in [*self._coming]:
                if self._coming[number].done() or (number not in files and self._coming[number].cancel()):
                    del self._coming[number]
            for number in files:
                if number not in self._checked and number not in self._coming:
                    self._pool = self._pool or ThreadPoolExecutor(AHEAD, thread_name_prefix="shards")
                    self._coming[number] = self._pool.submit(self._ensure, number, ATTEMPTS_AHEAD)
