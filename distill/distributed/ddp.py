"""torch.distributed: Gloo on processors, NCCL on NVIDIA GPUs, or a plug-in on either."""

import importlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distill.config.settings import BackendConfig
from distill.distributed.devices import choose_device
from distill.distributed.heartbeat import Heartbeat
from distill.distributed.ranks import Ranks
from distill.distributed.rendezvous import open_store, wait_for_all
from distill.runtime.errors import SettingError, first_line
from distill.runtime.rank import RankInfo, rank_from_env
from distill.runtime.users_code import find_modules_here


class TorchRings:
    """`number` rings over all ranks: the group that torch.distributed has anyway, and further ones."""

    def __init__(self, number: int, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        self._groups = [dist.group.WORLD, *(dist.new_group(timeout=limit) for _ in range(number - 1))]

    def begin_sum(self, parts: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to sum contiguous tensors over all ranks, in place, part i on ring i; gives how to wait."""
        works = [
            dist.all_reduce(part, group=self._groups[i % len(self._groups)], async_op=True)
            for i, part in enumerate(parts)
        ]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait


class Ddp(Ranks):
    """The interface on torch.distributed.

    On the CPU each ring is a process group with connections of its own. On GPUs rings are channels of NCCL, which
    chooses their number itself unless `backend.rings` is above 1. A plug-in (`backend.collective`) carries everything,
    on one ring: SMDDP, for one, allows neither a second group nor another backend beside it, and serves GPUs alone. So
    what is on the processor takes the way over the GPU there.
    """

    name = "ddp"

    def __init__(self, settings: BackendConfig) -> None:
        info = rank_from_env() or RankInfo("", 0, 1, 0, 1)
        device = choose_device(settings, info.local_rank, info.local_size)
        super().__init__(settings, info, device)
        self._barriers = 0
        if self.size == 1:
            self.engine, self.rings = "none", 1
            return
        plug_in = settings.collective is not None
        nccl = self._nccl = device.type == "cuda" and not plug_in
        if nccl and self.name == "ddp":
            # Where a rank is lost, torch would abort the others: no line, no checkpoint of rank 0. The host waits for
            # the one exchange of a step anyway; it does not for those of a sharded model.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        if nccl and self.rings > 1:
            os.environ["NCCL_MIN_NCHANNELS"] = str(self.rings)  # read when the first communicator is made
        self._store = open_store(info, settings.timeout, "distill")
        wait_for_all(self._store, info, settings.timeout)
        self._heartbeat = Heartbeat(self._store, self.rank, self.size, settings.timeout)
        self._join(device if nccl else None)
        self._rings = TorchRings(1 if nccl else self.rings, settings.timeout)
        self.engine = self._describe()

    @property
    def stripes(self) -> int:
        # The channels of NCCL share out each call between them: more calls would only cost their latency.
        return 1 if self.device.type == "cuda" else self.rings

    def _join(self, bound: torch.device | None) -> None:
        """Make the group of all ranks; NCCL connects at once where `bound` names the device.

        Raises SettingError for a plug-in that torch does not start.
        """
        backend = "cpu:gloo,cuda:nccl" if self._nccl else "gloo"
        try:
            if self.settings.collective is not None:
                module, _, backend = self.settings.collective.rpartition(":")
                if module:  # which registers it
                    find_modules_here(module)
                    importlib.import_module(module)
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("groups", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.settings.timeout),
                device_id=bound,
            )
        except Exception as error:  # a plug-in may refuse the machine by any error of its own
            if self.settings.collective is None:
                raise
            cure = "give NAME, or MODULE:NAME where a module has to be imported to register it, or leave it null"
            raise SettingError(
                f"backend.collective={self.settings.collective} does not start: {first_line(error)}; {cure}"
            ) from error

    def _barrier(self) -> None:
        # Through the store, since an exchange has a limit of time: some ranks may be preparing data for hours.
        self._barriers += 1
        self._heartbeat.meet(f"barrier/{self._barriers}")

    def close(self) -> None:
        if self.size > 1:
            self.barrier()
            self._heartbeat.leave()
            dist.destroy_process_group()

    def _sum(self, tensor: Tensor) -> None:
        self._on_device(dist.all_reduce, tensor)

    def begin_sum(self, parts: Sequence[Tensor], name: str) -> Callable[[], None]:
        return self._rings.begin_sum(parts)

    def _broadcast(self, data: Tensor) -> None:
        self._on_device(partial(dist.broadcast, src=0), data)

    def _on_device(self, collective: Callable[[Tensor], Any], tensor: Tensor) -> None:
        """Call it in place, by way of the run's device where a plug-in has to carry a tensor that lies elsewhere."""
        if self.settings.collective is None or tensor.device.type == self.device.type:
            collective(tensor)
            return
        moved = tensor.to(self.device)
        collective(moved)
        tensor.copy_(moved)

    def _describe(self) -> str:
        if self.settings.collective is not None:
            return f"torch.distributed on {self.settings.collective.rpartition(':')[2]}"
        if self._nccl:
            channels = f"at least {self.rings} channels" if self.rings > 1 else "its own choice of channels"
            return f"torch.distributed on NCCL, {channels}"
        return f"torch.distributed on Gloo, {self.rings} process group{'s' * (self.rings > 1)}"
