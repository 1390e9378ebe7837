"""New weights that are in a file while they are drawn, so that a model larger than the memory can start at random."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distill.distributed.mapped import new_parameters, release
from distill.runtime.errors import SettingError


@contextmanager
def parameters_in_file() -> Iterator[None]:
    """Modules that are made while it is open have their parameters in a temporary file, which has no name.

    Each operation on a weight gives back the memory that it touched, so that a process holds about one weight at a
    time. The random numbers are those of a model in memory.

    Raises:
        SettingError: the folder of temporary files has no room for the weights.
    """
    # The file has no name, so it is gone with the last window on it, however the process ends.
    with tempfile.TemporaryFile() as file, _Weights(file) as weights, new_parameters(weights.keep):
        yield


class _Weights(TorchDispatchMode):
    """Tensors in one file, whose pages leave the memory after each operation."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._size = 0
        self._storages: set[int] = set()

    def keep(self, parameter: nn.Parameter) -> nn.Parameter:
        """The same parameter, its values in the file."""
        if not parameter.is_meta and not self._has(parameter):
            parameter.data = self._window(parameter.data)
        return parameter

    def _window(self, tensor: Tensor) -> Tensor:
        """A window on the file with the values of `tensor`, behind those that it has already."""
        try:
            os.posix_fallocate(self._file.fileno(), self._size, max(tensor.nbytes, 1))
        except OSError as error:
            raise SettingError(
                f"TMPDIR={tempfile.gettempdir()}: the new student's weights lie there until they are sharded, and "
                f"there is no room for them ({error.strerror}); set TMPDIR to a folder with room"
            ) from error
        data = np.memmap(self._file, np.uint8, "r+", self._size, (max(tensor.nbytes, 1),))
        self._size += -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
        window = torch.from_numpy(data)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._storages.add(window.untyped_storage().data_ptr())
        return window.copy_(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for argument in args:
            if isinstance(argument, Tensor) and self._has(argument):
                release(argument)
        return result

    def _has(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._storages
