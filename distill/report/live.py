"""A page that reloads itself while its run is under way, written in one step."""

import time
from collections.abc import Callable
from pathlib import Path

from distill.report import page
from distill.report.page import Renewal, Section

PAGE, STATE = "report.html", "progress.json"  # the latter is there until a run is finished, for other programs
RESTING = 60.0  # seconds between two looks at a page whose run has stopped: the same command may bring it back
SIGN = 'id="overdue"'  # is in such a page, and in no report


def write(
    path: Path,
    title: str,
    sections: list[Section],
    seconds: float,
    watched: bool = True,
    wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Write the page `path` in one step.

    Args:
        seconds, watched: how it reloads itself (`Renewal`).
        wanted: asked once the page is written, before it takes its name: storage may have taken long.

    Raises:
        OSError: storage that fails; what stood there before stays.
    """
    text = page.html(title, sections, Renewal(seconds, watched))
    new = path.with_name(f".{path.name}.live")  # not that of `atomic`, which the report itself may use at the same time
    new.write_text(text, encoding="utf-8")
    if wanted():
        new.replace(path)
    else:
        new.unlink()


def clock(now: float | None = None) -> str:
    """A moment, by default this one, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
