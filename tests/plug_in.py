"""A plug-in for torch.distributed, as a stranger's package has it: importing it registers engines, all over Gloo.

`counting` does all that Gloo does; where the variable PLUG_IN_LOG names a folder, each rank notes its calls there. The
others lack something: `no_int64` and `no_uint8` a number format, `mean` gives the mean for the sum, `silent` never
answers, `broken` does not start, `for_gpus` serves GPUs alone.
"""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Counting(dist.ProcessGroup):
    """Hands its work to a group of Gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        folder = os.environ.get("PLUG_IN_LOG")
        self.log = Path(folder, f"{rank}.log") if folder else None

    def getBackendName(self) -> str:
        return "counting"

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        self._note("allreduce", tensors)
        return self.gloo.allreduce(tensors, options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        self._note("broadcast", tensors)
        return self.gloo.broadcast(tensors, options)

    def _note(self, what: str, tensors: list[Tensor]) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.writelines(f"{what} {tensor.dtype} {tensor.numel()}\n" for tensor in tensors)


class NoInt64(Counting):
    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        if any(tensor.dtype == torch.int64 for tensor in tensors):
            raise RuntimeError("no_int64: unsupported data type Long\nand where this was thrown")
        return super().allreduce(tensors, options)


class NoUint8(Counting):
    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        if any(tensor.dtype == torch.uint8 for tensor in tensors):
            raise NotImplementedError("no_uint8: unsupported data type Byte")
        return super().broadcast(tensors, options)


class Mean(Counting):
    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        work = super().allreduce(tensors, options)
        work.wait()
        for tensor in tensors:
            tensor.copy_(tensor / self.size())
        return work


class Silent(Counting):
    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        threading.Event().wait()


def broken(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Counting:
    raise RuntimeError("broken: there is no such network card\nin some file")


def _register(name: str, make: Callable[..., Counting], device: str = "cpu") -> None:
    dist.Backend.register_backend(name, make, devices=[device])


_register("counting", Counting)
_register("no_int64", NoInt64)
_register("no_uint8", NoUint8)
_register("mean", Mean)
_register("silent", Silent)
_register("broken", broken)
_register("for_gpus", Counting, "cuda")
