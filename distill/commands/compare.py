"""The command `distill compare`: lays runs side by side, settings that differ against results."""

from pathlib import Path

from distill.commands.arguments import Arguments, LocalFile, parse
from distill.config.model import LocalPath
from distill.report.comparison.from_python import ComparedRuns
from distill.report.comparison.runs import find_runs
from distill.report.comparison.write import HTML
from distill.report.page import is_written_here

FOLDER = Path("compare")  # the default output of runs that are not one sweep
HELP = """
usage: distill compare run=FOLDER [run=FOLDER ...] [by=NAME] [output=FOLDER] [overwrite=true]

Lay runs side by side: the settings in which they differ against their scores, sizes, speeds and times. Runs that differ
in their seed alone become one line, with the mean and the range.

  run=FOLDER       a run folder, a folder of runs or of a sweep, or a pattern such as 'run=runs/mine-*'; given again for
                   each further one, or as run=[A,B]
  by=NAME          the number to begin with and to order by, such as perplexity or heldout.perplexity
  output=FOLDER    gets compare.html, compare.md, compare.csv and plots/ (default: the sweep's own folder where run is
                   one sweep, else compare/)
  overwrite=true   replace files of these names that another program wrote

  distill compare run=runs/distilbert_gutenberg-sweep
  distill compare run=runs/first run=runs/second by=heldout.perplexity
"""


class CompareArguments(Arguments):
    """What the command takes."""

    run: list[LocalPath]
    by: str | None = None
    output: LocalFile | None = None
    overwrite: bool = False


def run(arguments: list[str]) -> None:
    """Compare the runs, write the page, and print the tables and where it is."""
    options = parse(CompareArguments, arguments, "compare")
    compared = ComparedRuns(find_runs(options.run), options.by, "by")
    only = Path(options.run[0]).expanduser()
    folder = only if len(options.run) == 1 and is_written_here(only / HTML) else FOLDER
    print(f"{compared}\nComparison: {compared.write(options.output or folder, overwrite=options.overwrite)}")
