"""What a chain leaves: its page, with the state of each run, and a table of its models (size, speed, every score)."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self
from urllib.parse import quote

from markupsafe import Markup

from distill.report import page
from distill.report.comparison.runs import is_run, last_step, read_run
from distill.report.live import PAGE, RESTING, Renewer, clock
from distill.report.page import Block, Section, Table, render
from distill.report.words import NONE, count_of, number, short, time_of
from distill.runs.record import Record
from distill.runtime.errors import first_line
from distill.runtime.files import write_text
from distill.runtime.progress import duration, in_a_sentence
from distill.runtime.redaction import redact

FILES = ("chain.md", "chain.json")
NOTE = "With several seeds: the median (lowest to highest). Percentages are relative to the first line."
MAX_SCORES = 4  # of a run, beside its state
Runs = list[Record]  # the records of a stage, one for each seed


class ChainPage:
    """Keeps report.html of a chain up to date while its runs are made; a context manager, which writes what ends them.

    A thread writes the page; it neither delays the runs nor ends them.
    """

    def __init__(self, folder: Path, runs: list[Path], every: float = RESTING) -> None:
        """`runs`: their folders, below `folder`; `every`: seconds between two pages."""
        self.folder, self.runs = folder, runs
        self._current: Path | None = None  # the run that is made now
        self._results: list[Block] = []
        self._ended: str | None = None
        self._began = time.time()
        self._renewer = Renewer(folder / PAGE, every, self._draw)

    def __enter__(self) -> Self:
        self._renewer.draw()
        self._renewer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewer.stop():
            self._current, self._ended = None, "" if error is None else redact(first_line(error))
            self._renewer.draw()

    def start(self, run: Path) -> None:
        """This run is made from now on."""
        self._current = run

    def end_with(self, blocks: list[Block]) -> None:
        """What the page ends with, once all runs have ended."""
        self._results = blocks

    def _draw(self) -> None:
        rows = [state_of(run, self.folder, run == self._current) for run in self.runs]
        num_finished = sum(row[1].startswith("finished") for row in rows)
        state = f"Under way for {duration(time.time() - self._began)}."
        if self._ended is not None:
            state = f"Stopped: {self._ended}." if self._ended else "All jobs are finished."
        opening = f"{num_finished} of {len(rows)} jobs are finished. {state} Written {clock()}."
        table = Table(["Job", "State", "Scores of the student"], rows, text=True)
        title, parts = f"{self.folder.name}: a chain", [Section("", [opening]), Section("Jobs", [table])]
        if self._ended != "":
            self._renewer.write(title, parts, rests=self._ended is not None)
            return
        write_text(self.folder / PAGE, page.html(title, [*parts, Section("Results", self._results)]))


def state_of(run: Path, folder: Path, is_current: bool) -> list[str]:
    """Name of a run (a link to its page, where there is one), its state, and the first scores of its student."""
    name = str(run.relative_to(folder))
    if (run / PAGE).is_file():
        name = Markup('<a href="{}">{}</a>').format(quote(os.path.relpath(run / PAGE, folder)), name)
    if not is_run(run):
        return [name, "under way" if is_current else "waiting", NONE]
    read = read_run(run)
    if read.record is None or is_current:
        return [name, f"under way, {last_step(run)}" if is_current else read.status, NONE]
    training = read.record.training
    took = " in ".join(filter(None, [count_of(training.steps, "step"), time_of(training.seconds)]))
    scores = [of for of in read.numbers.values() if of.measure in read.record.measures and of.value is not None]
    shown = [f"{in_a_sentence(of.group)} {of.label} {number(of.value)}" for of in scores[:MAX_SCORES]]
    more = ["..."] * (len(scores) > MAX_SCORES)
    return [name, ": ".join(filter(None, ["finished", took])), ", ".join([*shown, *more]) or NONE]


def write(path: Path, results: dict[str, list[Runs]], anchors: list[str]) -> tuple[str, list[Block]]:
    """Write chain.md and chain.json into the folder; return the text of chain.md, and the same for an HTML page.

    Args:
        results: of the stages that score each model; the first model is what the others are compared with.
    """
    # Of a measure and set that several stages have, the scores of the last one.
    scores = {model: {name: of for runs in stages for name, of in _scores(runs)} for model, stages in results.items()}
    tables = [_table(results, scores)] if results else []
    shown = [render("table.md", table=table).rstrip() for table in tables]
    text = "\n\n".join([*shown, *anchors]) + "\n"
    for name, content in zip(FILES, (text, json.dumps({"models": scores}, indent=1)), strict=True):
        write_text(path / name, content)
    return text, [*tables, *anchors, "chain.md has this table as text."]


def _scores(runs: Runs) -> Iterator[tuple[str, list[float]]]:
    """By measure and set every score of the students, of each seed that has it.

    A set is called what it holds where stages share the name, such as `dev` of SQuAD and of GLUE.
    """
    for name, measure in runs[0].measures.items():
        for data in runs[0].student.scores.get(name, {}):
            of_set = runs[0].evaluation.get(data)
            holds = ((of_set and of_set.description) or "").partition(" of ")[2].partition(";")[0]
            values = [run.student.score(name, data) for run in runs]
            label = holds if data == "dev" and holds else data
            yield f"{measure.title}, {label}", [value for value in values if value is not None]


def _table(results: dict[str, list[Runs]], scores: dict[str, dict[str, list[float]]]) -> Table:
    """A line for each model, beside the first one."""
    columns = list(dict.fromkeys(name for by_name in scores.values() for name in by_name))
    first = next(iter(scores.values()))
    table = Table(["", "parameters", "tokens/s", *columns], note=NOTE)
    for model, by_name in scores.items():
        student = results[model][0][0].student
        reference = first if by_name is not first else {}
        cells = [_cell(by_name.get(name, []), reference.get(name, [])) for name in columns]
        table.rows.append([model, short(student.parameters), number(student.tokens_per_second), *cells])
    return table


def _cell(values: list[float], reference: list[float]) -> str:
    """The median, with the lowest and the highest where there are several, and what it is of the reference's."""
    if not values:
        return NONE
    spread = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
    beside = f", {median(values) / base:.0%}" if reference and (base := median(reference)) else ""
    return f"{number(median(values))}{spread}{beside}"
