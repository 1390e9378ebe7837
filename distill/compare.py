"""The command `python -m distill.compare RUNS...`: lay runs side by side, settings that differ against results."""

import argparse
import sys
from pathlib import Path

from distill.comparison.from_python import compare_runs
from distill.comparison.runs import is_sweep
from distill.errors import SettingError
from distill.storage import storage_failure

FOLDER = Path("compare")  # what is written to where neither --output nor a sweep says otherwise


def main(arguments: list[str]) -> int:
    """Exit status: 0 done, 2 bad input, 74 storage that fails."""
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
    try:
        compared = compare_runs(*given.runs, by=given.by)
        only = Path(given.runs[0]).expanduser()
        folder = (given.output and given.output.expanduser()) or (
            only if len(given.runs) == 1 and is_sweep(only) else FOLDER
        )
        page = compared.write(folder)
    except SettingError as error:
        print(f"distill: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        failure = storage_failure(error)
        if failure is None:
            raise
        print(f"distill: {failure}", file=sys.stderr)
        return failure.status
    print(f"{compared}\nComparison: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
