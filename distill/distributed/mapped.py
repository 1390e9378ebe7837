"""Weights that are in mapped files: read page by page when they are touched, and given back when they are not needed.

transformers gives the tensors of a safetensors file as windows on it, as long as their format and device stay. So a
model that is larger than the memory can be opened by each rank, which then touches its own part alone.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from torch import Tensor, nn

DONTNEED = 4  # madvise: these pages are read from the file again when they are touched
REGISTER = nn.Module.register_parameter
PAGES, ENTRY = Path("/proc/self/pagemap"), 8  # bytes of flags for each page of this process, by its address


def release(tensor: Tensor) -> None:
    """Give back the memory that holds pages of a mapped file, unless they were changed; others are left."""
    start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    if tensor.device.type != "cpu" or not size:
        return
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first and _are_those_of_a_file(first, last):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), DONTNEED)


def _are_those_of_a_file(first: int, last: int) -> bool:
    """Whether all pages in memory between two addresses are as a file has them: what has changed would be lost."""
    try:
        with PAGES.open("rb", buffering=0) as file:
            file.seek(first // mmap.PAGESIZE * ENTRY)
            flags = np.frombuffer(file.read((last - first) // mmap.PAGESIZE * ENTRY), np.uint64)
    except OSError:  # another system than Linux
        return False
    present, swapped, of_file = ((flags & np.uint64(1 << bit)) != 0 for bit in (63, 62, 61))
    return len(flags) == (last - first) // mmap.PAGESIZE and not (present & ~of_file | swapped).any()


def return_free_memory() -> None:
    """Give the system back what was freed in the middle of the heap, as whole blocks are that have been sharded."""
    with suppress(OSError, AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made while it is open have parameters without memory; their buffers are made as always."""

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        made = None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        REGISTER(module, name, made)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = REGISTER  # type: ignore[method-assign]


def new_parameters_take_memory() -> bool:
    """Whether the parameters of modules that are made now are in the memory, as they do by default."""
    return nn.Module.register_parameter is REGISTER
