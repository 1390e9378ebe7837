"""torch.distributed with models that are sharded over the ranks (`fully_shard`, FSDP2)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distill.config.settings import BackendConfig
from distill.distributed.ddp import Ddp
from distill.distributed.gradient_sync import GradientSync
from distill.distributed.ranks import Ranks, naming_lost_rank_inside
from distill.distributed.shard import compute_in, is_root, is_sharded, local, reshard, shard
from distill.runtime.errors import SettingError


class Fsdp(Ddp):
    """The interface where parameters, gradients and the optimizer's state are sharded over the ranks.

    See `ShardedSync` for the gradients.
    """

    name = "fsdp"

    def __init__(self, settings: BackendConfig) -> None:
        self._lockstep: Lockstep | None = None
        super().__init__(settings)
        if settings.offload_teacher and self.device.type == "cpu":
            raise SettingError(
                "backend.offload_teacher=true with backend.device=cpu: the parts of a teacher lie in the memory of the "
                "host already; leave it out"
            )
        if self.size == 1:
            engine = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(engine, store=dist.HashStore(), rank=0, world_size=1)
        self.mesh = self._make_mesh(settings.shard_size or self.size)
        self.shards_student, self.shards_teacher = settings.shards_student, settings.shards_teacher
        self._offloads = settings.offload_teacher
        self.equal_windows = self.shards

    def _make_mesh(self, shard_size: int) -> DeviceMesh:
        """Of all ranks; of groups of `shard_size` of them, each of which has all weights, where that is fewer.

        The ranks of a host then exchange weights among themselves, and hosts exchange gradients alone (HSDP).
        """
        if self.size % shard_size:
            problem, cure = f"for {self.size} ranks", "give a number that divides them, such as the GPUs of a host"
            raise SettingError(problem, setting="backend.shard_size", value=shard_size, cure=cure)
        if shard_size == self.size:
            mesh = init_device_mesh(self.device.type, (self.size,))
        else:
            shape = (self.size // shard_size, shard_size)
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        for group in mesh.get_all_groups():  # a mesh makes them with torch's own timeout
            _set_pg_timeout(timedelta(seconds=self.settings.timeout), group)
        return mesh

    def shard(self, model: nn.Module, blocks: Sequence[nn.Module], calls: int, trained: bool) -> None:
        # What is trained is stored in fp32, what is frozen as it was saved.
        storage = torch.float32 if trained else None
        shard(model, blocks, calls, self.mesh, storage, not trained and self._offloads)

    def place(self, model: Any, dtype: torch.dtype) -> Any:
        if not is_sharded(model):
            return super().place(model, dtype)
        compute_in(model, dtype)
        return model

    @contextmanager
    def computing(self) -> Iterator[None]:
        with naming_lost_rank_inside():
            yield

    @contextmanager
    def in_lockstep(self, models: Sequence[nn.Module], idle: Callable[[Any], object]) -> Iterator[None]:
        sharded = [root for model in models for root in roots(model)]
        if not sharded or self.size == 1 or self._lockstep is not None:
            yield
            return
        self._lockstep = Lockstep(sharded, idle)
        try:
            with self.computing(), self._lockstep:
                yield
        finally:
            self._lockstep = None
            for model in sharded:
                reshard(model)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if self._lockstep is not None:
            self._lockstep.drain()
        with super().waiting():
            yield

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.size == 1:  # nobody waits for it, and the next run of this process joins anew
            self.close()
        else:
            super().__exit__(kind, error, trace)

    def close(self) -> None:
        if self.size > 1:
            super().close()
        else:
            dist.destroy_process_group()


class ShardedSync(GradientSync):
    """The gradients of a model whose parameters may be sharded over the ranks.

    Those of sharded parameters are added up whole on each rank until the last micro-batch of a window, whose backward
    pass reduces and scatters them, once for each sharded module. With `sync=every` each micro-batch does so: more
    exchanges, and no whole gradients in memory. Parameters that are not sharded (projections of loss terms, a student
    that stays whole) are in the bucket, as with `ddp`, and ride with the stats in one all-reduce.
    """

    def __init__(self, ranks: Ranks, model: nn.Module) -> None:
        """As for all ranks; parameters that are sharded have to be the same model's on all ranks already."""
        reshard(model)  # forward passes of checks have made weights whole
        self._sharded = [
            weight for weight in model.parameters() if isinstance(weight, DTensor) and weight.requires_grad
        ]
        self._roots: list[FSDPModule] = roots(model)  # type: ignore[assignment]
        super().__init__(ranks, model)

    def _plain_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]

    def zero(self) -> None:
        super().zero()
        for parameter in self._sharded:
            parameter.grad = None

    @contextmanager
    def micro_batch(self, last: bool, overlap: bool = True) -> Iterator[None]:
        if not self._roots:  # a student that stays whole, whose gradients all are in the bucket
            with super().micro_batch(last, overlap):
                yield
            return
        every = self.ranks.settings.sync == "every"
        for root in self._roots:
            root.set_requires_gradient_sync(last or every)
        self._bucket.on_completion(None)
        yield
        self.ranks.traffic.num_syncs += every and not last

    def all_reduce_gradients(self, stats: Tensor | None = None) -> Tensor | None:
        """As for all ranks: what is sharded was summed by the last backward, all else is summed here."""
        for parameter in self._sharded:
            if parameter.grad is None:  # of a part that no micro-batch touched
                parameter.grad = torch.zeros_like(parameter)
        return super().all_reduce_gradients(stats)

    def scale(self, factor: float) -> None:
        super().scale(factor)
        for parameter in self._sharded:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)


class Lockstep:
    """While it is open every call of some modules is announced to all ranks, and made by all of them together.

    A forward of a sharded model needs all ranks, each of which gives its part of the weights. In scoring ranks have
    different numbers of batches: one that has no more computes an idle forward whenever another one still computes.
    All ranks open it with the same modules. Where two of them announce different ones the module with the higher number
    is called first, idly by those that did not mean it. `drain` serves the calls of others until nobody has any; it
    has to come before any other exchange between the ranks.
    """

    def __init__(self, modules: Sequence[nn.Module], idle: Callable[[nn.Module], object]) -> None:
        """`idle` calls one of them; its outcome is not used."""
        self._modules, self._idle = modules, idle
        self._announces = True

    def __enter__(self) -> Self:
        self._hooks = [
            module.register_forward_pre_hook(self._hook(number), prepend=True)
            for number, module in enumerate(self._modules, 1)
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # What is refused inside `Ranks.agree` all say together; after another error they wait for this rank in vain.
        if error is None or isinstance(error, SettingError):
            self.drain()
        for hook in self._hooks:
            hook.remove()

    def drain(self) -> None:
        """Make idle calls until no rank has one of its own to make."""
        self._announce(0)

    def _hook(self, number: int) -> Callable[..., None]:
        def before_call(_: nn.Module, __: Any) -> None:
            if self._announces:
                self._announce(number)

        return before_call

    def _announce(self, number: int) -> None:
        """Return when it is the turn of this number, after idle calls of the modules that others have to call."""
        while (first := _largest(number)) != number:
            self._announces = False
            with torch.no_grad():
                self._idle(self._modules[first - 1])
            self._announces = True


def roots(model: nn.Module) -> list[nn.Module]:
    """The sharded models in `model`, which may be itself: the outermost of its sharded modules."""
    if is_root(model):
        return [model]
    return [root for child in model.children() for root in roots(child)]


def _largest(number: int) -> int:
    """The largest of the ranks' numbers."""
    largest = torch.tensor(number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
