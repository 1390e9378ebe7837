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
from hashlib import sha256 as sha256_of
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError

from distill.config.data import Duplicates
from distill.config.settings import DataConfig
from distill.data.disk_cache import num_processes, workers
from distill.data.duplicates import find_duplicates
from distill.data.heldout import HeldOut, held_out
from distill.data.packing import Packing, pack
from distill.data.remote import pause, reachable
from distill.data.sequence_store import ids_of
from distill.data.shards import (
    INDEX,
    PARTS,
    Counts,
    Index,
    Made,
    Part,
    PartName,
    ShardFile,
    frequencies_name,
    read_index,
)
from distill.data.sources import Source, read
from distill.data.storage import WORK, Folder, array_bytes, array_in
from distill.data.work import Work, divide, some_of, work_of
from distill.runtime.errors import StorageFailed
from distill.runtime.files import sha256
from distill.runtime.progress import Progress
from distill.runtime.signals import in_force

LOOKED_AT = 1 << 30  # stored bytes in which the first 50 documents are looked for
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

    first: int  # the number of its first unit in the text
    units: int  # how many of them
    left_out: Counter[str]  # records of no use, by the reason
    counts: dict[PartName, Counts]
    files: dict[PartName, ShardFile]
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

    @property
    def frequencies(self) -> str:
        """The file that says how often each token occurs in it, [2, V]."""
        return f"{WORK}/{self.name}.npy"


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
        if host.number:
            _wait(tasks, len(tasks) + 1)
            folder.remove_folder(WORK)  # where this host has made again what the first had taken already
            return read_index(folder)
        _wait(tasks, len(tasks))
        index = _finish(tasks, text, duplicates)
    except FileNotFoundError as error:
        # Another host that no launcher has numbered is done, and has removed the records.
        if not folder.exists(INDEX):
            problem = f"{folder.place}: records of finished shards are gone"
            raise StorageFailed(f"{problem}: start the same command again to make them") from error
        index = read_index(folder)
    folder.remove_folder(WORK)
    _announce(index, packing)
    return index


def _make_missing(tasks: Sequence[Task], work: Sequence[Work], data: DataConfig, host: Host) -> dict[str, int] | None:
    """Makes the shards of this host that are not done; gives the counts of duplicates, where they are looked for."""
    packing = tasks[0].packing
    with ThreadPoolExecutor(THREADS) as threads:
        records = threads.map(_record, tasks) if _records_there(tasks) else []
        done = {task.number for task, record in zip(tasks, records, strict=False) if record}
    if done:
        logger.info(f"resuming a preparation: {len(done):,} of {len(tasks):,} shards are done")
    missing = [task for task in tasks[host.number :: host.total] if task.number not in done]
    of_files = all(unit.shard.paths for unit in work)
    few = sum(task.size for task in missing) <= (FEW_BYTES if of_files else FEW_ROWS)
    of_program = any(type(unit.source).__module__ == "__main__" for unit in work)
    with workers(data, not few, of_program) as pool:
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
                size += sum(unit.shard.size for unit in work[record.first : record.first + record.units])
                tokens += sum(counts.tokens for counts in record.counts.values())
                progress.update(size / scale, f"{tokens:,} tokens")
    return duplicates


def _made(tasks: Sequence[Task], pool: Executor | None) -> Iterator[ShardRecord]:
    """The records of shards as these are made, by other processes if there are some."""
    if pool is None:
        yield from map(make_shard, tasks)
        return
    for future in as_completed([pool.submit(make_shard, task) for task in tasks]):
        yield future.result()


def make_shard(task: Task) -> ShardRecord:
    """Writes the files of a shard, how often each token occurs in them, and, last, its record, which it gives."""
    begun, packing, folder = time.perf_counter(), task.packing, task.folder
    left_out, counts = Counter[str](), {part: Counts() for part in PARTS}
    files: dict[PartName, ShardFile] = {}
    frequencies = np.zeros((len(PARTS), packing.num_ids), np.int64)
    new = {part: task.scratch / f".{part}-{task.name}.{token_hex(6)}.new" for part in PARTS}
    try:
        with new["train"].open("wb") as train, new["heldout"].open("wb") as heldout:
            for number, unit in enumerate(task.units):
                duplicates = frozenset(task.duplicates[number].tolist()) if task.duplicates else frozenset[int]()
                no_use, found = pack(unit, packing, (train, heldout), duplicates)
                counts = {part: counts[part].plus(of_unit) for part, of_unit in zip(PARTS, found, strict=True)}
                left_out += no_use
        for number, part in enumerate(PARTS):
            if counts[part].sequences:
                _count(new[part], packing, frequencies[number])
                files[part] = ShardFile(f"{part}-{task.name}.bin", counts[part].sequences, sha256(new[part]))
                folder.put(new[part], files[part].name)
    finally:
        for path in new.values():
            path.unlink(missing_ok=True)
    folder.write(task.frequencies, array_bytes(frequencies[:, : packing.vocabulary].astype(np.uint32)))
    seconds = (time.perf_counter() - begun) / task.processes
    record = ShardRecord(
        first=task.first, units=len(task.units), left_out=left_out, counts=counts, files=files, seconds=seconds
    )
    folder.write(task.record, record.model_dump_json().encode())
    return record


def _count(path: Path, packing: Packing, frequencies: np.ndarray) -> None:
    """Adds to [V] how often each id occurs in a file of sequences."""
    with path.open("rb") as file:
        while len(tokens := np.fromfile(file, packing.dtype, READ_IDS)):
            frequencies += np.bincount(ids_of(tokens), minlength=len(frequencies))


def _record(task: Task) -> ShardRecord | None:
    """The record of a shard that is done; None where it is not."""
    try:
        record = ShardRecord.model_validate_json(task.folder.read(task.record))
    except (FileNotFoundError, ValidationError):
        return None
    width = task.packing.sequence_length * task.packing.dtype.itemsize
    for file in record.files.values() if task.folder.path is not None else ():
        path = Path(task.folder.name(file.name))
        if not path.is_file() or path.stat().st_size != file.sequences * width:
            return None
    return record


def _records_there(tasks: Sequence[Task]) -> set[str]:
    """The files of records of these shards, whatever is in them."""
    return tasks[0].folder.names(WORK) & {Path(task.record).name for task in tasks}


def _wait(tasks: Sequence[Task], wanted: int) -> None:
    """Waits for shards of other hosts, of which the index is the last. Raises StorageFailed where nothing comes."""

    def done() -> int:
        return len(tasks) + 1 if tasks[0].folder.exists(INDEX) else len(_records_there(tasks))

    before, since = done(), time.monotonic()
    if before < wanted:
        logger.info("waiting for the shards of other hosts")
    while before < wanted:
        pause(POLL, in_force())
        if (now := done()) != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            problem = f"other hosts have made no shard in {PATIENCE / 60:.0f} minutes"
            cure = "start the same command again to resume, on all hosts or on this one alone"
            raise StorageFailed(f"{problem}: {cure}")


def _finish(tasks: Sequence[Task], text: str, duplicates: dict[str, int] | None) -> Index:
    """Writes how often each token occurs, and the index, which makes the shards one text, and which it gives.

    Raises:
        FileNotFoundError: another host has finished in the meantime, and removed the records.
    """
    folder, packing = tasks[0].folder, tasks[0].packing
    with ThreadPoolExecutor(THREADS) as threads:
        records = [record for record in threads.map(_record, tasks) if record is not None]
        if len(records) < len(tasks):
            raise FileNotFoundError(folder.place)
        frequencies = np.zeros((len(PARTS), packing.vocabulary), np.int64)
        for task, content in zip(tasks, threads.map(folder.read, [task.frequencies for task in tasks]), strict=True):
            frequencies += array_in(content, folder.name(task.frequencies))
    parts: dict[PartName, Part] = {}
    for part, of_part in zip(PARTS, frequencies, strict=True):
        counts = Counts()
        for record in records:
            counts = counts.plus(record.counts[part])
        content = array_bytes(of_part)
        folder.write(frequencies_name(part), content)
        files = [record.files[part] for record in records if part in record.files]
        parts[part] = Part(**vars(counts), files=files, frequencies=sha256_of(content).hexdigest())
    index = Index(
        made=Made(text=text, settings=packing.described, prompts=packing.prompts),
        dtype=packing.id_dtype,
        sequence_length=packing.sequence_length,
        **parts,
        left_out=sum((record.left_out for record in records), Counter()),
        duplicates=duplicates,
        seconds=sum(record.seconds for record in records),
    )
    folder.write(INDEX, index.content())
    return index


def _announce(index: Index, packing: Packing) -> None:
    tokens, seconds = num_tokens(index), index.seconds
    logger.info(f"prepared {tokens:,} tokens in {seconds:.1f} s: {rate(index):,.0f} tokens a second")
    if dropped := sum(index.part(part).dropped for part in PARTS):
        shortest = f"documents, and ends of documents, of fewer than {packing.format.shortest} tokens"
        what = f"{shortest}, and last sentences that make no pair" if packing.format.pairs else shortest
        logger.info(f"left out {dropped:,} tokens ({dropped / (tokens + dropped):.1%}): {what}")


def with_rules(fraction: float, work: Sequence[Work]) -> list[Work]:
    """The same units with the rule for what their source holds: a few books beside thousands of texts are few."""
    ruled: list[Work] = []
    for _, of_source in groupby(work, lambda unit: id(unit.source)):
        units = list(of_source)
        rule = held_out_rule(fraction, units)
        ruled += [unit._replace(held_out=rule) for unit in units]
    return ruled


def held_out_rule(fraction: float, work: Sequence[Work]) -> HeldOut:
    """The rule for what these units hold, of which it looks at the first documents.

    It reads a GiB at most, in which there are fewer only where few of the documents count, as with a tiny
    `corpus.fraction`; then it goes by how many there should be in all.
    """
    first = _first(work)
    read_bytes, all_bytes = (sum(unit.shard.size for unit in units) for units in (first, work))
    documents = (document for unit in first for document in read(unit.source, unit.shard))
    return held_out(fraction, documents, read_bytes / all_bytes if read_bytes else 1.0)


def _first(work: Sequence[Work]) -> Sequence[Work]:
    size = 0
    for number, unit in enumerate(work):
        if size >= LOOKED_AT:
            return work[:number]
        size += unit.shard.size
    return work


def num_tokens(index: Index) -> int:
    """Of both parts."""
    return sum(index.part(part).tokens for part in PARTS)


def rate(index: Index) -> float:
    """Tokens a second of one host of the preparation, both parts together."""
    return num_tokens(index) / max(index.seconds, 1e-9)
