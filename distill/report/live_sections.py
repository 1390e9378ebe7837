"""What the page of a run that is under way, or has stopped, shows."""

import os
import shlex
from dataclasses import dataclass, field, replace

from distill.report.figures import SERIES, Line, Panel, svg_picture
from distill.report.history import history_blocks
from distill.report.live_logs import MAX_POINTS
from distill.report.page import Block, Code, Section, Tiles, facts_table
from distill.report.run_figures import loss_panels, machine_panels, optimizer_panels, points_of, throughput
from distill.report.summary import reproduced_by
from distill.report.words import NONE, number, percent, short, time_of
from distill.runs.record import Record

AGAIN = "The same command, in the same folder, resumes from the newest checkpoint."
# What the same command does when it is given again, by exit status; every other status: the text in `_ending`.
AFTER = {
    1: f"This is a bug, of Distill or of code that a setting names. {AGAIN}",
    2: "Nothing is lost. Correct what the message names and give the same command: it resumes.",
    3: "Nothing was published. The same command resumes from the newest good checkpoint.",
    74: f"No finished file is lost. Make room or repair the storage. {AGAIN}",
}


@dataclass
class Ending:
    """How a run has stopped: its exit status, the line that it ended with, and of a bug the traceback."""

    status: int
    message: str
    traceback: str = ""


@dataclass
class RunView:
    """A run at one moment.

    Attributes:
        written: the moment, as text.
        every: seconds until the next page.
        record: the facts on the run and its history, so far.
        step, steps: done, and after which the run ends (None: the clock ends it).
        left: estimated seconds until it ends; None: no estimate yet.
        fraction: how much of the run is done, from 0 to 1; None before its first step.
        activities: the progress of what is being done now, the innermost last.
        latest: the newest line of metrics.jsonl.
        points: those lines, averaged, with `exchange_wait` beside them.
        machine: samples of the host of rank 0, by name (`distill.runs.profile.sampler`).
        logs: the last lines of each rank's log; of a run of one process its own log.
        num_logs: ranks that have one.
    """

    folder: str
    written: str
    every: float
    record: Record
    step: int = 0
    steps: int | None = None
    left: float | None = None
    fraction: float | None = None
    activities: list[str] = field(default_factory=list)
    latest: dict[str, float] = field(default_factory=dict)
    points: list[dict[str, float]] = field(default_factory=list)
    machine: dict[str, list[float]] = field(default_factory=dict)
    logs: dict[int, list[str]] = field(default_factory=dict)
    num_logs: int = 1
    ending: Ending | None = None


def title_of(run: RunView) -> str:
    """The title of the page, which a tab of a browser shows the beginning of."""
    name = os.path.basename(run.folder.rstrip("/"))  # by which its user knows it; a recipe may be changed beyond itself
    if run.ending is not None:
        return f"{name}: finished, without a report" if run.ending.status == 0 else f"{name}: stopped"
    return f"{name}: under way" if run.fraction is None else f"{percent(run.fraction)} of {name}"


def sections(run: RunView) -> list[Section]:
    """The page of a run; sections without content yet are left out."""
    axis = run.record.history_by
    parts = [
        Section("", _ending(run, run.ending) if run.ending else _headline(run)),
        Section("Curves so far", _curves(run)),
        Section(f"Learning curve by {axis}, so far", history_blocks(run.record, {})),
        Section("Waiting and the machine", _machine(run)),
        Section("The last lines of every rank" if run.num_logs > 1 else "The last lines of its log", _logs(run)),
        Section("This run", _facts(run)),
    ]
    return [part for part in parts if part.blocks]


def _headline(run: RunView) -> list[Block]:
    idle = "between two phases" if run.record.corpus.name else "preparing models and text"
    now = "; ".join(run.activities) or idle
    renewed = f"Written {run.written}; reloads every {time_of(run.every)}, and becomes the report when the run ends."
    return [f"Under way: {now}.", *_tiles(run), renewed]


def _ending(run: RunView, ending: Ending) -> list[Block]:
    if ending.status == 0:
        report = shlex.join(["distill", "report", f"run={os.path.abspath(run.folder)}"])
        return ["The run is finished, but its report could not be written. This command writes it:", Code(report)]
    after = AFTER.get(ending.status, f"What is done so far is kept. {AGAIN}")
    blocks: list[Block] = [
        f"Stopped with status {ending.status}: {ending.message}",
        after,
        *reproduced_by(run.record.command_from_anywhere),
    ]
    traceback: list[Block] = [Code(ending.traceback, "Traceback")] if ending.traceback else []
    return [*blocks, f"Folder: {run.folder}. Written {run.written}.", *traceback, *_tiles(run)]


def _tiles(run: RunView) -> list[Block]:
    latest = run.latest
    of_all = f"step {number(run.step)}" + (f" of {number(run.steps)}" if run.steps else "")
    candidates = [
        (percent(run.fraction), of_all),
        (time_of(run.left) or NONE, "left, at this rate" if run.ending is None else ""),
        (number(latest.get("loss/total")), "loss of the newest steps"),
        (number(latest.get("tokens_per_second")), "tokens a second"),
        (percent(latest.get("data_wait"), 1), "of the time waiting for data"),
        (percent(latest.get("exchange_wait"), 1), "of the time in exchanges between ranks"),
        (number(latest.get("skipped")), "steps skipped, not finite") if latest.get("skipped") else (NONE, ""),
    ]
    if run.fraction is None and run.step:
        candidates[0] = (number(run.step), "steps")
    shown = [(value, text) for value, text in candidates if value != NONE and text]
    return [Tiles(shown)] if shown else []


def _curves(run: RunView) -> list[Block]:
    losses, speed = loss_panels(run.record, run.points, "Loss: "), throughput(run.points)
    panels = [*losses, *optimizer_panels(run.points), *([speed] if speed else [])]
    if not panels:
        return []
    caption = f"Faint: logged values, at most {MAX_POINTS} means of them in a long run. On top: their moving average."
    marked = " Dotted lines: steps that were skipped." if losses and losses[0].marks else ""
    return [svg_picture(panels, caption + marked)]


def _machine(run: RunView) -> list[Block]:
    waits = [
        Line(*points_of(run.points, "step", name), colour, label)
        for name, colour, label in (("data_wait", SERIES[0], "data"), ("exchange_wait", SERIES[3], "exchange"))
    ]
    percents = [replace(line, y=[100 * value for value in line.y]) for line in waits if line.x]
    panels = [Panel("Waiting, % of the time", "step", percents, from_zero=True)] if percents else []
    seconds = run.machine.get("seconds") or []
    stride = -(-len(seconds) // MAX_POINTS) or 1
    samples = {name: values[::stride] for name, values in run.machine.items()}
    minutes = [value / 60 for value in seconds[::stride]]
    panels += machine_panels(samples, minutes, "minutes of this start") if minutes else []
    if not panels:
        return []
    caption = "The machine is the host of rank 0."
    if any(line.label == "exchange" for line in percents):
        caption += " The time of an exchange counts in full, although part of it may overlap the last backward pass."
    return [svg_picture(panels, caption)]


def _logs(run: RunView) -> list[Block]:
    shown = {rank: "\n".join(lines) or "nothing yet" for rank, lines in run.logs.items()}
    if run.num_logs <= 1:
        return [Code(text, wrap=True) for text in shown.values()]
    first, *others = [
        Code(text, f"rank {rank}" if rank else "", wrap=True) for rank, text in sorted(shown.items())
    ] or [Code("no log yet", wrap=True)]
    note = f"Rank 0 first; the others unfold. The logs themselves lie in {run.folder}/logs."
    if run.num_logs > len(shown):
        note += f" The {len(shown)} of {run.num_logs} ranks that wrote last are shown."
    return [note, first, *others]


def _facts(run: RunView) -> list[Block]:
    record = run.record
    models = [
        f"{model.name}, {short(model.parameters)} parameters" for model in (record.teacher, record.student) if model
    ]
    rows = [
        ("Corpus", record.corpus.name),
        ("Sequences", number(record.corpus.sequences)),
        ("Models", "; ".join(models)),
        ("Sequences per step", number(record.backend.sequences_per_step)),
        ("Backend", record.backend.name),
        ("Ranks", number(record.backend.ranks)),
        ("Device", record.environment.device),
        ("Folder", run.folder),
    ]
    command = [] if run.ending else reproduced_by(record.command_from_anywhere)
    return [*facts_table("", rows), *command]
