"""Whether the C library's malloc keeps what is freed, as is fast, or gives it back, as models that just fit need it."""

import ctypes
import platform

# Of glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_LARGEST = 2**31 - 1
_LARGE = 2**20  # bytes; what is larger gets a mapping of its own


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


def return_large_tensors() -> None:
    """Give every tensor above 1 MiB back to the system as soon as it is freed.

    By default glibc does so above 32 MiB alone. Smaller ones that live on, such as parts of a sharded model, then lie
    between those that were whole for a moment, whose memory nothing larger fits in: half a gigabyte and more for a
    model of 1.1 B parameters.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)
