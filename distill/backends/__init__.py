"""The ranks of a run: one process, torch.distributed, or Horovod, behind the interface `Workers`."""

from distill.backends.place import find_place
from distill.backends.rings import parse_rings
from distill.backends.workers import RankLost, Workers
from distill.config import Backend
from distill.errors import SettingError

__all__ = ["RankLost", "Workers", "build"]


def build(settings: Backend) -> Workers:
    """Join the ranks of this run. Raises SettingError for what the chosen backend cannot do."""
    _check(settings)
    if settings.name == "single":
        from distill.backends.single import Single

        return Single(settings)
    if settings.name == "ddp":
        from distill.backends.ddp import Ddp

        return Ddp(settings)
    if settings.name == "horovod":
        from distill.backends.horovod import Horovod

        return Horovod(settings)
    raise SettingError(f"backend.name={settings.name}: choose single, ddp or horovod")


def _check(settings: Backend) -> None:
    parse_rings(settings.rings)
    if settings.sync not in ("window", "every"):
        raise SettingError(f"backend.sync={settings.sync}: choose window or every")
    if settings.compression not in ("none", "bf16"):
        raise SettingError(f"backend.compression={settings.compression}: choose none or bf16")
    if not settings.timeout > 0:
        raise SettingError(f"backend.timeout={settings.timeout}: give a number of seconds above 0")
    place = find_place()
    if place and settings.processes not in (None, place.size) and not settings.hosts:
        raise SettingError(
            f"backend.processes={settings.processes}: {place.launcher} started {place.size} processes; leave it out"
        )
