"""How long a thread has computed, apart from what it has waited for."""

import time
from pathlib import Path


def computed_seconds() -> float:
    """Seconds that this thread has computed, or would have on a core that was free; the latter is known on Linux."""
    try:
        wanted_core = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        wanted_core = 0.0
    return time.thread_time() + wanted_core
