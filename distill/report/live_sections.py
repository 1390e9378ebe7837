"""What the page of a run that is under way, or has stopped, shows."""

from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from distill.report import curves
from distill.report.curves import Line, Panel
from distill.report.history import history_blocks
from distill.report.lookup import axis_of, titles_of_terms, usable, value_at
from distill.report.page import NONE, Block, Code, Section, Table, Tiles, number, percent, short, time_of
from distill.report.plots import Picture
from distill.report.profile import panels_of
from distill.report.series import MOST, curve

SERIES = tuple(f"var(--series-{number})" for number in range(1, 7))
AGAIN = "The same command, in the same folder, goes on from the newest checkpoint."
# What becomes of a run by its exit status, when the same command is given again; of signals, 128 + number, as of 4.
AFTER = {
    1: f"This is a bug, of Distill or of code that a setting names. {AGAIN}",
    2: "Nothing is lost. Once what the message names is cured, the same command goes on.",
    3: "Nothing was published. The same command goes on from the newest good checkpoint.",
    74: f"Nothing that was whole before is lost. When there is room: {AGAIN[0].lower()}{AGAIN[1:]}",
}


@dataclass
class Ending:
    """How a run has stopped: its exit status, the line that it ended with, and of a bug the traceback."""

    status: int
    message: str
    traceback: str = ""


@dataclass
class Snapshot:
    """A run at one moment.

    Attributes:
        written: the moment, in words.
        every: seconds until the next page.
        description: what the run is, by the names of results.json, with the history so far; empty before it is known.
        step, steps: done, and after which the run ends (None: the clock ends it).
        left: seconds until it ends, where that is known.
        share: how much of the run is done, from 0 to 1, where that is known.
        activities: the progress of what is being done now, the innermost last.
        latest: the newest line of metrics.jsonl.
        points: those lines, averaged, with `exchange_wait` beside them.
        machine: samples of the host of rank 0, by name (`distill.runs.profile.sampler`).
        logs: the last lines of each rank's log; of a run of one process what it has said.
        num_logs: ranks that have one.
    """

    recipe: str
    command: str
    folder: str
    written: str
    every: float
    description: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    steps: int | None = None
    left: float | None = None
    share: float | None = None
    activities: list[str] = field(default_factory=list)
    latest: dict[str, Any] = field(default_factory=dict)
    points: list[dict[str, float]] = field(default_factory=list)
    machine: dict[str, list[float]] = field(default_factory=dict)
    logs: dict[int, list[str]] = field(default_factory=dict)
    num_logs: int = 1
    ending: Ending | None = None


def title_of(run: Snapshot) -> str:
    """The title of the page, which a tab of a browser shows the beginning of."""
    if run.ending is not None:
        return f"{run.recipe}: finished, without a report" if run.ending.status == 0 else f"{run.recipe}: stopped"
    return f"{run.recipe}: under way" if run.share is None else f"{percent(run.share)} of {run.recipe}"


def sections(run: Snapshot) -> list[Section]:
    """The page of a run; parts of which nothing is known yet are left out."""
    axis = axis_of(run.description)
    parts = [
        Section("", _ending(run, run.ending) if run.ending else _headline(run)),
        Section("Curves so far", _curves(run)),
        Section(f"{axis.capitalize()} by {axis}, so far", history_blocks(run.description, {})),
        Section("What it waits for, and what the machine does", _machine(run)),
        Section("The last lines of every rank" if run.num_logs > 1 else "What it said last", _logs(run)),
        Section("This run", _facts(run)),
    ]
    return [part for part in parts if part.blocks]


def _headline(run: Snapshot) -> list[Block]:
    idle = "between two pieces of work" if run.description.get("corpus") else "preparing models and text"
    now = "; ".join(run.activities) or idle
    renewed = (
        f"Written {run.written}; renews itself every {time_of(run.every)}, and becomes the report when the run ends."
    )
    return [f"Under way: {now}.", *_tiles(run), renewed]


def _ending(run: Snapshot, ending: Ending) -> list[Block]:
    if ending.status == 0:
        report = f"distill report run={run.folder}"
        return ["The run is finished, but its report could not be written. This command writes it:", Code(report)]
    after = AFTER.get(ending.status, f"What is done so far is kept. {AGAIN}")
    blocks: list[Block] = [
        f"Stopped with status {ending.status}: {ending.message}",
        after,
        Code(run.command, wrap=True),
    ]
    traceback: list[Block] = [Code(ending.traceback, "Traceback")] if ending.traceback else []
    return [*blocks, f"Folder: {run.folder}. Written {run.written}.", *traceback, *_tiles(run)]


def _tiles(run: Snapshot) -> list[Block]:
    latest = run.latest
    of_all = f"step {number(run.step)}" + (f" of {number(run.steps)}" if run.steps else "")
    known = [
        (percent(run.share), of_all),
        (time_of(run.left) or NONE, "left, at this rate" if run.ending is None else ""),
        (number(latest.get("loss/total")), "loss of the newest steps"),
        (number(latest.get("tokens_per_second")), "tokens a second"),
        (percent(latest.get("data_wait"), 1), "of the time waiting for data"),
        (percent(latest.get("exchange_wait"), 1), "of the time in exchanges between ranks"),
        (number(latest.get("skipped")), "steps skipped, not finite") if latest.get("skipped") else (NONE, ""),
    ]
    if run.share is None and run.step:
        known[0] = (number(run.step), "steps")
    shown = [(value, text) for value, text in known if value != NONE and text]
    return [Tiles(shown)] if shown else []


def _curves(run: Snapshot) -> list[Block]:
    titles = titles_of_terms(run.description)
    for point in run.points:
        titles |= {name[5:]: name[5:] for name in point if name.startswith("loss/") and name[5:] not in titles}
    colours = {"total": "currentColor"} | dict(zip((name for name in titles if name != "total"), cycle(SERIES)))
    terms = [name for name in titles if curve(run.points, "step", f"loss/{name}")[0]]
    terms = terms[1:] if len(terms) == 2 and terms[0] == "total" else terms  # the total of one term is that term again
    skipped = _skipped(run.points)
    panels = [
        Panel(
            "Loss, weighted sum" if name == "total" else f"Loss: {titles[name]}",
            "step",
            [Line(*curve(run.points, "step", f"loss/{name}"), colours[name], smooth=True)],
            marks=skipped,
        )
        for name in terms
    ]
    for name, title, from_zero, colour in (
        ("lr", "Learning rate", True, SERIES[0]),
        ("grad_norm", "Gradient norm, before clipping", False, SERIES[1]),
        ("loss_scale", "Loss scale", False, SERIES[2]),
        ("tokens_per_second", "Training tokens per second", True, SERIES[0]),
    ):
        x, y = curve(run.points, "step", name)
        if x:
            smooth = name in ("grad_norm", "tokens_per_second")
            panels.append(Panel(title, "step", [Line(x, y, colour, smooth=smooth)], from_zero))
    if not panels:
        return []
    caption = f"By step: what was logged faintly, its moving average on top; of long runs up to {MOST} means."
    return [curves.picture(panels, caption + (" Dotted lines: steps that were skipped." if skipped else ""))]


def _skipped(points: list[dict[str, float]]) -> list[float]:
    """The points at which the count of skipped steps has grown."""
    x, counts = curve(points, "step", "skipped")
    return [step for step, count, before in zip(x, counts, [0.0, *counts], strict=False) if count > before]


def _machine(run: Snapshot) -> list[Block]:
    waits = [
        Line(*curve(run.points, "step", name), colour, label)
        for name, colour, label in (("data_wait", SERIES[0], "data"), ("exchange_wait", SERIES[3], "exchange"))
    ]
    percents = [Line(line.x, [100 * value for value in line.y], line.colour, line.label) for line in waits if line.x]
    panels = [Panel("Waiting, % of the time", "step", percents, True)] if percents else []
    seconds = run.machine.get("seconds") or []
    stride = -(-len(seconds) // MOST) or 1
    minutes = [value / 60 for value in seconds[::stride]]
    for title, of in panels_of(run.machine) if seconds else []:
        lines = [
            Line(minutes, values[::stride], colour, label)
            for colour, (label, values) in zip(SERIES, of.items(), strict=False)
        ]
        if lines:
            panels.append(Panel(title, "minutes of this start", lines, True))
    if not panels:
        return []
    caption = "The machine is the host of rank 0."
    if any(line.label == "exchange" for line in percents):
        caption += " An exchange lasts from its beginning to its end, part of which may lie beside the last backward."
    found: Picture = curves.picture(panels, caption)
    return [found]


def _logs(run: Snapshot) -> list[Block]:
    shown = {rank: "\n".join(lines) or "nothing yet" for rank, lines in run.logs.items()}
    if run.num_logs <= 1:
        return [Code(text, wrap=True) for text in shown.values()]
    first, *others = [
        Code(text, f"rank {rank}" if rank else "", wrap=True) for rank, text in sorted(shown.items())
    ] or [Code("no log yet", wrap=True)]
    note = f"Rank 0 first; the others unfold. The logs themselves lie in {run.folder}/logs."
    if run.num_logs > len(shown):
        note += f" Of {run.num_logs} ranks those {len(shown)} are shown that wrote last."
    return [note, first, *others]


def _facts(run: Snapshot) -> list[Block]:
    found = run.description
    models = [
        f"{value_at(found, name, 'name')}, {short(value_at(found, name, 'parameters'))} parameters"
        for name in ("teacher", "student")
        if found.get(name)
    ]
    rows = [
        ("Corpus", value_at(found, "corpus", "name")),
        ("Rows", _amount(value_at(found, "corpus", "rows"))),
        ("Models", "; ".join(models)),
        ("Rows per step", _amount(value_at(found, "backend", "rows_per_step"))),
        ("Backend", value_at(found, "backend", "name")),
        ("Ranks", _amount(value_at(found, "backend", "ranks"))),
        ("Device", value_at(found, "environment", "device")),
        ("Folder", run.folder),
    ]
    shown = [[label, str(value)] for label, value in rows if value]
    command: list[Block] = [] if run.ending else [Code(run.command, wrap=True)]
    return [Table(["", ""], shown, text=True), *command]


def _amount(value: Any) -> str | None:
    return number(value) if usable(value) else None
