"""torch.distributed: Gloo on processors, NCCL on NVIDIA GPUs."""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from distill.backends.devices import choose_device
from distill.backends.interface import Backend
from distill.backends.rank import RankInfo, rank_from_env
from distill.backends.rendezvous import open_store, wait_for_all
from distill.backends.rings import CANDIDATES, TorchRings, parse_rings
from distill.backends.roll_call import RollCall
from distill.config import BackendConfig

POLL = 0.05  # seconds between two looks at a barrier


class Ddp(Backend):
    """The interface on torch.distributed.

    On the CPU each ring is a process group with connections of its own. On GPUs rings are channels of NCCL, which
    chooses their number itself unless `backend.rings` is above 1.
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
        requested = parse_rings(settings.rings)
        nccl = device.type == "cuda"
        if nccl and requested is not None and requested > 1:
            os.environ["NCCL_MIN_NCHANNELS"] = str(requested)  # read when the first communicator is made
        self._store = open_store(info, settings.timeout, "distill")
        # A connection of its own: a wait in the other one would hold it up.
        self._roll_call = RollCall(dist.PrefixStore("roll call", self._store.clone()), self.rank, self.size)  # type: ignore[attr-defined]
        with self._called():
            wait_for_all(self._store, self.size, settings.timeout)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else "gloo",
                store=dist.PrefixStore("groups", self._store),
                rank=info.rank,
                world_size=info.size,
                timeout=timedelta(seconds=settings.timeout),
                device_id=device if nccl else None,
            )
        self._rings = TorchRings(1 if nccl else requested or max(CANDIDATES), settings.timeout)
        self._nccl = nccl
        self._describe()

    def _barrier(self) -> None:
        # Through the store and without a limit of time: some ranks may be preparing data for hours. When one dies its
        # launcher ends the others.
        self._barriers += 1
        name = f"barrier/{self._barriers}"
        self._store.add(name, 1)
        while self._store.add(name, 0) < self.size:
            time.sleep(POLL)

    def close(self) -> None:
        if self.size > 1:
            self.barrier()
            # Rank 0 may hold the store, which the others read until they have seen that all are there.
            self._store.add("left", 1)
            while self.rank == 0 and self._store.add("left", 0) < self.size:
                time.sleep(POLL)
            if self._roll_call is not None:
                self._roll_call.close()
            dist.destroy_process_group()

    def _choose_rings(self) -> None:
        if self._nccl:
            return  # NCCL measures and chooses its channels itself
        super()._choose_rings()

    def _settle_rings(self) -> None:
        self._rings.keep(self.rings)
        self._describe()

    def _sum(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def _begin_sum(self, parts: Sequence[Tensor], name: str) -> Callable[[], None]:
        return self._rings.begin_sum(parts)

    def _broadcast(self, data: Tensor) -> None:
        dist.broadcast(data, 0)

    def _describe(self) -> None:
        if self._nccl:
            channels = f"at least {self.rings} channels" if self.rings > 1 else "its own choice of channels"
            self.engine = f"torch.distributed on NCCL, {channels}"
        else:
            self.engine = f"torch.distributed on Gloo, {self.rings} process group{'s' * (self.rings > 1)}"
