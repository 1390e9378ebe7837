"""A browser without a window, where one is installed: how a page looks and behaves, for tests."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
FLAGS += ["--allow-file-access-from-files"]  # lets the page that has the frame look into it
DARK = "--blink-settings=preferredColorScheme=0"
# Chromium makes no window as narrow as a telephone's, but a frame can be. What is found stands in an attribute.
FRAME = """<!DOCTYPE html><meta charset="utf-8"/><title>frame</title><body>
<iframe id="frame" width="WIDTH" height="700"></iframe><script>
var frame = document.getElementById("frame"), loads = 0, found = {};
frame.onload = function () {
  var page = frame.contentWindow, root = page.document.documentElement;
  loads += 1;
  found.loads = loads;
  found.inner = page.innerWidth;
  found.scroll = Math.max(root.scrollWidth, page.document.body.scrollWidth);
  found.top = page.scrollY;
  found.dark = page.matchMedia("(prefers-color-scheme: dark)").matches;
  found.paper = page.getComputedStyle(page.document.body).backgroundColor;
  ON_LOAD
};
setInterval(function () {
  if (frame.contentWindow.document.body) found.text = frame.contentWindow.document.body.innerText;
  document.body.setAttribute("data-found", JSON.stringify(found));
}, 100);
frame.src = "PAGE";
</script></body>"""


def look(page: Path, width: int, on_load: str = "", seconds: float = 1.5, dark: bool = False) -> dict[str, Any]:
    """What a browser finds of a page in a frame of so many pixels.

    Args:
        on_load: script that runs whenever the page has been loaded; `page` is its window, `loads` how often.
        seconds: of the page's own clock after which the browser looks.

    Returns:
        `inner` and `scroll` (widths of the window and of what is in it), `text`, `loads`, `top`, `dark` and `paper`.
    """
    assert BROWSER is not None
    frame = page.with_name(f"frame-{page.name}")
    text = FRAME.replace("WIDTH", str(width)).replace("ON_LOAD", on_load).replace("PAGE", page.name)
    frame.write_text(text, encoding="utf-8")
    profile = f"--user-data-dir={page.parent / 'profile-of-browser'}"
    budget = f"--virtual-time-budget={round(1000 * seconds)}"
    flags = [*FLAGS, *[DARK] * dark, profile, budget, "--window-size=1400,800"]
    done = subprocess.run([BROWSER, *flags, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=500)
    match = re.search(r'data-found="([^"]*)"', done.stdout)
    assert match, (done.stdout[-1000:], done.stderr[-1000:])
    return dict(json.loads(unescape(match[1])))
