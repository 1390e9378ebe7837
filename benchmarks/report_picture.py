"""Pictures of pages that README and manual show: their tops, by a browser without a window.

    python benchmarks/report_picture.py runs/distilbert_gutenberg docs/images/distilbert_gutenberg.png
    python benchmarks/report_picture.py runs/distilbert_gutenberg-sweep docs/images/sweep.png

Needs Chromium or Chrome (Debian: apt-get install chromium). The colours are reduced to 64, which text and curves do not
show, and the file is refused when it is larger than 200 kB.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PAGES = ("report.html", "compare.html")
LARGEST = 200_000  # bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run, or of a sweep")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--height", type=int, default=1250)
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is here (Debian: apt-get install chromium)", file=sys.stderr)
        return 2
    page = next((each.resolve() for name in PAGES if (each := options.run / name).is_file()), None)
    if page is None:
        print(f"{options.run} has no {' or '.join(PAGES)}: give the folder of a finished run or sweep", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        size = f"--window-size={options.width},{options.height}"
        settings = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile", size]
        subprocess.run([browser, *settings, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True)
        Image.open(shot).convert("RGB").quantize(64).save(options.picture, optimize=True)
    written = options.picture.stat().st_size
    print(f"{options.picture}: {written / 1000:.0f} kB")
    return int(written > LARGEST)


if __name__ == "__main__":
    sys.exit(main())
