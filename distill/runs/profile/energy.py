"""The energy of processors, as Linux counts it in /sys/class/powercap (RAPL of Intel and AMD)."""

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


class Processors:
    """The energy of all processors of this host since this object was made; a counter that begins anew is followed.

    Attributes:
        note: why nothing is known, in a sentence; empty where it is.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        # `intel-rapl:0` is a processor; `intel-rapl:0:1` is a part of it, and counted there.
        found = sorted(path for path in folder.glob("*-rapl:*") if path.name.count(":") == 1)
        self._counters = [path for path in found if _read(path / "energy_uj") is not None]
        self._before = [_read(path / "energy_uj") or 0 for path in self._counters]
        self._joules = 0.0
        self.note = "" if self._counters else "this machine does not say what energy its processors take"
        if found and not self._counters:
            self.note = f"the energy of the processors may not be read here ({found[0]}/energy_uj)"

    def joules(self) -> float | None:
        """Since the beginning; None where it is not known. To be called more often than once in a few minutes."""
        if not self._counters:
            return None
        for number, path in enumerate(self._counters):
            now = _read(path / "energy_uj")
            if now is None:
                continue
            grown = now - self._before[number]
            if grown < 0:  # the counter has begun anew
                grown += _read(path / "max_energy_range_uj") or 0
            self._joules += max(grown, 0) / 1e6
            self._before[number] = now
        return self._joules


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
