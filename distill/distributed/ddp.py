"""torch.distributed: Gloo on processors, NCCL on NVIDIA GPUs, or a plug-in on either."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distill.config.settings import BackendConfig
from distill.distributed.collective import load_collective, parse_collective, try_out
from distill.distributed.devices import choose_device
from distill.distributed.heartbeat import Heartbeat
from distill.distributed.ranks import WIRE, Ranks
from distill.distributed.rendezvous import open_store, wait_for_all
from distill.distributed.rings import CANDIDATES, TorchRings, requested_rings
from distill.runtime.errors import SettingError, first_line
from distill.runtime.rank import RankInfo, rank_from_env


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
        requested = requested_rings(settings.rings)
        plug_in = settings.collective is not None
        nccl = self._nccl = device.type == "cuda" and not plug_in
        if nccl and requested is not None and requested > 1:
            os.environ["NCCL_MIN_NCHANNELS"] = str(requested)  # read when the first communicator is made
        self._store = open_store(info, settings.timeout, "distill")
        wait_for_all(self._store, info, settings.timeout)
        self._heartbeat = Heartbeat(self._store, self.rank, self.size, settings.timeout)
        self._join(self._choose_backend(), device if nccl else None)
        self._rings = TorchRings(1 if nccl or plug_in else requested or max(CANDIDATES), settings.timeout)
        self.measures_rings &= not (nccl or plug_in)  # NCCL measures and chooses its channels itself
        if settings.collective is not None:
            self.rings = 1
            wire = [WIRE[settings.compression][0]] if settings.compression in WIRE else []
            try_out(settings.collective, self.rank, device, wire, settings.timeout)
        self._describe()

    @property
    def stripes(self) -> int:
        # The channels of NCCL share out each call between them: more calls would only cost their latency.
        return 1 if self.device.type == "cuda" else self.rings

    def _choose_backend(self) -> str:
        """The name of the process-group backend. Raises SettingError for a plug-in that is not there."""
        if self.settings.collective is not None:
            return load_collective(self.settings.collective, self.device)
        return "cpu:gloo,cuda:nccl" if self._nccl else "gloo"

    def _join(self, backend: str, bound: torch.device | None) -> None:
        """Make the group of all ranks; NCCL connects at once where `bound` names the device."""
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("groups", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.settings.timeout),
                device_id=bound,
            )
        except Exception as error:
            if self.settings.collective is None:
                raise
            reason = first_line(error)
            setting = f"backend.collective={self.settings.collective}"
            raise SettingError(f"{setting} does not start: {reason}; leave it null") from error

    def _barrier(self) -> None:
        # Through the store, since an exchange has a limit of time: some ranks may be preparing data for hours.
        self._barriers += 1
        self._heartbeat.meet(f"barrier/{self._barriers}")

    def close(self) -> None:
        if self.size > 1:
            self.barrier()
            self._heartbeat.leave()
            dist.destroy_process_group()

    def _close_unused_rings(self) -> None:
        self._rings.keep(self.rings)
        self._describe()

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

    def _describe(self) -> None:
        if self.settings.collective is not None:
            self.engine = f"torch.distributed on {parse_collective(self.settings.collective)[1]}"
        elif self._nccl:
            channels = f"at least {self.rings} channels" if self.rings > 1 else "its own choice of channels"
            self.engine = f"torch.distributed on NCCL, {channels}"
        else:
            self.engine = f"torch.distributed on Gloo, {self.rings} process group{'s' * (self.rings > 1)}"
