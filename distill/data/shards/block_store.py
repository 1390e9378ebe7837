"""Sequences by number from blocks that are fetched when they are needed, or ahead of need."""

import logging
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Lock

import numpy as np

from distill.data.remote import ATTEMPTS, NAP
from distill.data.sequence_store import gather
from distill.data.shards.block_cache import BlockCache
from distill.data.shards.fetch import Blocks
from distill.data.shards.index import Block, ShardIndex
from distill.data.shards.store import ShardStore
from distill.runtime.errors import SettingError, StorageFailed
from distill.runtime.files import FileInUse
from distill.runtime.signals import Signals, in_force

FETCHING = 8  # blocks at once that somebody waits for, where memory allows (`distill.data.shards.in_flight`)
AT_ONCE = 16  # blocks that one call holds open until it has read them
AHEAD = 4  # and that are fetched ahead
ATTEMPTS_AHEAD = 2  # to fetch such a block; the thread that needs it tries more often
LOG_EVERY = 10.0  # seconds between two lines about a block that somebody waits for

logger = logging.getLogger(__name__)


class BlockStore(ShardStore):
    """The sequences of shards in object storage, or of compressed ones, through the cache of the node.

    Any thread may read.
    """

    def __init__(self, index: ShardIndex, blocks: Blocks, cache: BlockCache) -> None:
        super().__init__(index)
        self.blocks, self.cache = blocks, cache
        self._files = dict[int, FileInUse]()  # by block
        self._waited: dict[int, Future[FileInUse]] = {}  # that somebody waits for
        self._expected: dict[int, Future[FileInUse]] = {}  # that are fetched ahead
        self._last_expected: np.ndarray | None = None  # the argument of the last `expect`, until a part of it fails
        self._failures = 0  # how often reading was given up; requests from before that are void
        self._lock = Lock()  # of all these
        self._now = ThreadPoolExecutor(FETCHING, thread_name_prefix="blocks")
        self._ahead = ThreadPoolExecutor(AHEAD, thread_name_prefix="blocks-ahead")

    def __getitem__(self, numbers: np.ndarray, /) -> np.ndarray:
        """Raises StorageFailed where a block cannot be had, SettingError where it is damaged."""
        numbers = np.asarray(numbers)
        blocks = self.index.block_of(numbers)
        within = numbers - self.index.first[blocks]
        try:
            return gather(self._files, blocks, within, self)
        except KeyError:  # not here, or evicted
            return self._waited_for(blocks, within)

    def expect(self, numbers: np.ndarray) -> None:
        """Fetch the blocks of these sequences in the background, in this order; earlier calls are forgotten."""
        if numbers is self._last_expected:
            return
        self._last_expected = numbers
        blocks = dict.fromkeys(self.index.block_of(np.asarray(numbers)).tolist())
        with self._lock:
            for block in self._expected.keys() - blocks.keys():
                if self._expected[block].cancel():  # it waits for its turn; what is under way continues
                    del self._expected[block]
            missing = [block for block in blocks if not self._is_coming(block)]
            for block in missing:
                self._expected[block] = self._submit(self._ahead, block, self._expected)

    def close(self) -> None:
        """End the threads, once what is under way has come."""
        for pool in (self._now, self._ahead):
            pool.shutdown(cancel_futures=True)

    def _is_coming(self, block: int) -> bool:
        return block in self._files or block in self._waited or block in self._expected

    def _waited_for(self, blocks: np.ndarray, within: np.ndarray) -> np.ndarray:
        """The sequences of these blocks, of which few are open at a time, each until it is read."""
        found = np.empty((len(blocks), self.shape[1]), self.dtype)
        different = np.unique(blocks)
        for start in range(0, len(different), AT_ONCE):
            some = different[start : start + AT_ONCE]
            rows = np.flatnonzero(np.isin(blocks, some))
            found[rows] = gather(self._views(some.tolist()), blocks[rows], within[rows], self)
        return found

    def _views(self, blocks: list[int]) -> dict[int, FileInUse]:
        """The sequences of these blocks, once all are there."""
        with self._lock:
            views = dict[int, FileInUse]()
            for block in blocks:
                with suppress(KeyError):
                    views[block] = self._files[block]
            waited = {block: self._need(block) for block in blocks if block not in views}
        return views | {block: self._wait(block, future) for block, future in waited.items()}

    def _need(self, block: int) -> "Future[FileInUse]":
        """Fetch a block before all that are fetched ahead. The lock is held."""
        if block in self._expected and self._expected[block].cancel():
            del self._expected[block]
        if block not in self._waited:  # one that is on its way already comes once all the same, by the cache's lock
            self._waited[block] = self._submit(self._now, block, self._waited)
        return self._waited[block]

    def _wait(self, block: int, future: "Future[FileInUse]") -> FileInUse:
        name, begun, signals = self.blocks.name(self.index.block(block)), time.monotonic(), in_force()
        logged = begun
        while not wait([future], NAP).done:
            signals.raise_if_stopped()
            if (now := time.monotonic()) - logged >= LOG_EVERY:
                logged = now
                logger.info(f"the run has waited {now - begun:.0f} s for storage: {name}")
        try:
            return future.result()
        except CancelledError as error:
            signals.raise_if_stopped()
            failure = StorageFailed(f"{name} was not read, as reading another block failed: restore access")
            raise self.blocks.last_error or failure from error

    def _submit(
        self, pool: ThreadPoolExecutor, block: int, coming: dict[int, "Future[FileInUse]"]
    ) -> "Future[FileInUse]":
        return pool.submit(self._fetch, block, coming, self._failures, in_force())

    def _fetch(self, block: int, coming: dict[int, "Future[FileInUse]"], failures: int, signals: Signals) -> FileInUse:
        """Open a block, and have it fetched where it is not here.

        Args:
            coming: which of the two holds its future.
            failures: how many there were when it was requested.
            signals: in force at that time; the process may end before this block's turn comes.
        """
        ahead = coming is self._expected

        def fetch(block: Block) -> memoryview:
            signals.raise_if_stopped()
            return self.blocks.plain(block, ATTEMPTS_AHEAD if ahead else ATTEMPTS)

        try:
            view = self.cache.get(self.index.block(block), self.index.layout, fetch, ahead)
            with self._lock:
                self._files[block] = view
                coming.pop(block, None)
            self._let_go_of_evicted()
        except BaseException as error:
            self._give_up(block, coming, error, failures)
            raise
        return view

    def _let_go_of_evicted(self) -> None:
        """Close the blocks that the cache has no more: the disk gets their room back when no process has them open.

        The block that has just come may be among them, as other threads evict; no later look need come.
        """
        before = list(self._files)  # blocks that come while others are listed are none that have gone
        cached = self.cache.digests()
        with self._lock:
            for gone in [block for block in before if self._digest(block) not in cached]:
                self._files.pop(gone, None)

    def _give_up(self, block: int, coming: dict[int, "Future[FileInUse]"], error: BaseException, failures: int) -> None:
        """A block cannot be fetched. That ends the run if a thread waits for it, and then no other is needed."""
        with self._lock:
            if failures != self._failures:  # the waiting thread has the error already, and may have begun anew
                return
            coming.pop(block, None)
            self._last_expected = None
            if coming is self._waited:
                self._failures += 1
                if isinstance(error, StorageFailed | SettingError):
                    self.blocks.give_up(error)
                for future in [*self._waited.values(), *self._expected.values()]:
                    future.cancel()
                self._waited.clear()
                self._expected.clear()

    def _digest(self, block: int) -> str:
        return self.index.digests[block].tobytes().hex()
