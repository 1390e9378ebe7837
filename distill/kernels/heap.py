"""Makes the C library's malloc keep what is freed: training allocates the same large tensors again and again."""

import ctypes
import platform

# Of glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1


def retain_heap() -> None:
    """Give nothing back to the system: tensors come from memory that has pages already.

    By default glibc asks the system anew for every tensor above 32 MiB, and gives back what is free at the heap's end.
    Each page then costs a fault, again and again: a tenth of a training step. Elsewhere than under glibc nothing is
    changed.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _LARGEST)
