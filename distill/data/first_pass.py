"""The pass over a text that finds which documents are to be left out as duplicates, before any of them is packed.

Hosts divide the reading as they divide the packing: a host takes groups, reads their units with several processes, and
publishes the digests of a group, so that a pass that was killed resumes. Every host then searches what all have
published by itself, and finds the same duplicates.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distill.config.data import NearConfig
from distill.config.settings import DataConfig
from distill.data.disk_cache import workers
from distill.data.duplicates import (
    DOCUMENT_ID,
    digest_of,
    digests_path,
    document_ids_of,
    fetch_files,
    find_repeated,
    load,
    merge_digests,
    records_name,
    write_digests,
    write_dropped,
)
from distill.data.near_duplicates import (
    Candidates,
    Signatures,
    find_near,
    held_path,
    make_index,
    require_datasketch,
    signatures_path,
)
from distill.data.shards.claims import Claims
from distill.data.shards.destination import WORK, Destination, array_bytes
from distill.data.shards.groups import Group, Work, unit_stem
from distill.data.shards.records import META
from distill.data.sources import read
from distill.runtime.progress import Progress

FEW_BYTES = 16 << 20  # stored bytes up to which starting other processes costs more than it gains
POLL = 1.0  # seconds between two looks at what other hosts have done

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FirstPass:
    """One host's part of the pass."""

    folder: Destination
    groups: Sequence[Group]
    near: NearConfig | None  # None: equal texts alone are duplicates
    scratch: Path  # a folder of this host
    claims: Claims
    data: DataConfig

    def find(self) -> dict[str, int]:
        """Write which documents of each unit this host is to leave out (`duplicates.read_dropped`), and count them.

        Returns:
            documents: all that were read; exact: those of them whose text came before; near: further ones that are
            near duplicates of one that stays; dropped: both.

        Raises:
            SettingError: datasketch is not installed, or there is no memory for so many documents.
            FileNotFoundError: another host has finished the preparation in the meantime.
        """
        if self.near is not None:
            require_datasketch()
            make_index(self.near)  # which may refuse the settings
        begun = time.perf_counter()
        self._read_all()
        files = self._fetch_files(records_name)
        documents = sum(len(load(file, "r")) for file in files)
        exact = np.concatenate([np.empty(0, DOCUMENT_ID), *find_repeated(files)])
        close = np.empty(0, DOCUMENT_ID) if self.near is None else find_near(self._candidates(), exact, self.near)
        stems = (unit_stem(self.scratch, group, unit) for group in self.groups for unit in range(len(group.work)))
        write_dropped(stems, np.concatenate([exact, close]))
        logger.info(f"looked for duplicates in {time.perf_counter() - begun:.1f} s")
        return {"documents": documents, "exact": len(exact), "near": len(close), "dropped": len(exact) + len(close)}

    def _read_all(self) -> None:
        """Read groups until all are read, by this host or by others."""
        scale, unit = (
            (1e6, "MB") if all(work.shard.paths for group in self.groups for work in group.work) else (1, "rows")
        )
        size = sum(group.size for group in self.groups)
        of_program = any(type(work.source).__module__ == "__main__" for group in self.groups for work in group.work)
        parallel = workers(self.data, size > FEW_BYTES or scale == 1, of_program)
        with parallel as pool, Progress("duplicates", size / scale, unit) as progress:
            while left := self._left():
                progress.update((size - sum(group.size for group in left)) / scale)
                if not any(self._read(group, pool) for group in left):
                    time.sleep(POLL)
            progress.update(size / scale)

    def _left(self) -> list[Group]:
        """The groups that nobody has read yet; hosts that begin together begin at different ones."""
        names = self.folder.names(WORK)
        if self.folder.exists(META):
            raise FileNotFoundError(META)
        left = [group for group in self.groups if Path(records_name(group.number)).name not in names]
        first = int(self.claims.owner, 16) % max(len(left), 1)
        return left[first:] + left[:first]

    def _read(self, group: Group, pool: Executor | None) -> bool:
        """Read a group and publish its digests, unless another host does. Returns whether this host did."""
        claim = len(self.groups) + group.number  # those before are for the packing
        if not self.claims.take(claim):
            return False
        if not self.folder.exists(records_name(group.number)):
            stems = [unit_stem(self.scratch, group, unit) for unit in range(len(group.work))]
            todo = [(s, work) for s, work in zip(stems, group.work, strict=True) if not digests_path(s).exists()]
            for stem in stems:
                Path(stem).parent.mkdir(parents=True, exist_ok=True)
            _run(todo, self.near, pool)
            self._publish(group, stems)
        self.claims.release(claim)
        return True

    def _publish(self, group: Group, stems: Sequence[str]) -> None:
        if self.near is not None:
            empty = np.empty((0, self.near.permutations), np.uint32)
            held_out = [load(held_path(stem)) for stem in stems]
            signatures = np.concatenate([empty, *(load(signatures_path(stem)) for stem in stems)])
            self.folder.write(_signatures_name(group.number), array_bytes(signatures))
            self.folder.write(_held_name(group.number), array_bytes(np.concatenate([np.empty(0, bool), *held_out])))
            document_ids = document_ids_of([len(flags) for flags in held_out], group.first)
            self.folder.write(_document_ids_name(group.number), array_bytes(document_ids))
        self.folder.write(
            records_name(group.number), array_bytes(merge_digests(stems, group.first))
        )  # last: marks it as read

    def _candidates(self) -> list[Candidates]:
        names = (_signatures_name, _held_name, _document_ids_name)
        of_groups = zip(*(self._fetch_files(name) for name in names), strict=True)
        return [
            Candidates(load(signatures, "r"), load(held_out), load(document_ids))
            for signatures, held_out, document_ids in of_groups
        ]

    def _fetch_files(self, name: Any) -> list[Path]:
        return fetch_files(self.folder, [name(group.number) for group in self.groups], self.scratch)


def _signatures_name(number: int) -> str:
    return f"{WORK}/{number:05d}.signatures.npy"


def _held_name(number: int) -> str:
    return f"{WORK}/{number:05d}.held.npy"


def _document_ids_name(number: int) -> str:
    return f"{WORK}/{number:05d}.document_ids.npy"


def _run(todo: Sequence[tuple[str, Work]], near: NearConfig | None, pool: Executor | None) -> None:
    """Read units, in other processes if there is a pool."""
    if pool is None:
        for stem, work in todo:
            look(stem, work, near)
        return
    for future in as_completed([pool.submit(look, stem, work, near) for stem, work in todo]):
        future.result()


def look(stem: str, work: Work, near: NearConfig | None) -> None:
    """Write the digests of a unit's documents, last, and their signatures where near duplicates are looked for."""
    digests = []
    signatures = Signatures(near) if near is not None else None
    for document in read(work.source, work.shard):
        digests.append(digest_of(document.text))
        if signatures is not None:
            signatures.add(document.text, any(is_held_out for is_held_out, _ in work.held_out.parts(document)))
    if signatures is not None:
        signatures.write(stem)
    write_digests(stem, digests)
