"""The ranks of a run: one process, torch.distributed, or Horovod, behind the interface `Backend`."""

import os

from distill.config.settings import BackendConfig
from distill.distributed.collective import check_collective
from distill.distributed.interface import WIRE, Backend, RankLost
from distill.distributed.rank import BY_TORCHRUN, rank_from_env
from distill.distributed.rings import parse_rings
from distill.runtime.errors import SettingError

__all__ = ["Backend", "RankLost", "build"]


def build(settings: BackendConfig) -> Backend:
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
    if settings.name == "horovod":
        from distill.distributed.horovod import Horovod

        return Horovod(settings)
    raise SettingError(f"backend.name={settings.name}: choose single, ddp, fsdp or horovod")


def _check(settings: BackendConfig) -> None:
    parse_rings(settings.rings)
    check_collective(settings)
    if settings.sync not in ("window", "every"):
        raise SettingError(f"backend.sync={settings.sync}: choose window or every")
    if settings.compression not in ("none", *WIRE):
        raise SettingError(f"backend.compression={settings.compression}: choose none, {' or '.join(WIRE)}")
    if not settings.timeout > 0:
        raise SettingError(f"backend.timeout={settings.timeout}: give a number of seconds above 0")
    info = rank_from_env()
    if info and settings.processes not in (None, info.size) and not settings.hosts:
        raise SettingError(
            f"backend.processes={settings.processes}: {info.launcher} started {info.size} processes; leave it out"
        )
    if info and settings.elastic and (info.launcher != "torchrun" or BY_TORCHRUN in os.environ):
        raise SettingError(
            f"backend.elastic={settings.elastic}: {info.launcher} started the ranks, and starts them again or not; "
            "leave it out (torchrun has --nnodes=MIN:MAX)"
        )
