"""What files hold, as the key of what is made from them has it: the same for a copy, wherever and since when it lies.

A file of this machine has its SHA-256. All processes of a machine read it once: a record in `data.cache` gives the
digest again while size, times and inode of the file stay. A file at a URL has the digest that its service reports, or
else its URL and the version there.
"""

import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from threading import Event
from typing import Any

from distill.data.disk_cache import folder_of
from distill.data.remote import file_system, is_url, is_web, retried
from distill.runtime.errors import SettingError
from distill.runtime.files import atomic, locked
from distill.runtime.host import size

READ_BYTES = 1 << 20  # at once
THREADS = 8  # that read files: hashing lets other threads run
ANNOUNCED = 4 << 30  # bytes from which on reading takes long enough to be logged

# What distinguishes one version of a file at a URL from another, by the names that services give it, the surest first:
# what follows from its content alone, and then what is of the place where it lies.
DIGESTS = ("ETag", "blob_id", "oid", "md5Hash")
VERSIONS = ("etag", "generation", "LastModified", "last_modified", "mtime")

logger = logging.getLogger(__name__)


def contents_of(places: Sequence[str], cache: str) -> list[Any]:
    """What decides the content of files, in their order: their names below the folder of all of them, and digests.

    Args:
        places: paths and URLs.
        cache: the folder that has the record (`data.cache`).
    """
    local = [Path(place).expanduser() for place in places if not is_url(place)]
    digests = dict(zip(map(str, local), _recorded(local, cache), strict=True))
    named = zip(places, names_below_all(places), strict=True)
    return [
        _reported(place, name) if is_url(place) else (name, *digests[str(Path(place).expanduser())])
        for place, name in named
    ]


def names_below_all(places: Sequence[str]) -> list[str]:
    """The names of files below the folder that all of them lie in."""
    parts = [place.split("/") for place in places]
    columns = zip(*(names[:-1] for names in parts), strict=False)
    common = sum(1 for _ in takewhile(lambda names: len({*names}) == 1, columns))
    return ["/".join(names[common:]) for names in parts]


def _reported(url: str, name: str) -> tuple[Any, ...]:
    """Name, size and digest of a file at a URL; where its service reports no digest, its URL, size and version."""
    system, path = file_system(url, "corpus.path")
    info = retried(lambda: system.info(path), url)
    key = next((key for key in (*DIGESTS, *VERSIONS) if info.get(key) is not None), "")
    version = str(info.get(key, ""))
    if key in DIGESTS and not is_web(url):  # a web server makes its ETag of a time, or of whatever it likes
        return name, info.get("size"), version
    # What follows a question mark may be a signature that is another one every day.
    return url.partition("?")[0] if is_web(url) and version else url, info.get("size"), version


def _recorded(paths: list[Path], cache: str) -> list[tuple[Any, ...]]:
    """Size and SHA-256 of each file, from the record where that has them."""
    if not paths:
        return []
    folder = os.path.commonpath([path.absolute().parent for path in paths])
    try:
        record = folder_of(cache, "contents", f"{sha256(folder.encode()).hexdigest()[:32]}.json")
    except SettingError:  # a cache that may only be read, beside finished sequences
        return _read([*paths], {})
    known = _load(record)
    if any(_known(path, known) is None for path in paths):
        with locked(record.with_suffix(".lock")):  # the other processes of the machine wait
            known = _load(record)
            found = _read(paths, known)
            with suppress(OSError), atomic(record) as new:  # without room for it, they are read again
                new.write_text(json.dumps(known))
            return found
    return _read(paths, known)


def _load(record: Path) -> dict[str, list[Any]]:
    try:
        known = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _state(path: Path) -> list[int]:
    """What changes when a file is written to or replaced, also by a copy that keeps the time of its original."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _known(path: Path, known: dict[str, list[Any]]) -> str | None:
    """The digest of a file on record; None: it is not there, or of another state of the file."""
    try:
        state, digest = known[str(path.absolute())]
        return str(digest) if state == _state(path) else None
    except (KeyError, ValueError, TypeError, OSError):
        return None


def _read(paths: list[Path], known: dict[str, list[Any]]) -> list[tuple[Any, ...]]:
    """Size and SHA-256 of each file; those that are not in `known` are read, and put there."""
    missing = [path for path in paths if _known(path, known) is None]
    if (num_bytes := sum(path.stat().st_size for path in missing)) >= ANNOUNCED:
        logger.info(f"reading {size(num_bytes)} of text for its SHA-256, once on this machine")
    ended = Event()

    def entry(path: Path) -> list[Any]:
        digest, state = sha256(), _state(path)
        try:
            with path.open("rb", buffering=0) as file:
                while not ended.is_set() and (part := file.read(READ_BYTES)):
                    digest.update(part)
        except OSError as error:  # who reads its text reports that
            return [state, f"unreadable: {error.strerror}"]
        return [state, digest.hexdigest()]

    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="contents")
    try:
        entries = dict(zip(missing, pool.map(entry, missing), strict=True))
    finally:
        ended.set()  # a signal does not wait for the end of a large file
        pool.shutdown(cancel_futures=True)
    read = {str(path.absolute()): entry for path, entry in entries.items()}
    known |= {name: entry for name, entry in read.items() if not entry[1].startswith("unreadable")}
    found = known | read
    return [(found[str(path.absolute())][0][0], found[str(path.absolute())][1]) for path in paths]
