"""The command `distill report`: writes the report of a finished run again, from its folder."""

from pathlib import Path

from distill.commands.arguments import Arguments, LocalFile, parse
from distill.runtime.errors import Damaged, first_line

HELP = """
usage: distill report run=FOLDER

Write the report of a finished run again, from its folder: report.html, report.md and plots/.

  run=FOLDER       a run folder with results.json
"""


class ReportArguments(Arguments):
    """What the command takes."""

    run: LocalFile


def run(arguments: list[str]) -> None:
    """Write the report, and print where it is."""
    from distill.report import report
    from distill.runs.results_file import read_run
    from distill.runtime.jsonl import is_metrics, read_lines

    folder = parse(ReportArguments, arguments, "report").run
    record = read_run(folder, "run")
    report.write(folder, record, read_lines(folder / "metrics.jsonl", is_metrics), _text(folder / "config.yaml"))
    print(folder / "report.html")


def _text(path: Path) -> str:
    """Raises Damaged where the file is missing, or no text."""
    try:
        if path.exists() and not path.is_file():
            raise Damaged(path, "it is no file")
        return path.read_text("utf-8")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise Damaged(path, first_line(error)) from None
