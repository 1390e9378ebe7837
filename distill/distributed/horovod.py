"""Horovod: its own allreduce for one ring, and rings of torch on Gloo that meet through Horovod for several."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distill.config.settings import BackendConfig
from distill.distributed.ddp import TorchRings
from distill.distributed.devices import choose_device
from distill.distributed.install_horovod import COMMAND
from distill.distributed.ranks import Ranks
from distill.distributed.rendezvous import meeting_point, open_store, wait_for_address, wait_for_all
from distill.runtime.errors import SettingError
from distill.runtime.rank import RankInfo, number_of, rank_from_env

RENDEZVOUS = "HOROVOD_GLOO_RENDEZVOUS_"  # of variables with the address of the launcher's server
POLL = 0.0005  # seconds between two looks at an exchange


class Horovod(Ranks):
    """The interface on Horovod, without its wrapper of the optimizer: the bucket goes straight into its allreduce.

    On the CPU Horovod has one ring, however many tensors there are; further rings are process groups of torch. On GPUs
    rings are channels of NCCL, and as many streams with a stripe of the bucket each.
    """

    name = "horovod"

    def __init__(self, settings: BackendConfig) -> None:
        info = rank_from_env() or RankInfo("", 0, 1, 0, 1)
        device = choose_device(settings, info.local_rank, info.local_size)
        self._nccl = device.type == "cuda"
        self._hvd = _horovod()
        if self._nccl and not self._hvd.nccl_built():
            raise SettingError(f"backend.device={settings.device}: Horovod was built without NCCL; run `{COMMAND}`")
        if settings.compression == "bf16" and info.size > 1 and (self._nccl or settings.rings == 1):
            raise SettingError(
                "backend.compression=bf16: Horovod's own allreduce has no bfloat16; choose fp16, none, backend=ddp, or "
                "on the CPU backend.rings=2"
            )
        _tune(settings, self._nccl)
        _join(self._hvd, info, settings.timeout)
        super().__init__(settings, info, device)
        if (seat := (self._hvd.rank(), self._hvd.size())) != (self.rank, self.size):
            raise SettingError(
                f"{info.launcher}: this is rank {self.rank} of {self.size}, and Horovod has joined as {seat[0]} of "
                f"{seat[1]}; start the ranks by horovodrun or torchrun"
            )
        self._rings: TorchRings | None = None
        if self.size == 1:
            self.engine, self.rings = "none", 1
            return
        if not self._nccl and self.rings > 1:
            self._open_rings()
        self.engine = self._describe()

    def _barrier(self) -> None:
        self._sum(torch.zeros(1, device=self.device))

    def close(self) -> None:
        if self._rings is not None:
            self.barrier()  # rank 0 holds the store of the rings
            dist.destroy_process_group()
        self._hvd.shutdown()

    def _open_rings(self) -> None:
        """Open the rings of torch on Gloo; the address of rank 0's store comes to the others through Horovod."""
        limit = timedelta(seconds=self.settings.timeout)
        host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        if self.size == self.local_size:
            host = "127.0.0.1"
        store = None
        if self.rank == 0:
            store = dist.TCPStore(host, 0, self.size, is_master=True, timeout=limit, wait_for_workers=False)
        host, port = self.broadcast((host, store.port if store else 0))
        if store is None:
            store = dist.TCPStore(host, port, self.size, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=limit)
        self._rings = TorchRings(self.rings, self.settings.timeout)

    def _sum(self, tensor: Tensor) -> None:
        name = f"sum/{tensor.dtype}/{tuple(tensor.shape)}"
        self._wait(self._hvd.allreduce_async_(tensor, op=self._hvd.Sum, name=name))

    def begin_sum(self, parts: Sequence[Tensor], name: str) -> Callable[[], None]:
        if self._rings is not None and (len(parts) > 1 or parts[0].dtype == torch.bfloat16):
            return self._rings.begin_sum(parts)
        # The same names each time: Horovod then answers from its cache instead of negotiating anew.
        handles = [
            self._hvd.allreduce_async_(part, op=self._hvd.Sum, name=f"{name}/{i}/{len(part)}")
            for i, part in enumerate(parts)
        ]

        def wait() -> None:
            for handle in handles:
                self._wait(handle)

        return wait

    def _broadcast(self, data: Tensor) -> None:
        self._wait(self._hvd.broadcast_async_(data, 0, name=f"broadcast/{len(data)}"))

    def _wait(self, handle: int) -> None:
        # Horovod's own waiting polls without a pause, and takes the core from the threads that do the work: with more
        # ranks than cores 64 MB took up to 28 s instead of 0.2.
        while self.device.type == "cpu" and not self._hvd.poll(handle):
            time.sleep(POLL)
        self._hvd.synchronize(handle)

    def _describe(self) -> str:
        if self._nccl and self.rings > 1:
            return f"Horovod on NCCL, {self.rings} streams of at least {self.rings} channels"
        if self._nccl:
            return "Horovod on NCCL, its own choice of channels"
        if self._rings is not None:
            return f"Horovod, gradients on {self.rings} Gloo rings of torch that met through it"
        return "Horovod, its own ring on " + ("MPI" if self._hvd.mpi_enabled() else "Gloo")


def _horovod() -> Any:
    """The module horovod.torch. Raises SettingError when it is not installed or does not fit this torch."""
    try:
        import horovod.torch as module
    except ImportError as error:
        reason = "is not installed" if error.name in ("horovod", "horovod.torch") else f"does not load ({error})"
        raise SettingError(f"backend.name=horovod: Horovod {reason}; run `{COMMAND}`") from None
    return module


def _tune(settings: BackendConfig, nccl: bool) -> None:
    """Horovod's settings, which it reads from the environment when it starts; what the user has set there stays."""
    # Its idle thread looks for work once per cycle, which at the default of 1 ms costs a sixth of two busy cores.
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "1" if settings.sync == "every" else "10")
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(max(1, round(settings.timeout))))
    # Rank 0 then names the ranks that an exchange waits for, and after as many seconds again.
    os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "30")
    # Segments and stripes are long enough; joining them would copy them, and put them on one stream.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    if nccl and settings.rings > 1:
        os.environ["NCCL_MIN_NCHANNELS"] = os.environ["HOROVOD_NUM_NCCL_STREAMS"] = str(settings.rings)


def _join(hvd: Any, info: RankInfo, timeout: float) -> None:
    """Start Horovod: with its own launcher or MPI as they are, else by playing its launcher's part here."""
    by_mpi = hvd.mpi_built() and info.launcher in ("Open MPI", "MPI", "Slurm")
    store = None
    if info.size > 1 and info.launcher == "horovodrun":
        _wait_for_launcher(timeout)
    if info.size > 1 and info.launcher != "horovodrun" and not by_mpi:
        store = _rendezvous(info, timeout)
    elif info.size == 1 and info.launcher != "horovodrun":
        os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
    hvd.init()
    del store  # not earlier: the others may still be reading from it


def _wait_for_launcher(timeout: float) -> None:
    """Wait until the launcher's server answers, without which Horovod aborts the process.

    Raises SettingError where no launcher has set its address, or no host has it; RankLost where none answers.
    """
    address = os.environ.get(f"{RENDEZVOUS}ADDR")
    if address is None or f"{RENDEZVOUS}PORT" not in os.environ:
        raise SettingError(
            f"HOROVOD_RANK={os.environ['HOROVOD_RANK']} without {RENDEZVOUS}ADDR and {RENDEZVOUS}PORT: horovodrun sets "
            "all of them; start the ranks by it or by torchrun"
        )
    port = number_of(os.environ, f"{RENDEZVOUS}PORT", range(1, 65_536))
    wait_for_address(address, port, timeout, RENDEZVOUS)


def _rendezvous(info: RankInfo, timeout: float) -> dist.Store:
    """Let ranks that torchrun, Slurm or MPI started meet on Horovod's rendezvous server, which rank 0 runs.

    Returns the store through which the ranks learn of that server; it has to live until all of them have.
    """
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    store = open_store(info, timeout, "horovod")
    store.set(str(info.rank), socket.gethostname())
    wait_for_all(store, info, timeout)
    hosts = [store.get(str(rank)).decode() for rank in range(info.size)]
    # Counted here: a launcher can start a machine's ranks in several parts.
    seats = [(host, hosts[:rank].count(host)) for rank, host in enumerate(hosts)]
    slots = []
    for rank, (host, local) in enumerate(seats):
        here = [other for name, other in seats if name == host]
        across = [name for name, other in seats if other == local]
        slots.append(SlotInfo(host, rank, local, across.index(host), info.size, len(here), len(across)))
    if info.rank == 0:
        server = RendezvousServer()
        store.set("port", str(server.start()))
        server.init(slots)
    mine = slots[info.rank]
    os.environ.update(
        HOROVOD_HOSTNAME=mine.hostname,
        HOROVOD_RANK=str(mine.rank),
        HOROVOD_SIZE=str(mine.size),
        HOROVOD_LOCAL_RANK=str(mine.local_rank),
        HOROVOD_LOCAL_SIZE=str(mine.local_size),
        HOROVOD_CROSS_RANK=str(mine.cross_rank),
        HOROVOD_CROSS_SIZE=str(mine.cross_size),
        HOROVOD_GLOO_RENDEZVOUS_ADDR=socket.gethostbyname(meeting_point(info)[0]),
        HOROVOD_GLOO_RENDEZVOUS_PORT=store.get("port").decode(),
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
    )
    return store
