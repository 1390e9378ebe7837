"""Weights that lie in mapped files: read page by page when they are touched, and given back when they are not needed.

transformers gives the tensors of a safetensors file as windows on it, as long as their format and device stay. So a
model that is larger than the memory can be opened by each rank, which then touches its own part alone.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

DONTNEED = 4  # madvise: these pages are read from the file again if anybody wants them


def release(tensor: Tensor) -> None:
    """Give back the memory that holds pages of a mapped file, which nobody has changed; other tensors are left."""
    start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    if tensor.device.type != "cpu" or not size or not _is_mapped(start):
        return
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), DONTNEED)


def _is_mapped(address: int) -> bool:
    """Whether an address lies in a window on a file of weights."""
    try:
        regions = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # another system than Linux
        return False
    for line in regions:
        bounds, *_ = line.split(maxsplit=1)
        low, high = (int(each, 16) for each in bounds.split("-"))
        if low <= address < high:
            return line.endswith(".safetensors")
    return False


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made while it is open have parameters without memory; their buffers are made as always."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        made = None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, made)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
