"""How long a thread has computed, without its waits."""

import time
from pathlib import Path


def computed_seconds() -> float:
    """Seconds that this thread has computed, or would have on a core that was free; the latter is known on Linux."""
    try:
        without_core = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        without_core = 0.0
    return time.thread_time() + without_core
