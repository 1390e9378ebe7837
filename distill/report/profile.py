"""The page of a report on where the time went: the bottleneck, the phases, utilisation over time."""

from pathlib import Path
from typing import Any

from distill.report.page import NONE, Block, Table, number, percent
from distill.report.plots import SERIES, STYLE, Picture, make_panels, save_figure
from distill.runs.profile.phases import TITLES

GIB = 2**30
FILES = (
    "The folder profile/ has the steps and samples of each rank, and traces of a few steps, operation by operation, "
    "which chrome://tracing and ui.perfetto.dev show."
)


def profile_blocks(folder: Path, results: dict[str, Any]) -> list[Block]:
    """What the profile of a run says; empty where it had none. The figure goes into `folder`/plots."""
    profile = results.get("profile")
    if not profile:
        return []
    blocks: list[Block] = [profile["conclusion"], _findings(profile), _phases(profile)]
    if (picture := utilisation(folder, profile["samples"])) is not None:
        blocks.append(picture)
    blocks.append(FILES)
    return [block for block in blocks if block]


def _findings(profile: dict[str, Any]) -> Block:
    rows = [
        [finding["rule"], percent(finding["lost"], 1), finding["sentence"] if finding["named"] else NONE]
        for finding in profile["findings"]
    ]
    return (
        Table(["Rule", "Time lost", "What would help"], rows, title="What the rules found", text=True) if rows else ""
    )


def _phases(profile: dict[str, Any]) -> Block:
    seconds, steps = profile["phases"], profile["steps"]
    whole = sum(seconds.values())
    if not whole or not steps:
        return ""
    rows = [
        [TITLES[phase], number(of), percent(of / whole, 1), number(1000 * of / steps)] for phase, of in seconds.items()
    ]
    note = f"Mean of {profile['ranks']} rank(s), all {steps:,} steps."
    if times := profile.get("step_seconds"):
        note += (
            f" Of {times['steps']:,} steps one by one, without the first ones and those that were traced: median "
            f"{1000 * times['median']:,.1f} ms, 95 % below {1000 * times['p95']:,.1f} ms, longest "
            f"{1000 * times['longest']:,.1f} ms."
        )
    return Table(["Phase", "Seconds", "Share", "ms a step"], rows, note, "Phases of a step")


def utilisation(folder: Path, samples: dict[str, list[float]]) -> Picture | None:
    """Processors, memory, network and GPU over time, drawn into plots/utilisation.png; None without samples."""
    import matplotlib

    if not samples.get("seconds"):
        return None
    with matplotlib.rc_context(STYLE):
        drawn = [(title, curves) for title, curves in panels_of(samples) if curves]
        figure, panels = make_panels(len(drawn), 2, 1.7)
        for axes, (title, curves) in zip(panels, drawn, strict=True):
            _draw(axes, title, samples["seconds"], curves)
        svg = save_figure(figure, folder, "utilisation")
    return Picture("plots/utilisation.png", svg, "Utilisation over the time of training, of rank 0 and its host.")


def panels_of(samples: dict[str, list[float]]) -> list[tuple[str, dict[str, list[float]]]]:
    """The title of each panel, and its curves by label."""
    wanted: list[tuple[str, dict[str, tuple[str, float]]]] = [
        ("Cores in use", {"rank 0": ("process_cpu", 1)}),
        ("Processors, share of the host", {"busy": ("machine_cpu", 1)}),
        ("Memory, GiB", {"rank 0": ("process_memory", 1 / GIB), "free": ("memory_free", 1 / GIB)}),
        ("Network, MB/s", {"sent": ("network_sent", 1e-6), "received": ("network_received", 1e-6)}),
        ("GPU, share of the time", {"busy": ("gpu_busy", 1)}),
        ("GPU memory, GiB", {"used": ("gpu_memory", 1 / GIB)}),
    ]
    return [
        (
            title,
            {
                label: [scale * value for value in samples[name]]
                for label, (name, scale) in curves.items()
                if name in samples
            },
        )
        for title, curves in wanted
    ]


def _draw(axes: Any, title: str, seconds: list[float], curves: dict[str, list[float]]) -> None:
    marker = "o" if len(seconds) == 1 else None
    for colour, (label, values) in zip(SERIES, curves.items(), strict=False):
        axes.plot(seconds, values, color=colour, label=label, marker=marker)
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    if len(curves) > 1:
        axes.legend(loc="upper right", fontsize=7)
