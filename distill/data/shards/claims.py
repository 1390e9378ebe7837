"""Which host works on which group of a text: claims that a host renews while it lives, and loses when it does not.

A claim is a small file in the folder that all hosts write to. Clocks of hosts may differ, so no time is in it: who
watches it notes when, by its own clock, it has last changed, and takes it over after a minute without a change. Two
hosts that come to work on one group all the same lose time and nothing else, since both write the same bytes.
"""

import json
import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Self

from distill.data.shards.destination import WORK, Destination
from distill.runtime.errors import Interrupted
from distill.runtime.files import atomic

STALE = 60.0  # seconds without a change, after which a claim is that of a host which is gone
RENEWALS = 4  # in that time
GIVING_BACK = 1.0  # seconds that this may take where the work has ended early; what stays is soon stale

logger = logging.getLogger(__name__)


class Claims:
    """The claims of this host; a context in which they are renewed, and after which they are given back."""

    def __init__(self, folder: Destination, owner: str) -> None:
        """`owner`: the same for a process that resumes the work of one that was killed."""
        self.folder, self.owner = folder, owner
        self.held: set[int] = set()
        self._beats = 0
        self._seen: dict[int, tuple[bytes, float]] = {}  # the claims of others, and since when they have been so
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._renewing = threading.Thread(target=self._renew, daemon=True)

    def take(self, number: int) -> bool:
        """Whether the group of this number is now this host's to work on."""
        if not self.folder.create(_name(number), self._content()):
            try:
                content = self.folder.read(_name(number))
            except FileNotFoundError:  # it was given back in this moment
                return False
            if not self._is_ours(content) and not self._is_stale(number, content):
                return False
            self.folder.write(_name(number), self._content())
        with self._lock:
            self.held.add(number)
        return True

    def release(self, number: int) -> None:
        """Gives a group back, finished or not."""
        with self._lock:
            self.held.discard(number)
            self.folder.remove(_name(number))

    def _is_ours(self, content: bytes) -> bool:
        try:
            return bool(json.loads(content)["owner"] == self.owner)
        except (ValueError, KeyError, TypeError):
            return False

    def _is_stale(self, number: int, content: bytes) -> bool:
        now = time.monotonic()
        before, since = self._seen.get(number, (b"", now))
        if before != content:
            self._seen[number] = (content, now)
            return False
        if now - since < STALE:
            return False
        logger.info(f"the host that worked on group {number:,} is gone: taking it over")
        return True

    def _content(self) -> bytes:
        self._beats += 1
        # The number of renewals begins anew with a process, so a random part keeps two of them apart.
        return json.dumps({"owner": self.owner, "renewed": self._beats, "mark": token_hex(4)}).encode()

    def _renew(self) -> None:
        """Renews the claims until the work has ended, and then gives back those that are left."""
        while not self._ended.wait(STALE / RENEWALS):
            # Where storage fails for good, the process that does the work reports it.
            with self._lock, suppress(Exception, Interrupted):
                for number in self.held:
                    self.folder.write(_name(number), self._content())
        with suppress(Exception, Interrupted):
            for number in list(self.held):
                self.release(number)

    def __enter__(self) -> Self:
        self._renewing.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._ended.set()
        self._renewing.join(None if kind is None else GIVING_BACK)


def _name(number: int) -> str:
    return f"{WORK}/{number:05d}.claim"


def owner_of(scratch: Path) -> str:
    """The owner's name in claims: the same for all processes that work in this folder of a host one after the other."""
    path = scratch / "owner"
    if not path.exists():
        with atomic(path) as new:
            new.write_text(token_hex(8))
    return path.read_text()
