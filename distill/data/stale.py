"""Removes what hosts that never came back have left of a preparation that others have finished.

A host packs text in a folder of its own in `data.cache`, which hosts may share, and what it publishes is in a
folder beside the sequences until all is done. Nobody needs either once the sequences are finished. A host that still
works on them finds its files gone, sees that the sequences are finished, and uses them: so nothing is lost where one
that is alive is taken for one that is gone.
"""

import logging
import shutil
import time
from contextlib import suppress
from pathlib import Path

from distill.data.shards.claims import STALE
from distill.data.shards.destination import WORK, Destination

logger = logging.getLogger(__name__)


def scratch_name(key: str, host: str) -> str:
    """The folder of a host that makes the sequences of this key."""
    return f"{key}.{host}.build"


def remove_stale(folder: Destination, scratches: Path, key: str) -> None:
    """Remove what is left of the preparation of these sequences, which are finished.

    Args:
        scratches: where the folders of hosts lie; those in which something has changed a moment ago stay.
    """
    with suppress(OSError):  # of sequences that may only be read
        if folder.names(WORK):
            folder.remove(WORK)
    for scratch in scratches.glob(scratch_name(key, "*")):
        with suppress(OSError):  # its host removes it in this moment, or it is another user's
            if time.time() - _last_change(scratch) > STALE:
                shutil.rmtree(scratch)
                logger.info(f"removed {scratch}: its host did not come back, and the sequences are finished")


def _last_change(folder: Path) -> float:
    """When anything in a folder was last written, made or removed, in seconds since 1970."""
    return max(path.stat().st_mtime for path in [folder, *folder.rglob("*")])
