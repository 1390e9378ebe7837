"""Projections as text: the run, a table by nodes, what binds, the fastest and the cheapest, and what is assumed."""

from collections.abc import Sequence

from distill.project.choose import GPUS, Choice, Limits
from distill.project.machines import MachineCases
from distill.project.run import Projection, Range
from distill.project.workload import Workload

HEAD = (
    "machine", "nodes", "GPUs", "rows/step", "s/step", "compute", "exchange", "stragglers", "storage", "binds",
    "hours", "cost", "T(1)/(N T(N))",
)  # fmt: skip
RANGES = (
    "Ranges: all of a machine's numbers at their worst and at their best, as its entry gives them; they are no "
    "confidence interval."
)


def number(value: float) -> str:
    """Three digits, and no exponent where people want to compare."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ranged(value: Range, scale: float = 1.0) -> str:
    return f"{number(scale * value.usual)} ({number(scale * value.least)}-{number(scale * value.most)})"


def row(found: Projection) -> list[str]:
    """A projection as a row below `HEAD`; one that does not fit into memory has no times."""
    place = [found.machine.name, f"{found.nodes:,}", f"{found.gpus:,}", f"{found.run.rows_of_step:,}"]
    if not found.fits:
        return [*place, *["-"] * 5, found.binds, *["-"] * 3]
    step = found.run.step
    parts = [number(1000 * each) for each in step.parts.values()]
    seconds = number(step.total)
    share = f"{found.efficiency.usual:.0%} ({found.efficiency.least:.0%}-{found.efficiency.most:.0%})"
    return [*place, seconds, *parts, found.binds, ranged(found.hours), ranged(found.cost), share]


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first to the left and the others to the right."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    return "\n".join(
        "  ".join(f"{text:<{width}}" if not n else f"{text:>{width}}" for n, (text, width) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(line, widths, strict=True)) for line in (head, *rows))
    )


def described(work: Workload) -> str:
    """The run in two lines: its models and what a row takes."""
    shapes = [*(each.shape for each in work.teachers), work.student]
    models = "; ".join(f"{each.name} {_million(each.parameters)}, {each.layers} x {each.width}" for each in shapes)
    operations = 3 * work.student.operations(work.positions)
    for teacher in work.teachers:
        if teacher.cached is None:
            operations += teacher.shape.operations(work.positions if work.teacher_head else 0.0)
    reach = f"{work.positions:.0f} of {work.length} positions of a row reach the head"
    return (
        f"{models}\n{reach}; a row takes {operations / 1e9:,.1f} Gop and {work.row_bytes:,.0f} bytes of storage; "
        f"precision={work.precision}, backend={work.backend}"
    )


def _million(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def best(choice: Choice, limits: Limits) -> str:
    """The fastest and the cheapest of the table."""
    wanted = [f"{each:g} {unit}" for each, unit in ((limits.hours, "hours"), (limits.budget, "of budget")) if each]
    within = f" within {' and '.join(wanted)}" if wanted else ""
    if choice.fastest is None or choice.cheapest is None:
        return f"Nothing of this fits{within or ' into memory'}."
    lines = []
    for name, found in (("Fastest", choice.fastest), ("Cheapest", choice.cheapest)):
        usual = found.machine.usual
        lines.append(
            f"{name}{within}: {found.nodes:,} x {usual.name} ({found.gpus:,} GPUs, {usual.title}), "
            f"{ranged(found.hours)} hours, {ranged(found.cost)}; {found.binds} binds"
        )
    return "\n".join(lines)


def memory_lines(projections: Sequence[Projection]) -> list[str]:
    """For each machine on which the run does not fit, what it lacks and which settings would help."""
    lines = []
    for name in dict.fromkeys(each.machine.name for each in projections if not each.fits):
        first = next(each for each in projections if each.machine.name == name and not each.fits)
        step, has = first.run.step, first.machine.usual.memory
        ways = " or ".join(step.cures) or "no setting that is known here; take a machine with more, or smaller models"
        lines.append(
            f"memory: on {first.nodes:,} x {name} a GPU needs {step.memory / 1e9:.3g} GB and has {has / 1e9:.3g}; it "
            f"would fit with {ways}"
        )
    return lines


def notes(work: Workload, projections: Sequence[Projection], machines: Sequence[MachineCases]) -> list[str]:
    """What the numbers rest on."""
    lines = [RANGES]
    growing = len({each.run.rows_of_step for each in projections}) > 1
    if growing:
        lines.append(
            "More GPUs take more rows a step, as train.accumulate stands; train.rows_per_step=NUMBER keeps a step, and "
            "so the student, the same."
        )
        if work.steps is not None:
            lines.append(f"train.steps={work.steps} is then more text for more GPUs.")
    if work.rows_per_step is not None and work.rows_per_step < GPUS[-1]:
        lines.append(f"train.rows_per_step={work.rows_per_step} has no row for more than so many GPUs.")
    if work.score_assumed:
        lines.append("The size of evaluation sets is not known here and taken to be a million tokens each.")
    if work.backend == "single":
        lines.append("backend=single is projected as backend=ddp.")
    for machine in machines:
        if machine.assumed:
            lines.append(f"Assumed of {machine.name}: {', '.join(machine.assumed)}.")
    return lines


def shares(found: Projection) -> str:
    """What of the hours is the start, training, scoring and saving."""
    run = found.run
    parts = {"start": run.start, "training": run.training, "scoring": run.scoring, "checkpoints": run.saving}
    text = ", ".join(
        f"{name} {number(seconds / 3600)} h ({seconds / run.seconds:.1%})" for name, seconds in parts.items()
    )
    return f"{found.nodes:,} x {found.machine.name}: {run.steps:,.0f} steps, {run.tokens:.3g} tokens: {text}"


def report(
    work: Workload,
    projections: Sequence[Projection],
    left_out: Sequence[str],
    choice: Choice,
    limits: Limits,
    machines: Sequence[MachineCases],
) -> str:
    """All that the command prints."""
    used = [each for each in machines if any(found.machine is each for found in projections)]
    parts = [
        described(work),
        "",
        aligned(HEAD, [row(each) for each in projections]),
        "(s/step in seconds, its parts in milliseconds; hours and cost with their range)",
        "",
        best(choice, limits),
        *([shares(choice.cheapest)] if choice.cheapest else []),
        *memory_lines(projections),
        *(f"left out: {each}" for each in left_out),
        "",
        *notes(work, projections, used),
    ]
    return "\n".join(parts)
