"""The command `distill report`: writes the report of a finished run again, from its folder."""

from dataclasses import dataclass
from pathlib import Path

from distill.commands.arguments import parse

HELP = """
usage: distill report run=FOLDER

Write the report of a finished run again, from its folder: report.html, report.md and plots/.

  run=FOLDER       a run folder with results.json
"""


@dataclass(frozen=True)
class ReportArguments:
    """What the command takes."""

    run: Path


def run(arguments: list[str]) -> None:
    """Write the report, and print where it is."""
    from distill.report import report
    from distill.runs.results_file import read_run
    from distill.runtime.jsonl import read_lines

    folder = parse(ReportArguments, arguments, "report").run
    record = read_run(folder, "run")
    report.write(folder, record, read_lines(folder / "metrics.jsonl"), (folder / "config.yaml").read_text("utf-8"))
    print(folder / "report.html")
