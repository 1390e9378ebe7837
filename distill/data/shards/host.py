"""What one host does to prepare a text: it takes groups, packs and publishes them, until all are done by somebody."""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.config.settings import DataConfig
from distill.data.disk_cache import num_processes, workers
from distill.data.packing import Packing, pack, packed_before
from distill.data.shards.claims import Claims
from distill.data.shards.destination import WORK, Destination
from distill.data.shards.groups import Group, unit_stem
from distill.data.shards.publish import Publication, publish, record_name
from distill.data.shards.records import META, PARTS, UnitRecord
from distill.data.shards.token_counts import fold_counts, fold_of, groups_of
from distill.runtime.files import remove
from distill.runtime.progress import Progress

FEW_BYTES = 4 << 20  # stored bytes up to which starting other processes costs more than it gains
FEW_ROWS = 5000  # the same of rows of a data set
POLL = 2.0  # seconds between two looks at what other hosts have done
LOOKING = 0.1  # fraction of its time that a host looks, where a look takes long

logger = logging.getLogger(__name__)


class Host:
    """One host and its processes."""

    def __init__(
        self,
        folder: Destination,
        groups: list[Group],
        packing: Packing,
        compression: str | None,
        scratch: Path,
        claims: Claims,
        data: DataConfig,
    ) -> None:
        self.folder, self.packing, self.compression = folder, packing, compression
        self.scratch, self.claims, self.data = scratch, claims, data
        self.groups = {group.number: group for group in groups}
        sources = dict.fromkeys(id(unit.source) for group in groups for unit in group.work)
        self._sources = {source: number for number, source in enumerate(sources)}
        self._done: set[int] = set()  # groups that are published, by whichever host
        self._candidates: deque[int] = deque()  # groups that were free, or another's, at the last look
        self._next_look = float("-inf")
        self._left: dict[int, int] = {}  # units of the groups of this host that are not packed yet
        self._packed: dict[int, int] = {}  # bytes of those that are
        self._spent: dict[int, float] = {}  # seconds that an earlier process took for units of them
        self._waiting: deque[tuple[int, int]] = deque()  # groups and units in them, for the next free process
        self._running: dict[Future[Any], tuple[int, int | None]] = {}  # group and unit; None: its end
        self._unfolded: set[int] = set()  # folds of token counts that this host had a part in
        self._tokens, self._waited = 0, False
        self._timed = time.perf_counter()  # up to when the time of this host is put down to groups

    def work(self) -> None:
        """Returns when all groups are published.

        Raises:
            SettingError: what is read does not fit the settings, or a process was killed.
            StorageFailed: the folder cannot be written.
        """
        self._look()
        todo = [group for group in self.groups.values() if group.number not in self._done]
        of_files = all(work.shard.paths for group in self.groups.values() for work in group.work)
        scale, unit = (1e6, "MB") if of_files else (1, "rows")
        few = FEW_BYTES if of_files else FEW_ROWS
        of_program = any(type(unit.source).__module__ == "__main__" for group in todo for unit in group.work)
        parallel = workers(self.data, sum(group.size for group in todo) > few, of_program)
        size = sum(group.size for group in self.groups.values())
        self._note_what_is_there()
        with parallel as pool, Progress("tokens", size / scale, unit, start=self._size_done() / scale) as progress:
            while len(self._done) < len(self.groups):
                self._step(pool or _InThisProcess(), 2 * num_processes(self.data) if pool else 1)
                progress.update(self._size_done() / scale, f"{self._tokens:,} tokens")

    def _step(self, pool: Executor, max_units: int) -> None:
        """Gives work to processes, up to so many units at once, and takes what one of them has done."""
        self._look()
        self._fold_counts()
        while len(self._waiting) + len(self._running) < max_units and self._take_group(pool):
            pass
        while self._waiting and len(self._running) < max_units:
            number, unit = self._waiting.popleft()
            work = self.groups[number].work[unit]
            packing = replace(self.packing, held_out=work.held_out)
            future = pool.submit(pack, self._stem(number, unit), work.shard, work.source, packing)
            self._running[future] = number, unit
        if not self._running:
            self._wait_for_others()
            return
        for future in wait(self._running, timeout=POLL, return_when=FIRST_COMPLETED).done:
            number, done_unit = self._running.pop(future)
            if done_unit is None:
                future.result()
                self._end_group(number)
            else:
                self._end_unit(number, done_unit, future.result(), pool)

    def _wait_for_others(self) -> None:
        if (left := len(self.groups) - len(self._done)) and not self._waited:
            self._waited = True
            logger.info(f"waiting for other hosts, which are making the last {left:,} of {len(self.groups):,} shards")
        time.sleep(POLL / 8 if left else 0)

    def _look(self) -> None:
        """Sees, now and then, which groups others have published, and which are free."""
        began = time.monotonic()
        if began < self._next_look:
            return
        names = self.folder.names(WORK)  # of many thousand groups in object storage it takes seconds
        self._next_look = time.monotonic() + max(POLL, (time.monotonic() - began) / LOOKING)
        if self.folder.exists(META):  # a host that was late may have put a claim behind it
            self._done |= self.groups.keys()
        self._done |= {number for number in self.groups if record_name(number).rpartition("/")[2] in names}
        left = [number for number in self.groups if number not in self._done and number not in self._left]
        if left:  # hosts that begin together begin at different groups
            first = int(self.claims.owner, 16) % len(left)
            left = left[first:] + left[:first]
        self._candidates = deque(sorted(left, key=lambda number: f"{number:05d}.claim" in names))

    def _take_group(self, pool: Executor) -> bool:
        """Takes the next group that is free, or whose host is gone; whether there was one."""
        while self._candidates:
            number = self._candidates.popleft()
            if number in self._done or number in self._left or not self.claims.take(number):
                continue
            if self.folder.exists(record_name(number)):  # published since the last look
                self._done.add(number)
                self.claims.release(number)
                continue
            self._begin_group(number, pool)
            return True
        return False

    def _begin_group(self, number: int, pool: Executor) -> None:
        group = self.groups[number]
        self._folder_of(number).mkdir(exist_ok=True)
        self._left[number], self._packed[number], self._spent[number] = len(group.work), 0, 0.0
        for unit in range(len(group.work)):
            if (before := packed_before(self._stem(number, unit), self.packing)) is not None:
                self._spent[number] += before["seconds"] / num_processes(self.data)
                self._end_unit(number, unit, before, pool)
            else:
                self._waiting.append((number, unit))
        if not group.work:
            self._publish(number, pool)

    def _end_unit(self, number: int, unit: int, record: UnitRecord, pool: Executor) -> None:
        self._tokens += sum(record[part]["tokens"] for part in PARTS)
        self._packed[number] += self.groups[number].work[unit].shard.size
        self._left[number] -= 1
        if not self._left[number]:
            self._publish(number, pool)

    def _publish(self, number: int, pool: Executor) -> None:
        group, now = self.groups[number], time.perf_counter()
        publication = Publication(
            number,
            tuple(self._stem(number, unit) for unit in range(len(group.work))),
            tuple(self._sources[id(unit.source)] for unit in group.work),
            now - self._timed + self._spent[number],
            self.folder,
            self.scratch,
            self.compression,
        )
        self._timed = now
        self._running[pool.submit(publish, publication, self.packing)] = number, None

    def _end_group(self, number: int) -> None:
        self._done.add(number)
        self.claims.release(number)
        remove(self._folder_of(number))
        if (fold := fold_of(number, len(self.groups))) is not None:
            self._unfolded.add(fold)
        del self._left[number], self._packed[number], self._spent[number]

    def _fold_counts(self) -> None:
        """Folds the counts of groups that are all published, in which this host had a part."""
        for fold in [fold for fold in self._unfolded if self._done.issuperset(groups_of(fold))]:
            fold_counts(self.folder, fold)
            self._unfolded.remove(fold)

    def _stem(self, number: int, unit: int) -> str:
        return unit_stem(self.scratch, self.groups[number], unit)

    def _folder_of(self, number: int) -> Path:
        return self.scratch / f"{number:05d}"

    def _size_done(self) -> int:
        published = sum(self.groups[number].size for number in self._done)
        return published + sum(self._packed[number] for number in self._packed if number not in self._done)

    def _note_what_is_there(self) -> None:
        """Logs how much of the work is done already, by others or by an earlier process."""
        units = {number: len(group.work) for number, group in self.groups.items()}
        num_done = sum(units[number] for number in self._done)
        num_done += sum(
            1 for number in units if number not in self._done for _ in self._folder_of(number).glob("*.json")
        )
        if num_done:
            total = sum(units.values())
            logger.info(f"resuming a preparation: {num_done:,} of {total:,} parts are done")


class _InThisProcess(Executor):
    """Does work at once, where starting processes costs more than it gains."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
