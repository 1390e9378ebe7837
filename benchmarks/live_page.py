"""What the page of a run under way costs: processor time of a page, and steps with and without pages, in turns.

The real loop of the bundled recipe trains in this process. In every other turn no page is written and no metrics are
kept for it, as with `report.every=null`. Pages come every second here, so that their cost stands out of the noise; the
share at the default of 15 seconds follows from the processor time of a page.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import save, table, title

from distill import job
from distill.commands.cli import main as distill
from distill.config.watch import ReportConfig
from distill.report.live_run import RunPage


class InTurns(RunPage):
    """A page that is switched off in every other turn; it keeps the seconds of the steps of both kinds."""

    turn = 25  # steps
    made: "list[InTurns]" = []  # noqa: RUF012

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.pages: list[float] = []
        self.adding: list[float] = []
        self._taken, self._last = 0, time.perf_counter()
        InTurns.made.append(self)

    def add(self, metrics: dict[str, float]) -> None:
        began = time.perf_counter()
        self.seconds[self.on].append(began - self._last)
        super().add(metrics)
        if self.on:
            self.adding.append(time.perf_counter() - began)
        self._taken += 1
        if self._taken % self.turn == 0:
            self.on = not self.on
        self._last = time.perf_counter()

    def _refresh(self, *ending: Any) -> None:
        began = time.thread_time()
        super()._refresh(*ending)
        if self.on and self._begun:
            self.pages.append(time.thread_time() - began)


def measure(options: argparse.Namespace) -> InTurns:
    """A run whose page was on in every other turn."""
    InTurns.turn = options.turn
    job.RunPage = InTurns  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        size = [f"train.steps={options.steps}", "train.epochs=null", "evaluate=heldout", "evaluate.max_sequences=8"]
        pages = [f"report.every={options.every}", f"hydra.run.dir={folder}/run"]
        sys.argv = ["distill", f"+recipe={options.recipe}", *size, *options.settings, *pages]
        if status := distill():
            raise SystemExit(status)
    return InTurns.made[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="distilbert_gutenberg")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--turn", type=int, default=25, help="steps")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two pages")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    options = parser.parse_args()
    run = measure(options)
    # The first two turns touch memory for the first time.
    seconds = {on: times[options.turn :] for on, times in run.seconds.items()}
    rows, found = [], {}
    for name, of in (("median", statistics.median), ("mean", statistics.fmean)):
        on, off = of(seconds[True]), of(seconds[False])
        found[name] = {"on": on, "off": off, "overhead": on / off - 1}
        rows.append([name, f"{1000 * off:.2f}", f"{1000 * on:.2f}", f"{100 * (on / off - 1):+.2f} %"])
    page, added = statistics.fmean(run.pages), statistics.fmean(run.adding)
    default = ReportConfig().every or 0.0
    share = page / default + added / found["median"]["off"]
    found |= {"page": page, "added": added, "share": share, "pages": len(run.pages)}
    print(title(), f"\n{len(seconds[True])} and {len(seconds[False])} steps, {len(run.pages)} pages\n", sep="\n")
    print(table(["ms a step", "no page", f"a page every {options.every:g} s", "overhead"], rows))
    print(
        f"\nprocessor time of a page {1000 * page:.1f} ms, of a step's metrics {1e6 * added:.1f} us: "
        f"{share:.3%} of the time with a page every {default:g} s"
    )
    save(options.json, found)


if __name__ == "__main__":
    main()
