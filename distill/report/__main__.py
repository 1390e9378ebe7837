"""The command `python -m distill.report RUN`: write the report of a finished run again, from what its folder holds."""

import sys
from pathlib import Path

from distill.report import report
from distill.runs.results_file import read_run
from distill.runtime.errors import SettingError
from distill.runtime.jsonl import read_lines
from distill.runtime.storage import storage_failure


def main() -> int:
    """Exit status: 0 done, 2 no finished run there, 74 storage that fails."""
    if len(sys.argv) != 2:
        print("usage: python -m distill.report RUN, the folder of a finished run", file=sys.stderr)
        return SettingError.status
    folder = Path(sys.argv[1])
    try:
        content = read_run(folder, "RUN")
        report.write(folder, content, read_lines(folder / "metrics.jsonl"), (folder / "config.yaml").read_text("utf-8"))
    except SettingError as error:
        print(f"distill: {error}", file=sys.stderr)
        return SettingError.status
    except OSError as error:
        failure = storage_failure(error)
        if failure is None:
            raise
        print(f"distill: {failure}", file=sys.stderr)
        return failure.status
    print(folder / "report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
