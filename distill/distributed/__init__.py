"""The ranks of a run: one process, torch.distributed, or Horovod, behind the interface `Ranks`."""

from torch import nn

from distill.config.settings import BackendConfig
from distill.distributed.gradient_sync import GradientSync
from distill.distributed.ranks import RankLost, Ranks
from distill.runtime.errors import SettingError
from distill.runtime.rank import rank_from_env

__all__ = ["GradientSync", "RankLost", "Ranks", "gradient_sync", "join_ranks"]


def join_ranks(settings: BackendConfig) -> Ranks:
    """Join the ranks of this run. Raises SettingError for what the chosen backend cannot do."""
    _check(settings)
    if settings.name == "single":
        from distill.distributed.single import Single

        return Single(settings)
    if settings.name == "ddp":
        from distill.distributed.ddp import Ddp

        return Ddp(settings)
    if settings.name == "fsdp":
        from distill.distributed.fsdp import Fsdp

        return Fsdp(settings)
    from distill.distributed.horovod import Horovod

    return Horovod(settings)


def gradient_sync(ranks: Ranks, model: nn.Module) -> GradientSync:
    """The gradients of `model`, and how they are summed over the ranks; all ranks make it (see `GradientSync`)."""
    if ranks.name == "fsdp":
        from distill.distributed.fsdp import ShardedSync

        return ShardedSync(ranks, model)
    return GradientSync(ranks, model)


def _check(settings: BackendConfig) -> None:
    info = rank_from_env()
    if info and settings.processes not in (None, info.size) and not settings.hosts:
        raise SettingError(
            f"backend.processes={settings.processes}: {info.launcher} started {info.size} processes; leave it out"
        )
