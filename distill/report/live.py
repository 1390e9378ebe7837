"""A page that renews itself, from a file alone: what its head holds, and how it is written in one step."""

import time
from collections.abc import Callable
from pathlib import Path

from distill.report import page
from distill.report.page import Section

PAGE, STATE = "report.html", "progress.json"  # the latter is there until a run is finished, for other programs
RESTING = 60.0  # seconds between two looks at a page whose run has stopped: the same command may bring it back

# Written without the characters that XML would have escaped, so that a page can be read by any parser. A page that is
# open twice shares its memory, which does no harm. `since` is when something new was seen last: by the clock of the
# reader once a change was seen, because the host that writes may have another one; before that by the page's own time.
SCRIPT = """
(function () {
  var every = EVERY, written = WRITTEN, limit = LIMIT, began = Date.now();
  var key = "distill " + location.pathname, state = {};
  try { state = JSON.parse(sessionStorage.getItem(key)) || {}; } catch (error) { }
  if (state.written !== written) {
    state.changed = state.written > 0;
    state.seen = began;
    state.written = written;
  }
  var since = state.changed ? state.seen : Math.min(state.seen, written);
  function folded() { return [].slice.call(document.querySelectorAll("details")); }
  function title(each) { return each.querySelector("summary").textContent; }
  function keep() {
    state.x = scrollX;
    state.y = scrollY;
    state.open = {};
    folded().forEach(function (each) { state.open[title(each)] = each.open; });
    try { sessionStorage.setItem(key, JSON.stringify(state)); } catch (error) { }
  }
  function restore() {
    folded().forEach(function (each) {
      if (state.open) { if (title(each) in state.open) { each.open = state.open[title(each)]; } }
    });
    if (state.y > 0) { scrollTo(state.x || 0, state.y); }
    look();
  }
  function look() {
    var now = Date.now(), notice = document.getElementById("overdue");
    if (limit > 0) { if (now - since > limit) { if (notice) { if (notice.hidden) {
      notice.textContent = "No news since " + new Date(since).toLocaleString() + ": the run may have ended without a " +
        "word, as by a kill or a lost machine. If it has, the same command goes on.";
      notice.hidden = false;
    } } } }
    if (now - began >= every) {
      if (!document.hidden) { if (String(getSelection()) === "") { keep(); location.reload(); } }
    }
  }
  document.addEventListener("DOMContentLoaded", restore);
  window.addEventListener("pagehide", keep);
  setInterval(look, 1000);
})();
"""
OVERDUE = '<p class="notice" id="overdue" role="status" hidden="hidden"></p>'


def head(seconds: float, watched: bool = True) -> str:
    """Elements for the head of an HTML page that a process writes anew every so many seconds.

    The page loads itself again, also from a file and without a server. It stays where the reader has scrolled, keeps
    open what was opened, and waits while text is selected or the page is not to be seen. When nothing new has come for
    three times as long and half a minute, an element `OVERDUE` of the body, where there is one, says so.

    Args:
        watched: whether something new is to be expected; otherwise nothing is said about its absence.
    """
    limit = round(1000 * (3 * seconds + 30)) if watched else 0
    values = {"EVERY": round(1000 * seconds), "WRITTEN": round(1000 * time.time()), "LIMIT": limit}
    script = SCRIPT
    for name, value in values.items():
        script = script.replace(name, str(value), 1)
    refresh = f'<noscript><meta http-equiv="refresh" content="{max(1, round(seconds))}"/></noscript>'
    return f"{refresh}\n<script>{script}</script>\n"


def write(
    path: Path,
    title: str,
    sections: list[Section],
    seconds: float,
    watched: bool = True,
    wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Write the page `path` in one step; the arguments are those of `head` and of `distill.report.page.html`.

    Args:
        wanted: whether the page is to take its name after all, once it is written: storage may have taken long.

    Raises:
        OSError: storage that fails; what stood there before stays.
    """
    text = page.html(title, sections, head(seconds, watched), OVERDUE)
    new = path.with_name(f".{path.name}.live")  # not that of `atomic`, which the report itself may use at the same time
    new.write_text(text, encoding="utf-8")
    if wanted():
        new.replace(path)
    else:
        new.unlink()


def clock(now: float | None = None) -> str:
    """A moment, by default this one, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
