"""One process: nothing to exchange."""

from distill.config.settings import BackendConfig
from distill.distributed.devices import choose_device
from distill.distributed.ranks import Ranks
from distill.runtime.errors import SettingError
from distill.runtime.rank import RankInfo, rank_from_env


class Single(Ranks):
    """The interface for a run of one process; it never communicates."""

    name = "single"
    engine = "none"

    def __init__(self, settings: BackendConfig) -> None:
        info = rank_from_env()
        if info and info.size > 1:
            raise SettingError(
                f"backend.name=single: {info.launcher} started {info.size} processes; choose backend=ddp or horovod"
            )
        for name, value in (("processes", settings.processes), ("hosts", settings.hosts)):
            if value not in (None, 1):
                raise SettingError(
                    f"backend.{name}={value}: `single` is one process; choose backend=ddp, fsdp or horovod"
                )
        for name, value, plain in (
            ("rings", settings.rings, (1,)),
            ("compression", settings.compression, ("none",)),
            ("sync", settings.sync, ("window",)),
        ):
            if value not in plain:
                raise SettingError(f"backend.{name}={value}: one process exchanges nothing; leave it at {plain[0]}")
        super().__init__(settings, RankInfo("", 0, 1, 0, 1), choose_device(settings, 0, 1))
