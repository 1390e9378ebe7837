"""Environment variables that torch reads when it is loaded: how threads wait, where kernels lie, and what it logs."""

import os
from contextlib import suppress
from pathlib import Path

# Rounds of a loop, a few microseconds. By default a thread waits by spinning for milliseconds: on a busy machine it
# then takes the core from the thread that it waits for, and two threads were up to thirteen times slower than one.
SPIN_COUNT = "1000"


def limit_spinning() -> None:
    """Let waiting threads give way soon, unless the environment sets OMP_WAIT_POLICY; ranks inherit it."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


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
