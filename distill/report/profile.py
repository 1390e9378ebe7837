"""The part of a report on where the time went: the bottleneck, the phases, utilisation over time, energy."""

from pathlib import Path

from distill.report.figures import Sheet, picture
from distill.report.page import Block, Picture, Table
from distill.report.run_figures import machine_panels
from distill.report.words import NONE, number, percent
from distill.runs.facts import Finding, Profile
from distill.runs.profile.phases import TITLES


def profile_blocks(folder: Path, profile: Profile) -> list[Block]:
    """What the profile of a run says. The figure goes into `folder`/plots."""
    blocks: list[Block] = [profile.conclusion, _findings(profile), _phases(profile)]
    if (drawn := utilisation(folder, profile.samples)) is not None:
        blocks.append(drawn)
    blocks += [_energy(profile), _files(profile)]
    return [block for block in blocks if block]


def _findings(profile: Profile) -> Block:
    rows = [
        [
            finding.rule,
            percent(finding.lost, 1),
            "yes" if finding.named else "no",
            *(_advice(finding) if finding.named else [NONE, NONE]),
        ]
        for finding in profile.findings
    ]
    head = ["Rule", "Time lost", "Named", "Change", "Predicted speed-up"]
    return Table(head, rows, title="What the rules found", text=True) if rows else ""


def _advice(finding: Finding) -> list[str]:
    """What to change, and how many times as fast that should be."""
    change = " ".join(f"{name}={value}" for name, value in finding.change.items())
    return [change or finding.advice, f"{finding.gain:.2f}"]


def _phases(profile: Profile) -> Block:
    whole, steps = sum(profile.phases.values()), profile.steps
    if not whole or not steps:
        return ""
    rows = [
        [TITLES.get(phase, phase), number(seconds), percent(seconds / whole, 1), number(1000 * seconds / steps)]
        for phase, seconds in profile.phases.items()
    ]
    note = f"Mean of {profile.ranks} rank(s), all {steps:,} steps."
    if (times := profile.step_seconds) is not None:
        median, p95, longest = (f"{1000 * (value or 0):,.1f} ms" for value in (times.median, times.p95, times.longest))
        note += (
            f" Of {number(times.steps)} steps one by one, without the first ones and those that were traced: median "
            f"{median}, 95 % below {p95}, longest {longest}."
        )
    return Table(["Phase", "Seconds", "Share", "ms a step"], rows, note, "Phases of a step")


def _energy(profile: Profile) -> str:
    known = [f"{part} {number(kwh)} kWh" for part, kwh in profile.energy.items()]
    return f"Energy: {', '.join(known) or 'this machine does not say'}."


def _files(profile: Profile) -> str:
    notes = " ".join(f"{note[0].upper()}{note[1:]}." for note in profile.notes)
    return (
        f"{notes} The folder profile/ has the steps and samples of each rank, and traces of a few steps, operation by "
        "operation, which chrome://tracing and ui.perfetto.dev show."
    ).strip()


def utilisation(folder: Path, samples: dict[str, list[float]]) -> Picture | None:
    """Processors, memory, disk, network and GPU over time, drawn into plots/utilisation.png; None without samples."""
    panels = machine_panels(samples, samples.get("seconds", []), "seconds")
    caption = "Utilisation over the time of training, of rank 0 and its host."
    return picture(folder, "utilisation", Sheet(panels, caption, 2, 1.7, "inside")) if samples.get("seconds") else None
