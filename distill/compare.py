"""The command `python -m distill.compare RUNS...`: lay runs side by side, settings that differ against results."""

import argparse
import sys
from pathlib import Path

from distill.commands.ending import status_of
from distill.report.comparison.from_python import ComparedRuns
from distill.report.comparison.runs import find_runs, is_sweep

FOLDER = Path("compare")  # what is written to where neither --output nor a sweep says otherwise


def main(arguments: list[str]) -> int:
    """Exit status: 0 done, 2 bad input, 74 storage, 128 + a signal; else a bug."""
    parser = argparse.ArgumentParser(
        prog="python -m distill.compare",
        description="Lay runs side by side: the settings in which they differ against their scores, sizes, speeds and "
        "times. Runs that differ in their seed alone become one line, with the mean and the range.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run folders, folders of runs or of a sweep, or globs")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="for compare.html, compare.md, compare.csv and plots/ (default: the sweep's own folder where RUNS is one "
        f"sweep, else {FOLDER}/)",
    )
    parser.add_argument(
        "--by",
        metavar="NAME",
        help="the number to begin with and to order by, such as perplexity or heldout.perplexity",
    )
    given = parser.parse_args(arguments)
    return status_of(lambda: lay_side_by_side(given.runs, given.by, given.output))


def lay_side_by_side(runs: list[str], by: str | None, output: Path | None) -> None:
    """Compare these runs, write the page, and print the tables and where it is."""
    compared = ComparedRuns(find_runs(runs), by, "--by")
    only = Path(runs[0]).expanduser()
    own = only if len(runs) == 1 and is_sweep(only) else FOLDER
    page = compared.write(own if output is None else output.expanduser())
    print(f"{compared}\nComparison: {page}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
