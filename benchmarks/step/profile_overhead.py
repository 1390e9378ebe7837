"""What a profile costs: steps with and without one, in turns of a second or two within one run.

The real loop of the bundled recipe trains in this process. In every other turn nothing is timed and nothing sampled,
as with `profile=off`; the traced steps, of which a run has two, are left out.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import save, table, title
from distill.commands.cli import main as distill
from distill.runs import profiling
from distill.runs.profile.phases import OTHER
from distill.runs.profile.recorder import Recorder
from distill.runs.profile.sampler import INTERVAL, Sampler


class InTurns(Recorder):
    """A recorder that is switched off in every other turn; it keeps the seconds of the steps of both kinds."""

    turn = 25  # steps

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.on, self._turns = True, 0
        self._last, self._taken = time.perf_counter(), 0

    def watch(self, prepare: Callable[[int], Any]) -> Callable[[int], Any]:
        timed = super().watch(prepare)
        return lambda step: timed(step) if self.on else prepare(step)

    def enter(self, phase: str) -> str:
        return super().enter(phase) if self.on else OTHER

    def end_step(self) -> bool:
        if self.on:
            super().end_step()
        self.seconds[self.on].append(time.perf_counter() - self._last)
        self._taken += 1
        if self._taken == self.turn:
            self._switch()
        self._last = time.perf_counter()
        return False

    def _switch(self) -> None:
        """Begin the next turn, with a thread that samples or without one."""
        self._taken, self.on = 0, not self.on
        if self.on:
            self._sampler = Sampler(INTERVAL, self._rank.device)
            self._sampler.start()
        else:
            self._sampler.stop()

    def __exit__(self, *error: Any) -> None:
        if not self.on:
            self._switch()
        super().__exit__(*error)


def measure(options: argparse.Namespace) -> dict[bool, list[float]]:
    """Seconds of the steps with a profile (True) and without."""
    made: list[InTurns] = []

    @contextlib.contextmanager
    def recorder(config: Any, path: Path, batches: Any, ranks: Any) -> Iterator[InTurns]:
        settings = config.profile.changed(trace_steps=0)
        with InTurns(settings, path, batches.step_shape.micro_batches, ranks) as each:
            made.append(each)
            yield each

    profiling.recorder = recorder
    InTurns.turn = options.turn
    with tempfile.TemporaryDirectory() as folder:
        size = [f"train.steps={options.steps}", "train.epochs=null", "evaluate=heldout", "evaluate.max_sequences=8"]
        sys.argv = ["distill", f"+recipe={options.recipe}", *size, *options.settings, f"hydra.run.dir={folder}/run"]
        if status := distill():
            raise SystemExit(status)
    # The first two turns touch memory for the first time; the steps after a switch are like any others.
    return {on: times[options.turn :] for on, times in made[0].seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="distilbert_gutenberg")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--turn", type=int, default=25, help="steps")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    options = parser.parse_args()
    seconds = measure(options)
    rows, found = [], {}
    for name, of in (("median", statistics.median), ("mean", statistics.fmean)):
        on, off = of(seconds[True]), of(seconds[False])
        found[name] = {"on": on, "off": off, "overhead": on / off - 1}
        rows.append([name, f"{1000 * off:.2f}", f"{1000 * on:.2f}", f"{100 * (on / off - 1):+.2f} %"])
    print(title(), f"\n{len(seconds[True])} and {len(seconds[False])} steps\n", sep="\n")
    print(table(["ms a step", "profile=off", "profile=on", "overhead"], rows))
    save(options.json, found | {"seconds": json.loads(json.dumps({str(on): of for on, of in seconds.items()}))})


if __name__ == "__main__":
    main()
