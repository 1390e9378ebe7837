"""One process: nothing to exchange."""

from distill.backends.devices import choose_device
from distill.backends.place import Place, find_place
from distill.backends.workers import Workers
from distill.config import Backend
from distill.errors import SettingError


class Single(Workers):
    """The interface for a run of one process; it never communicates."""

    name = "single"
    engine = "none"

    def __init__(self, settings: Backend) -> None:
        place = find_place()
        if place and place.size > 1:
            raise SettingError(
                f"backend.name=single: {place.launcher} started {place.size} processes; choose backend=ddp or horovod"
            )
        for name, value in (("processes", settings.processes), ("hosts", settings.hosts)):
            if value not in (None, 1):
                raise SettingError(f"backend.{name}={value}: `single` is one process; choose backend=ddp or horovod")
        for name, value, plain in (
            ("rings", settings.rings, ("1", "auto")),
            ("compression", settings.compression, ("none",)),
        ):
            if value not in plain:
                raise SettingError(f"backend.{name}={value}: one process exchanges nothing; leave it at {plain[0]}")
        super().__init__(settings, Place("", 0, 1, 0, 1), choose_device(settings, 0, 1))
