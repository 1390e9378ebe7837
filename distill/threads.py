"""How OpenMP's threads wait for each other: set before torch is loaded, which reads it once."""

import os

# Rounds of a loop, a few microseconds. By default a thread waits by spinning for milliseconds: on a busy machine it
# then takes the core from the thread that it waits for, and two threads were up to thirteen times slower than one.
SPIN_COUNT = "1000"


def limit_spinning() -> None:
    """Let waiting threads give way soon, unless the user has said how they should wait; ranks inherit it."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
