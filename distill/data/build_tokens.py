"""Builds the sequences of a text: each host packs its part of the shards with several processes, and writes them once.

Units of work are dealt to shards by the sizes of files alone, and shards to hosts by their numbers, so that with any
number of hosts and processes the files are the same. What is done is skipped: the same command resumes where one that
was killed has ended.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError

from distill.config.data import Duplicates
from distill.config.settings import DataConfig
from distill.data.disk_cache import num_processes, workers
from distill.data.duplicates import find_duplicates
from distill.data.packing import Packing, pack
from distill.data.remote import pause, reachable
from distill.data.sequence_store import ids_of
from distill.data.shards import INDEX, PARTS, Index, Made, Part, PartName, ShardFile, read_index
from distill.data.sources import Source
from distill.data.storage import WORK, Folder
from distill.data.work import Work, divide, some_of, with_rules, work_of
from distill.runtime.errors import Damaged, StorageFailed
from distill.runtime.files import sha256
from distill.runtime.progress import Progress
from distill.runtime.signals import in_force

FEW_BYTES = 4 << 20  # stored bytes up to which starting other processes costs more than it gains
FEW_ROWS = 5000  # the same of rows of a data set
POLL = 2.0  # seconds between two looks at what other hosts have done
PATIENCE = 3600.0  # seconds without a shard of another host, after which this one ends; a large file is one shard
READ_IDS = 1 << 20  # of a shard at once, to count them
THREADS = 16  # that read records
# By launcher: the number of this host, and how many there are. Others do not say which host a rank is on.
HOSTS = {
    "torchrun": ("GROUP_RANK", "GROUP_WORLD_SIZE"),
    "Slurm": ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    "horovodrun": ("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
}

logger = logging.getLogger(__name__)


class ShardRecord(BaseModel):
    """A shard that is done: the sequences of some units of work, of each part in a file if there are any."""

    left_out: Counter[str]  # records of no use, by the reason
    parts: dict[PartName, Part]
    size: int  # of the text it was made from: stored bytes, or rows of a Hub data set
    seconds: float  # of a host, of whose processes one has made it


class Host(NamedTuple):
    """This host among those that prepare a text together."""

    number: int = 0
    total: int = 1


def this_host() -> Host:
    """This host as a launcher has numbered it, or a user by the same variables; else the only one."""
    for number, count in HOSTS.values():
        if os.environ.get(number, "").isdecimal() and os.environ.get(count, "").isdecimal():
            return Host(int(os.environ[number]), max(int(os.environ[count]), 1))
    return Host()


class Task(NamedTuple):
    """What one process does at a time: a shard."""

    folder: Folder
    scratch: Path
    packing: Packing
    number: int
    first: int  # the number of its first unit in the text
    units: tuple[Work, ...]
    duplicates: tuple[np.ndarray, ...] = ()  # by unit: the indices of documents that are; none: not looked for
    processes: int = 1  # that make shards at the same time

    @property
    def size(self) -> int:
        """Stored bytes, or rows of a Hub data set."""
        return sum(unit.shard.size for unit in self.units)

    @property
    def name(self) -> str:
        """Its units, so that runs which divide the text otherwise write other files."""
        return f"{self.first:05d}" if len(self.units) == 1 else f"{self.first:05d}-{len(self.units)}"

    @property
    def record(self) -> str:
        """The file that says it is done."""
        return f"{WORK}/{self.name}.json"


def build(
    folder: Folder, text: str, sources: Sequence[Source], packing: Packing, data: DataConfig, scratch: Path, host: Host
) -> Index:
    """Fill `folder` with the sequences of these sources; one that was cut short resumes.

    Args:
        text: what it is, in a few words.
        scratch: a folder of this machine for files on their way to a URL.

    Raises:
        SettingError: something of the text cannot be read, or a process was killed.
        StorageFailed: the folder cannot be written, or other hosts are gone.
    """
    of_some = "" if packing.fraction == 1 else f": of {packing.fraction:.2g} of it, as few sequences are needed"
    logger.info(f"preparing tokens of {text}{of_some}")
    work = with_rules(packing.held_out.share, some_of(work_of(sources), packing.fraction))
    with reachable("data.tokens", folder.place):  # the first file shows whether anything can be written there
        folder.write(f"{WORK}/host-{host.number}", b"")
    scratch = scratch if folder.path is None else folder.path / WORK
    scratch.mkdir(parents=True, exist_ok=True)
    tasks = [
        Task(folder, scratch, packing, number, units.start, tuple(work[units.start : units.stop]))
        for number, units in enumerate(divide(work, packing.dtype, data.shard_bytes))
    ]
    try:
        duplicates = _make_missing(tasks, work, data, host)
        _finish(tasks, text, duplicates)
    except FileNotFoundError:  # another run has made all of it, and removed the folder of what is under way
        if not folder.exists(INDEX):
            raise
    index = read_index(folder)
    folder.remove_folder(WORK)
    tokens, dropped = (sum(getattr(index.part(part), name) for part in PARTS) for name in ("tokens", "dropped"))
    logger.info(f"prepared {tokens:,} tokens in {index.seconds:.1f} s: {index.tokens_per_second:,.0f} tokens a second")
    if dropped:
        what = f"documents, and ends of documents, of fewer than {packing.format.shortest} tokens"
        what += ", and last sentences that make no pair" * packing.format.pairs
        logger.info(f"left out {dropped:,} tokens ({dropped / (tokens + dropped):.1%}): {what}")
    return index


def _make_missing(tasks: Sequence[Task], work: Sequence[Work], data: DataConfig, host: Host) -> dict[str, int] | None:
    """Makes the shards of this host that are not done; gives the counts of duplicates, where they are looked for."""
    packing, done = tasks[0].packing, _done(tasks)
    if done:
        logger.info(f"resuming a preparation: {len(done):,} of {len(tasks):,} shards are done")
    missing = [task for task in tasks[host.number :: host.total] if task.number not in done]
    of_files = all(unit.shard.paths for unit in work)
    few = len(missing) < 2 or (
        all(unit.shard.size for unit in work)  # 0: not known, and perhaps large
        and sum(task.size for task in missing) <= (FEW_BYTES if of_files else FEW_ROWS)
    )
    # Other processes do not import the program, in whose file a user's class may stand.
    alone = few or any(type(unit.source).__module__ == "__main__" for unit in work)
    with workers(data, only_if=not alone) as pool:
        duplicates = None
        if packing.duplicates is not Duplicates.keep:
            duplicates, found = find_duplicates(work, packing.duplicates, packing.near, pool)
            missing = [task._replace(duplicates=found[task.first : task.first + len(task.units)]) for task in missing]
        if pool:
            missing = [task._replace(processes=min(num_processes(data), len(missing))) for task in missing]
        scale, unit = (1e6, "MB") if of_files else (1, "rows")
        size, tokens = sum(task.size for task in tasks if task.number in done), 0
        with Progress("tokens", sum(task.size for task in tasks) / scale, unit, start=size / scale) as progress:
            for record in _made(missing, pool):
                size += record.size
                tokens += sum(part.tokens for part in record.parts.values())
                progress.update(size / scale, f"{tokens:,} tokens")
    return duplicates


def _done(tasks: Sequence[Task]) -> set[int]:
    """The numbers of the shards that are done."""
    names = tasks[0].folder.names(WORK)
    return {task.number for task in tasks if Path(task.record).name in names}


def _made(missing: Sequence[Task], pool: Executor | None) -> Iterator[ShardRecord]:
    """The records of shards as these are made, by other processes if there are some."""
    if pool is None:
        yield from map(make_shard, missing)
        return
    for future in as_completed([pool.submit(make_shard, task) for task in missing]):
        yield future.result()


def make_shard(task: Task) -> ShardRecord:
    """Writes the files of a shard and, last, its record, which it gives."""
    begun, packing, folder, left_out = time.perf_counter(), task.packing, task.folder, Counter[str]()
    parts = {part: Part() for part in PARTS}
    new = {part: task.scratch / f".{part}-{task.name}.{token_hex(6)}.new" for part in PARTS}
    try:
        with new["train"].open("wb") as train, new["heldout"].open("wb") as heldout:
            for number, unit in enumerate(task.units):
                duplicates = frozenset(task.duplicates[number].tolist()) if task.duplicates else frozenset[int]()
                no_use, found = pack(unit, packing, (train, heldout), duplicates)
                parts = {
                    name: parts[name].plus(Part.model_validate(of_unit))
                    for name, of_unit in zip(PARTS, found, strict=True)
                }
                left_out += no_use
        for name, part in parts.items():
            files = [ShardFile(f"{name}-{task.name}.bin", part.sequences, sha256(new[name]))] if part.sequences else []
            parts[name] = part.plus(Part(files=files, frequencies=_frequencies(new[name], packing).tobytes()))
            if files:
                folder.put(new[name], files[0].name)
    finally:
        for path in new.values():
            path.unlink(missing_ok=True)
    seconds = (time.perf_counter() - begun) / task.processes
    record = ShardRecord(left_out=left_out, parts=parts, size=task.size, seconds=seconds)
    folder.write(task.record, record.model_dump_json().encode())
    return record


def _frequencies(path: Path, packing: Packing) -> np.ndarray:
    """How often each token occurs in a file of sequences, [V] int64."""
    counts = np.zeros(packing.num_ids, np.int64)
    with path.open("rb") as file:
        while len(tokens := np.fromfile(file, packing.dtype, READ_IDS)):
            counts += np.bincount(ids_of(tokens), minlength=len(counts))
    return counts[: packing.vocabulary]


def _finish(tasks: Sequence[Task], text: str, duplicates: dict[str, int] | None) -> None:
    """Writes the index, which makes the shards one text, once those of all hosts are there; every host writes the same.

    Raises:
        StorageFailed: no shard of another host comes.
    """
    folder = tasks[0].folder
    before, since = -1, time.monotonic()
    while not folder.exists(INDEX):
        now = len(_done(tasks))
        if now == len(tasks):
            with suppress(FileNotFoundError):  # another host has written the index, and removed the records
                folder.write(INDEX, _index(tasks, text, duplicates).content())
            continue
        if before < 0:
            logger.info("waiting for the shards of other hosts")
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            problem = f"other hosts have made no shard in {PATIENCE / 60:.0f} minutes"
            cure = "start the same command again to resume, on all hosts or on this one alone"
            raise StorageFailed(f"{problem}: {cure}")
        pause(POLL, in_force())


def _index(tasks: Sequence[Task], text: str, duplicates: dict[str, int] | None) -> Index:
    """The index of shards that are all done. Raises FileNotFoundError where a record has gone meanwhile."""
    folder, packing = tasks[0].folder, tasks[0].packing
    left_out, seconds = Counter[str](), 0.0
    parts = {part: Part() for part in PARTS}
    with ThreadPoolExecutor(THREADS) as threads:
        contents = threads.map(lambda task: folder.read(task.record), tasks)
        for task, content in zip(tasks, contents, strict=True):
            try:
                record = ShardRecord.model_validate_json(content)
            except ValidationError as error:
                raise Damaged(folder.name(task.record), "it is not the JSON that was written") from error
            parts = {name: part.plus(record.parts[name]) for name, part in parts.items()}
            left_out, seconds = left_out + record.left_out, seconds + record.seconds
    return Index(
        made=Made(text=text, settings=packing.described, prompts=packing.prompts),
        dtype=packing.id_dtype,
        sequence_length=packing.sequence_length,
        train=parts["train"],
        heldout=parts["heldout"],
        left_out=left_out,
        duplicates=duplicates,
        seconds=seconds,
    )
