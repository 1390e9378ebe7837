"""Environment variables that torch reads when it is loaded: how threads wait, where kernels lie, and what it logs."""

import os
import time
from contextlib import suppress
from pathlib import Path

# Rounds of a loop that a thread spins before it sleeps, by default for milliseconds. Where another program needs the
# core, the thread that is waited for then does not run, and two threads were up to thirteen times slower than one: a
# few microseconds are best. Where cores are idle, spinning costs nothing, and to wake a thread takes time: a step of
# SmolLM2 on two cores was 1.3 times as fast with the longer wait (docs/explanation/benchmarks/quality.md).
SPINS_BESIDE_OTHERS, SPINS_ON_IDLE_CORES = "1000", "10000"
SAMPLES, BETWEEN_SAMPLES = 4, 0.005  # seconds


def limit_spinning() -> None:
    """Let waiting threads give way in time, unless the environment says how they wait; ranks inherit it."""
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        os.environ["GOMP_SPINCOUNT"] = SPINS_ON_IDLE_CORES if _cores_are_idle() else SPINS_BESIDE_OTHERS


def _cores_are_idle() -> bool:
    """Whether torch's threads and all other threads that run now have a core each; False where nothing tells it."""
    cores = os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    wanted = int(threads) if threads.isdecimal() else cores
    try:
        return _others_running() + wanted <= cores
    except (OSError, ValueError, IndexError):
        return False


def _others_running() -> int:
    """Threads of this machine that run or wait for a core, without this one: the least of a few samples.

    Raises:
        OSError, ValueError, IndexError: the system has no /proc/loadavg, or one of another form.
    """
    samples = []
    for _ in range(SAMPLES):
        running, _, _ = Path("/proc/loadavg").read_text().split()[3].partition("/")
        samples.append(int(running) - 1)
        time.sleep(BETWEEN_SAMPLES)
    return min(samples)


def keep_compiled_kernels() -> None:
    """Let the kernels that torch.compile makes outlive /tmp, which batch systems and containers empty.

    They are beside Distill's other caches unless the user has chosen a folder, or has no home that can be written.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    folder = Path("~/.cache/distill/kernels").expanduser()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def quiet_libraries() -> None:
    """Leave out the warnings of torch's C++ parts: a connection that breaks is reported in one line, without frames."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
