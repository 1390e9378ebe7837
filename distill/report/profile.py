"""The part of a report on where the time went: the bottleneck, the phases, utilisation over time."""

from pathlib import Path

from distill.report.figures import Sheet, picture
from distill.report.page import Block, Picture, Table
from distill.report.run_figures import machine_panels
from distill.report.words import NONE, number, percent
from distill.runs.facts import Profile
from distill.runs.profile.phases import TITLES
from distill.runtime.progress import counted

FILES = (
    "The folder profile/ has the steps and samples of each rank, and traces of a few steps, operation by operation, "
    "which chrome://tracing and ui.perfetto.dev show."
)


def profile_blocks(folder: Path, profile: Profile) -> list[Block]:
    """The profile of a run. The figure goes into `folder`/plots."""
    drawn = utilisation(folder, profile.samples)
    blocks: list[Block] = [profile.conclusion, _findings(profile), _phases(profile), *([drawn] if drawn else []), FILES]
    return [block for block in blocks if block]


def _findings(profile: Profile) -> Block:
    rows = [
        [finding.rule, percent(finding.lost, 1), finding.sentence if finding.named else NONE]
        for finding in profile.findings
    ]
    head = ["Rule", "Time lost", "What would help"]
    return Table(head, rows, title="What the rules found", text=True) if rows else ""


def _phases(profile: Profile) -> Block:
    total, steps = sum(profile.phases.values()), profile.steps
    if not total or not steps:
        return ""
    rows = [
        [TITLES.get(phase, phase), number(seconds), percent(seconds / total, 1), number(1000 * seconds / steps)]
        for phase, seconds in profile.phases.items()
    ]
    note = f"Mean of {counted(profile.ranks or 1, 'rank')}, all {counted(steps, 'step')}."
    if (times := profile.step_seconds) is not None:
        median, p95, longest = (f"{1000 * (value or 0):,.1f} ms" for value in (times.median, times.p95, times.longest))
        note += (
            f" Single steps ({number(times.steps)}, without the first ones and those that were traced): median "
            f"{median}, 95 % below {p95}, longest {longest}."
        )
    return Table(["Phase", "Seconds", "Fraction", "ms a step"], rows, note, "Phases of a step")


def utilisation(folder: Path, samples: dict[str, list[float]]) -> Picture | None:
    """Processors, memory, network and GPU over time, drawn into plots/utilisation.png; None without samples."""
    panels = machine_panels(samples, samples.get("seconds", []), "seconds")
    if not samples.get("seconds") or not panels:
        return None
    caption = "Utilisation over the time of training, of rank 0 and its host."
    return picture(folder, "utilisation", Sheet(panels, caption, 2, 1.7, "inside"))
