"""Run the examples of the manual's gallery, and put what came out into its pages: time, table, picture of the report.

    python benchmarks/tools/gallery.py RUNS --data FOLDER            # all pages; some start from the student of another
    python benchmarks/tools/gallery.py RUNS --data FOLDER --only smoke squad

The command of a page is the block of shell behind its line `<!-- run -->`. It runs as it stands in the folder RUNS,
where the names of `PLACES` are links to folders below FOLDER; what is finished is not run again. What is between
`<!-- measured -->` and `<!-- end -->` is written anew. Needs Chromium, as `report_picture.py` does.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

import distill
from distill.report.page import table_markdown
from distill.report.summary import comparison

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs/gallery"
# A run may start from the student of one before it.
ORDER = ["smoke", "distilbert_gutenberg_baseline", "distilbert_gutenberg", "mixture", "bert_pretrain", "gpt2_pretrain"]
ORDER += ["distilgpt2_gutenberg_baseline", "distilgpt2_gutenberg", "albert_pretrain", "distilalbert_gutenberg", "squad"]
ORDER += ["glue", "table", "search", "seeds", "distil_smollm2"]
PLACES = {
    "BOOKS": "gutenberg/train",
    "UNSEEN": "gutenberg/heldout",
    "WIKI": "wikitext-2-raw",
    "SQUAD": "squad",
    "GLUE": "glue/SST-2",
}
COMMAND = re.compile(r"<!-- run -->\n```sh\n(.+?)```", re.S)
MEASURED = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder in which the commands run")
    parser.add_argument("--data", type=Path, required=True, help=f"has {', '.join(PLACES.values())}")
    parser.add_argument("--only", nargs="+", choices=ORDER, help="pages; default: all")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    for name in [name for name in ORDER if name in (options.only or ORDER)]:
        print(name, flush=True)
        write(name, *run(name, options.runs, options.data.resolve()))
    return 0


def run(name: str, runs: Path, data: Path) -> tuple[Path, float]:
    """Run the example of a page, unless that is done; gives the folder of its run, sweep or chain, and its seconds."""
    match = COMMAND.search((PAGES / f"{name}.md").read_text())
    assert match, f"docs/gallery/{name}.md has no block of shell behind <!-- run -->"
    words = shlex.split(match[1].replace("\\\n", " "), comments=True)[1:]
    for place, path in PLACES.items():  # links, so that reports show the names that the page has
        if not (runs / place).is_symlink():
            (runs / place).symlink_to(data / path)
    taken = runs / f"{name}.seconds.json"  # a command that resumes would measure its last part alone
    if not taken.is_file():
        began = time.monotonic()
        command, environment = [sys.executable, "-m", "distill", *words], os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=runs, env=environment, check=True)
        taken.write_text(json.dumps(time.monotonic() - began))
    sweep = runs / f"runs/{name}-sweep"
    return (sweep if sweep.is_dir() else runs / "runs" / name), json.loads(taken.read_text())


def write(name: str, folder: Path, seconds: float) -> None:
    """Put time, machine, table and picture of a run into its page."""
    page, picture = PAGES / f"{name}.md", PAGES / f"images/{name}.png"
    picture.parent.mkdir(exist_ok=True)
    tool = ROOT / "benchmarks/tools/report_picture.py"
    subprocess.run([sys.executable, tool, folder, picture, "--height", "1000"], check=True)
    taken = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"
    lines = ["", f"It took {taken} on {machine()}, from the command to its end.", ""]
    if (folder / "results.json").is_file():
        lines += [table_markdown(comparison(distill.open_run(folder).record)), ""]
    lines += [f"![The top of the report of this run](images/{name}.png)", ""]
    page.write_text(MEASURED.sub(lambda match: match[1] + "\n".join(lines) + match[2], page.read_text()))


def machine() -> str:
    processor = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    kind = re.sub(r"\s+Processor$|\(R\)|\(TM\)", "", processor[1]) if processor else "an unnamed processor"
    return f"{os.cpu_count()} virtual cores ({kind}), torch {torch.__version__.partition('+')[0]}"


if __name__ == "__main__":
    sys.exit(main())
